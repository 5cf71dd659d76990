# SPDX-License-Identifier: Apache-2.0
"""Expected failures, told in three lines and without a traceback."""

import errno
import sys
from collections.abc import Callable


class Problem(Exception):
    """What happened, where, and what to do next."""

    def __init__(self, what: str, where: str, next_step: str) -> None:
        super().__init__(f"{what}\n  {where}\n  next: {next_step}")


def run(main: Callable[[], int | None]) -> None:
    """Exit with main's status; a Problem or a full disk becomes its message and status 1."""
    try:
        status = main()
    except Problem as problem:
        print(f"error: {problem}", file=sys.stderr)
        status = 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        place = error.filename or "in this checkout, the cache folder or the temporary folder"
        full = Problem("the disk is full", str(place), "make room and run the command again")
        print(f"error: {full}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)

# SPDX-License-Identifier: Apache-2.0
"""The measured process's side of the conversation: a job comes in, events and a result go out.

Imports the standard library only: it runs in other environments than ours.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EVERY = 0.5  # seconds between two events


class Report:
    """`job` is what the parent asked for; the last argument is the descriptor it reads."""

    def __init__(self) -> None:
        self.job: dict[str, Any] = json.loads(sys.stdin.read())
        self._out = os.fdopen(int(sys.argv[1]), "w", buffering=1)
        self._last = 0.0

    def share(self, done: float) -> None:
        """Which share of the work is done, 0 to 1."""
        now = time.monotonic()
        if now - self._last > EVERY:
            self._last = now
            print(json.dumps({"share": done}), file=self._out)

    def result(self, figures: dict[str, Any]) -> None:
        print(json.dumps({"result": figures}), file=self._out)


def peak_memory() -> int:
    """Bytes: the peaks of this process and of all below it that still run, added."""
    return sum(_status(pid, "VmHWM") for pid in (os.getpid(), *_descendants(os.getpid())))


def anonymous_memory() -> int:
    """Resident bytes of this process that no file backs."""
    return _status(os.getpid(), "RssAnon")


def _status(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0  # a process that has ended and was not waited for has no memory


def _descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            yield child
            yield from _descendants(child)

# SPDX-License-Identifier: Apache-2.0
"""Runs one measurement in a process of its own and gives back what it found."""

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.cache import cache_dir
from tools.errors import Problem
from tools.pins import ROOT

PATIENCE = 60.0  # seconds that a process may take to end after its result
CAUSE = re.compile(r"(?:[\w.]*(?:Error|Exception)): .+")


def run(
    name: str,
    python: Path,
    module: str,
    job: dict[str, Any],
    environment: dict[str, str],
    progress: Callable[[float], None] = lambda share: None,
) -> dict[str, Any]:
    """The result of `python -m tools.bench.subjects.MODULE` for a job.

    name: of its log; progress is called with the share of the work that is done. Raises Problem
    with the first error of the log when the process ends without a result.
    """
    log = cache_dir() / "logs" / f"bench-{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    reader, writer = os.pipe()
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(python), "-m", f"tools.bench.subjects.{module}", str(writer)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=[writer],
            text=True,
            start_new_session=True,  # the engine's own processes end with it, see below
        )
    os.close(writer)
    result = None
    try:
        with os.fdopen(reader) as events:
            with contextlib.suppress(BrokenPipeError):  # it died at once; its log says why
                process.stdin.write(json.dumps(job))
                process.stdin.close()
            for line in events:
                event = json.loads(line)
                if (result := event.get("result")) is not None:
                    break
                progress(event["share"])
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if result is None:
        raise Problem(f"{name} ended without a result", _cause(log, process.returncode), f"read {log}")
    return result


def _cause(log: Path, status: int) -> str:
    found = CAUSE.search(log.read_text(errors="replace"))
    return found[0] if found else f"status {status}, and its log names no error"

# SPDX-License-Identifier: Apache-2.0
"""The server as a child process: its log, its start-up, its end."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

from tools.errors import Problem

POLL = 0.5  # seconds between two questions whether it is ready
QUIET = 10.0  # seconds between two lines of progress where there is no terminal
PATIENCE = 30.0  # seconds it may take to stop before it is killed
# The last line of a traceback, or argparse's message; not a warning that mentions an error.
CAUSE = re.compile(r"^(?:[\w.]*(?:Error|Exception)|\S+: error): .+")
PREFIX = re.compile(r"^\(\w+[^)]*\) (?:\w+ [\d-]+ [\d:]+ )?(?:\[[^\]]+\] )?")


class Server:
    """Starts `command`; everything it prints goes to `log`, and on after `show()`."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._interrupted = False
        self._shown = False
        self._latest = ""
        # Its own session: Ctrl-C reaches it once, through us, not twice.
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._forward)
        self._pump = threading.Thread(target=self._copy, daemon=True)
        self._pump.start()

    def wait_until_ready(self, url: str) -> None:
        """Return when `url` answers 200. Raises Problem with the cause if the server ends."""
        started = shown = time.monotonic()
        while not _answers(url):
            if self.process.poll() is not None:
                self._pump.join()
                self._clear()
                if self._interrupted:
                    raise KeyboardInterrupt
                raise Problem(
                    "the server did not start",
                    self._cause(),
                    f"correct MODEL, KV or ARGS; the whole log is {self.log}",
                )
            now = time.monotonic()
            if sys.stderr.isatty():
                line = f"starting, {now - started:3.0f} s   {self._latest}"
                print(f"\r\033[K{line[:100]}", end="", file=sys.stderr, flush=True)
            elif now - shown > QUIET:
                shown = now
                print(f"starting, {now - started:3.0f} s", file=sys.stderr, flush=True)
            time.sleep(POLL)
        self._clear()
        print(f"ready after {time.monotonic() - started:.0f} s", file=sys.stderr)

    def show(self) -> None:
        """From now on its log goes to the terminal as well."""
        self._shown = True

    def wait(self) -> int:
        """Its exit status; 0 when we were asked to stop it."""
        status = self.process.wait()
        self._pump.join()
        return 0 if self._interrupted else status

    def _forward(self, number: int, _frame: object) -> None:
        """Ask it to stop; a second signal, or PATIENCE, ends it and its children."""
        if self._interrupted:
            self._kill()
            return
        self._interrupted = True
        self.process.send_signal(number)
        deadline = threading.Timer(PATIENCE, self._kill)
        deadline.daemon = True
        deadline.start()

    def _kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)

    def _copy(self) -> None:
        assert self.process.stdout is not None
        with self.log.open("w") as log:
            for line in self.process.stdout:
                log.write(line)
                log.flush()
                if self._shown:
                    sys.stdout.write(line)
                    sys.stdout.flush()
                elif text := PREFIX.sub("", line).strip():
                    self._latest = text

    def _cause(self) -> str:
        """The first error in the log: what follows is its echo in other processes."""
        lines = [PREFIX.sub("", line) for line in self.log.read_text().splitlines()]
        for line, following in zip(lines, [*lines[1:], ""], strict=True):
            if CAUSE.match(line):
                # pydantic states its reason on a line of its own
                return f"{line} {following.strip()}" if "validation error" in line else line
        return f"it ended with status {self.process.returncode} and named no error"

    def _clear(self) -> None:
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False

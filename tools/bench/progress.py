# SPDX-License-Identifier: Apache-2.0
"""How far a bench is, and how long it will still take."""

import sys
from time import monotonic

QUIET = 30.0  # seconds between two lines where there is no terminal
WIDTH = 24


class Progress:
    """A line on stderr: rewritten on a terminal, now and then elsewhere.

    expected: seconds by label of every run that is still to do, in order; corrected by `end`, for
    later runs of the same contestant, and by what a run reports while it goes on.
    """

    def __init__(self, expected: list[tuple[str, float]]) -> None:
        self.left = list(expected)
        self.begun = monotonic()
        self.started = self.shown = self.begun
        self.label = ""

    def begin(self, label: str) -> None:
        self.label, self.started = label, monotonic()
        self.update(0.0)

    def update(self, share: float) -> None:
        """share: of the present run, 0 to 1."""
        now = monotonic()
        terminal = sys.stderr.isatty()
        if share and now - self.shown < (0.3 if terminal else QUIET):
            return
        self.shown = now
        spent = now - self.started
        whole = max(self.left[0][1], spent / share if share > 0.1 else spent)
        rest = whole - spent + sum(seconds for _, seconds in self.left[1:])
        done = (now - self.begun) / (now - self.begun + rest) if rest else 1.0
        bar = "#" * int(WIDTH * done)
        line = f"[{bar:{WIDTH}}] {done:4.0%}  {self.label}, {share:.0%}; {clock(rest)} left"
        print(f"\r\033[K{line}" if terminal else line, end="" if terminal else "\n", file=sys.stderr)
        sys.stderr.flush()

    def end(self) -> None:
        """The present run is over; the others with its label are expected to take as long."""
        took = monotonic() - self.started
        self.left = [(x, took if x == self.left[0][0] else s) for x, s in self.left[1:]]

    def close(self) -> None:
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"

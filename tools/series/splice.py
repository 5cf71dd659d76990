# SPDX-License-Identifier: Apache-2.0
"""Text surgery: our lines go in, every other byte stays as it is."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os.path import commonprefix


class Miss(Exception):
    """An edit's place was not found, or not as often as it must be.

    `lost` is the symbol that is gone, to be looked for elsewhere.
    """

    def __init__(self, message: str, lost: str = "") -> None:
        super().__init__(message)
        self.lost = lost


@dataclass(frozen=True)
class Splice:
    """`text` in place of the characters [start, end).

    `once`: several edits may ask for it, and it is made once. `word` is the operator of a
    widened condition: `or` and `and` must not meet.
    """

    start: int
    end: int
    text: str
    once: bool = False
    word: str = ""


def spliced(text: str, splices: Iterable[Splice]) -> str:
    """All splices applied; those at one place keep their order."""
    pieces, at, done = [], 0, set()
    for splice in sorted(splices, key=lambda splice: (splice.start, splice.end)):
        if splice.once and splice in done:
            continue
        done.add(splice)
        pieces += [text[at : splice.start], splice.text]
        at = splice.end
    return "".join([*pieces, text[at:]])


def clash(one: Splice, other: Splice) -> bool:
    """Whether two splices want the same text, or change one condition both ways."""
    first, second = sorted((one, other), key=lambda splice: (splice.start, splice.end))
    if (first.start, first.end) == (second.start, second.end):
        return first.end > first.start or {first.word, second.word} == {"or", "and"}
    return second.start < first.end


def line_start(text: str, at: int) -> int:
    return text.rfind("\n", 0, at) + 1


def line_end(text: str, at: int) -> int:
    """Just past the newline of the line that holds `at`."""
    newline = text.find("\n", at)
    return len(text) if newline < 0 else newline + 1


def indent_at(text: str, at: int) -> str:
    """The blanks that open the line which holds `at`."""
    line = text[line_start(text, at) : line_end(text, at)]
    return line[: len(line) - len(line.lstrip())]


def after_line(text: str, at: int, block: str) -> Splice:
    """`block` (whole lines) below the line that holds `at`."""
    end = line_end(text, at)
    if end == len(text) and not text.endswith("\n"):
        return Splice(end, end, "\n" + block.removesuffix("\n"))
    return Splice(end, end, block)


def indented(ours: str, indent: str) -> str:
    """Our lines at `indent`, each ended by a newline."""
    lines = ours.rstrip().splitlines()
    return "".join(f"{indent}{line}\n" if line.strip() else "\n" for line in lines)


def difference(old: str, new: str) -> Splice:
    """The one stretch of whole lines in which two texts differ."""
    before, after = old.splitlines(keepends=True), new.splitlines(keepends=True)
    top, bottom = in_common(before, after)
    start = sum(map(len, before[:top]))
    end = sum(map(len, before[: len(before) - bottom]))
    return Splice(start, end, "".join(after[top : len(after) - bottom]))


def in_common(old: Sequence, new: Sequence) -> tuple[int, int]:
    """How many items two sequences share at the top, and at the bottom below that."""
    top = len(commonprefix([old, new]))
    return top, len(commonprefix([old[top:][::-1], new[top:][::-1]]))

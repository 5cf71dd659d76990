# SPDX-License-Identifier: Apache-2.0
"""From a change made by hand to the edits that might express it, loosest first.

A proposal is the mapping that would stand in a patch file. None of them is trusted: the
caller replays each and keeps the first that gives the same bytes.
"""

import difflib
import itertools
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from tools.series import syntax
from tools.series.splice import in_common
from tools.series.syntax import Node, span

Fields = dict[str, object]
_DEFINITIONS = ("class_definition", "function_definition")
_CONTAINERS = ("block", "module", "list", "tuple", "set", "dictionary", "subscript")


@dataclass(frozen=True)
class Change:
    """Lines [start, end) of `old` became lines [new_start, new_end) of `new`."""

    old: str
    new: str
    start: int
    end: int
    new_start: int
    new_end: int

    @property
    def alone(self) -> str:
        """The old text with this change only."""
        lines, ours = self.old.splitlines(keepends=True), self.new.splitlines(keepends=True)
        return "".join(
            lines[: self.start] + ours[self.new_start : self.new_end] + lines[self.end :]
        )


def changes(old: str, new: str) -> list[Change]:
    matcher = difflib.SequenceMatcher(
        None, old.splitlines(keepends=True), new.splitlines(keepends=True), autojunk=False
    )
    return [
        Change(old, new, start, end, new_start, new_end)
        for tag, start, end, new_start, new_end in matcher.get_opcodes()
        if tag != "equal"
    ]


def proposals(change: Change, is_python: bool) -> Iterator[Fields]:
    if is_python and (root := syntax.parse(change.alone)) is not None:
        if change.start == change.end:
            yield from _insertions(change, root)
        elif (before := syntax.parse(change.old)) is not None:
            yield from _replacements(change, before)
    elif change.start == change.end and change.start > 0:
        lines, ours = change.old.splitlines(), change.new.splitlines()
        block = "\n".join(ours[change.new_start : change.new_end])
        yield {"line": lines[change.start - 1].strip(), "insert": textwrap.dedent(block)}
    for context in range(4):
        yield {"hunk": _hunk(change, context)}


def _insertions(change: Change, root: Node) -> Iterator[Fields]:
    lines = change.alone.splitlines(keepends=True)
    last = change.start + change.new_end - change.new_start
    block = "".join(lines[change.start : last])
    if not block.strip():
        return
    start = len("".join(lines[: change.start])) + len(block) - len(block.lstrip())
    end = start + len(block.strip())
    container = _covering(root, start, end)
    while container.kind() not in _CONTAINERS and container.parent() is not None:
        container = container.parent()
    ours = textwrap.dedent(block)
    scope = {"in": name} if (name := _symbol(container)) else {}
    parts = [node for node in container.children() if node.kind() != "comment"]
    above = [node for node in parts if span(node)[1] <= start]
    below = [node for node in parts if span(node)[0] >= end]
    if container.kind() not in ("block", "module"):
        yield scope | {"append": ours}
        yield scope | {"prepend": ours}
        return
    outer = container.parent()
    if outer is None and all(syntax.is_import(line) for line in ours.splitlines()):
        yield {"import": ours.strip()}
    in_body = outer is not None and outer.kind() in _DEFINITIONS
    if in_body and outer.kind() == "class_definition" and not below:
        yield scope | {"append": ours}
    if in_body and (not above or (len(above) == 1 and above[0].children()[0].kind() == "string")):
        yield scope | {"first": ours}
    for pattern in _patterns(above[-1]) if above else []:
        yield scope | {"after": pattern, "insert": ours}
    for pattern in _patterns(below[0]) if below else []:
        yield scope | {"before": pattern, "insert": ours}


def _replacements(change: Change, root: Node) -> Iterator[Fields]:
    """The smallest node that changed and what it became; a condition by what was added."""
    old, new = change.old, change.alone
    top, bottom = in_common(old, new)
    smallest = _covering(root, top, len(old) - bottom)
    for node in [smallest, *smallest.ancestors()]:
        if node.kind() in ("block", "module"):
            return
        start, end = span(node)
        became = new[start : end + len(new) - len(old)]
        parent = node.parent()
        scope = {"in": name} if (name := _symbol(node)) else {}
        if parent.kind() in ("if_statement", "elif_clause") and span(node) == span(
            parent.field("condition")
        ):
            for pattern, word in itertools.product(_calls(node), ("or", "and")):
                for opening in (f"({node.text()}) {word} ", f"{node.text()} {word} "):
                    if became.startswith(opening):
                        added = became.removeprefix(opening)
                        if added.startswith("(") and added.endswith(")"):
                            added = added[1:-1]
                        yield scope | {"if_has": pattern, f"{word}_when": added}
        if "\n" not in node.text():
            yield scope | {"replace": node.text(), "with": became}


def _hunk(change: Change, context: int) -> str:
    lines, ours = change.old.splitlines(), change.new.splitlines()
    above = lines[max(0, change.start - context) : change.start]
    rows = [" " + line for line in above]
    rows += ["-" + line for line in lines[change.start : change.end]]
    rows += ["+" + line for line in ours[change.new_start : change.new_end]]
    rows += [" " + line for line in lines[change.end : change.end + context]]
    return "\n".join(rows) + "\n"


def _covering(root: Node, start: int, end: int) -> Node:
    """The smallest node that holds the characters [start, end)."""
    node = root
    while True:
        inside = [
            child
            for child in node.children()
            if span(child)[0] <= start and end <= span(child)[1] and child.is_named()
        ]
        if not inside:
            return node
        node = inside[0]


def _symbol(node: Node) -> str:
    """The dotted symbol around a node; an assigned name counts for its literal."""
    names: list[str] = []
    inner = node
    for outer in [node, *node.ancestors()]:
        if outer.kind() in _DEFINITIONS:
            names.append(outer.field("name").text())
        elif outer.kind() == "assignment" and inner.kind() in _CONTAINERS and not names:
            names.append(outer.field("left").text())
        inner = outer
    return ".".join(reversed(names))


def _patterns(statement: Node) -> Iterator[str]:
    """Ways to name a statement, the loosest first."""
    kind, inner = statement.kind(), statement.children()[0]
    if kind == "if_statement":
        yield f"if {statement.field('condition').text()}: $$$"
    elif kind == "for_statement":
        yield f"for {statement.field('left').text()} in {statement.field('right').text()}: $$$"
    elif kind == "expression_statement" and inner.kind() == "call":
        yield f"{inner.field('function').text()}($$$)"
    elif kind == "expression_statement" and inner.kind() == "assignment":
        left, right = inner.field("left").text(), inner.field("right")
        if inner.field("type") is None and right is not None:
            if right.kind() == "call":
                yield f"{left} = {right.field('function').text()}($$$)"
            yield f"{left} = $_"
    if "\n" not in statement.text():
        yield statement.text()


def _calls(condition: Node) -> Iterator[str]:
    """Patterns for a condition: its calls without arguments, then all of it."""
    for call in condition.find_all(kind="call"):
        yield f"{call.field('function').text()}($$$)"
    yield condition.text()

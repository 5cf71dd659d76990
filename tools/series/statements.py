# SPDX-License-Identifier: Apache-2.0
"""Verbs on statements and expressions, and imports. Each returns its splices and anchor."""

import dataclasses
import functools
import re
from collections.abc import Iterable

from tools.series import syntax
from tools.series.patch import Edit
from tools.series.splice import (
    Miss,
    Splice,
    after_line,
    indent_at,
    indented,
    line_end,
    line_start,
)
from tools.series.syntax import META, Node, span

_OPERATORS = {
    "attribute", "await", "binary_operator", "boolean_operator", "call", "comparison_operator",
    "conditional_expression", "not_operator", "subscript", "unary_operator",
}  # fmt: skip
_IMPORTS = {"import_statement", "import_from_statement", "future_import_statement"}


@dataclasses.dataclass
class Found:
    """`anchor`: the words of the statement or signature that the edit hangs on."""

    splices: list[Splice]
    anchor: list[str]


def beside(edit: Edit, text: str, scope: Node) -> Found:
    """`before`, `after`: our lines beside the statement that holds the match."""
    found = Found([], [])
    statements = _distinct(statement_of(match) for match in _matches(edit, scope))
    _expect(edit, statements, "statements hold a match of")
    for statement in statements:
        block = indented(edit.text("insert"), own_line(text, statement))
        start, end = span(statement)
        if edit.verb == "before":
            at = line_start(text, start)
            found.splices.append(Splice(at, at, block))
        else:
            found.splices.append(after_line(text, end, block))
        found.anchor += _context(statement, scope)
    return found


def first(edit: Edit, text: str, scope: Node) -> Found:
    """`first`: at the top of a function or class."""
    if scope.kind() not in ("function_definition", "class_definition"):
        raise Miss(f"{edit.scope} is neither a function nor a class")
    return Found([at_top(edit.text("first"), text, scope)], signature(scope))


def at_top(ours: str, text: str, definition: Node) -> Splice:
    """Below the docstring, above the comments of what follows."""
    body = [node for node in definition.field("body").children() if node.kind() != "comment"]
    indent = own_line(text, body[0])
    above = body[0]
    if not _is_docstring(above):
        above = [node for node in definition.children() if node.kind() == ":"][-1]
    return after_line(text, span(above)[1], indented(ours, indent))


def substitute(edit: Edit, text: str, scope: Node) -> Found:
    """`replace`, `with`: the match itself, nothing around it."""
    found = Found([], [])
    for match in _matches(edit, scope):
        start, end = span(match)
        pieces = edit.text("with").strip().replace("\n", "\n" + indent_at(text, start))
        ours = META.sub(functools.partial(_captured, match, text), pieces)
        if match.parent().kind() in _OPERATORS and not syntax.is_atom(ours):
            ours = f"({ours})"
        found.splices.append(Splice(start, end, ours))
        found.anchor += _context(statement_of(match), scope)
    return found


def _captured(match: Node, text: str, name: re.Match[str]) -> str:
    if name[0].startswith("$$$"):
        nodes = match.get_multiple_matches(name[0][3:])
        return text[span(nodes[0])[0] : span(nodes[-1])[1]] if nodes else ""
    return match.get_match(name[0][1:]).text()


def widen(edit: Edit, text: str, scope: Node) -> Found:
    """`if_has`: the condition of the innermost `if` around the match."""
    found = Found([], [])
    clauses = _distinct(_clause(match, scope) for match in _matches(edit, scope, any_number=True))
    _expect(edit, clauses, "`if` clauses have")
    word = "or" if "or_when" in edit.fields else "and"
    ours = edit.text(f"{word}_when").strip()
    ours = ours if syntax.is_atom(ours) else f"({ours})"
    for clause in clauses:
        condition = clause.field("condition")
        start, end = span(condition)
        if not syntax.is_atom(condition.text()):
            found.splices.append(Splice(start, start, "(", once=True))
            found.splices.append(Splice(end, end, ")", once=True))
        found.splices.append(Splice(end, end, f" {word} {ours}", word=word))
        found.anchor += _context(clause, scope)
    return found


def _clause(match: Node, scope: Node) -> Node:
    inner = match
    for outer in match.ancestors():
        if inner.kind() == "else_clause" or span(inner) == span(scope):
            break
        if outer.kind() in ("if_statement", "elif_clause") and inner.kind() != "elif_clause":
            return outer
        inner = outer
    raise Miss(f"line {syntax.line_of(match)} matches, but not in an `if` or the body of one")


def imports(edit: Edit, text: str, root: Node) -> list[Splice]:
    """Below the imports that open the module; what is there already is not repeated."""
    present = {" ".join(syntax.tokens(node)) for node in root.children()}
    above, below = None, len(text)
    for node in root.children():
        if node.kind() in _IMPORTS or (above is None and _is_docstring(node)):
            above = node
        elif node.kind() != "comment":
            below = span(node)[0]
            break
    splices = []
    for line in edit.text("import").strip().splitlines():
        words = " ".join(syntax.tokens(syntax.parse(line).children()[0]))
        if words not in present:
            ours = line.strip() + "\n"
            at = after_line(text, span(above)[1], ours) if above else Splice(below, below, ours)
            splices.append(dataclasses.replace(at, once=True))
    if not splices and edit.verb == "import":
        raise Miss("the file imports this already: the edit changes nothing")
    return splices


def _matches(edit: Edit, scope: Node, any_number: bool = False) -> list[Node]:
    found = syntax.find(scope, edit.text(edit.verb))
    if not found:
        elsewhere = _lines(syntax.find(scope.get_root().root(), edit.text(edit.verb)))
        raise Miss(
            f"0 matches of `{edit.text(edit.verb).strip()}`, expected {edit.count}"
            + (f"; elsewhere in the file: lines {elsewhere}" if elsewhere else "")
        )
    if not any_number:
        _expect(edit, found, "matches of")
    return found


def _expect(edit: Edit, nodes: list[Node], what: str) -> None:
    if len(nodes) != edit.count:
        pattern = edit.text(edit.verb).strip()
        where = f"{what} `{pattern}` (lines {_lines(nodes)})"
        raise Miss(f"{len(nodes)} {where}, expected {edit.count}")


def _lines(nodes: list[Node]) -> str:
    return ", ".join(str(syntax.line_of(node)) for node in nodes)


def _distinct(nodes: Iterable[Node]) -> list[Node]:
    return list({span(node): node for node in nodes}.values())


def statement_of(node: Node) -> Node:
    """The statement that holds the node, with its decorators where it has any."""
    while (parent := node.parent()) is not None and parent.kind() not in ("block", "module"):
        node = parent
    return node


def own_line(text: str, statement: Node) -> str:
    """The statement's indentation; Miss where it shares its lines with another."""
    start, end = span(statement)
    before, rest = text[line_start(text, start) : start], text[end : line_end(text, end)].strip()
    if before.strip() or (rest and not rest.startswith("#")):
        raise Miss(f"the statement in line {syntax.line_of(statement)} shares it with another")
    return before


def signature(definition: Node) -> list[str]:
    return list(syntax.tokens(definition, header_only=True))


def _context(statement: Node, scope: Node) -> list[str]:
    """The statement's words without its suites, below those of what it is nested in.

    Bodies may change freely; a changed condition, loop or signature is worth a look.
    """
    words = signature(statement)
    for outer in statement.ancestors():
        if span(outer) == span(scope):
            break
        if outer.kind() not in ("block", "module"):
            words = [*signature(outer), *words]
    return words


def _is_docstring(node: Node) -> bool:
    return [child.kind() for child in node.children()] == ["string"]

# SPDX-License-Identifier: Apache-2.0
"""Reading Python source: the only module that knows ast-grep.

ast-grep locates; it never rewrites. Positions are character offsets into the text.
"""

import ast
import functools
import itertools
import re
import textwrap
from collections.abc import Iterator

from ast_grep_py import SgNode, SgRoot

Node = SgNode

META = re.compile(r"\$\$\$[A-Z_][A-Z0-9_]*|\$\$\$|\$[A-Z_][A-Z0-9_]*")
NESTED = ("block", "elif_clause", "else_clause", "except_clause", "finally_clause", "case_clause")
ATOMS = {
    "attribute", "call", "dictionary", "false", "float", "identifier", "integer", "list", "none",
    "parenthesized_expression", "set", "string", "subscript", "true", "tuple",
}  # fmt: skip


@functools.lru_cache(maxsize=256)
def parse(text: str) -> Node | None:
    """The module node, or None where the text is not Python that both parsers accept."""
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    root = SgRoot(text, "python").root()
    return None if root.find(kind="ERROR") else root


def find(scope: Node, pattern: str) -> list[Node]:
    """Matches of a code pattern (`$X` one node, `$$$X` any number) inside `scope`."""
    return scope.find_all(pattern=pattern.strip())


def span(node: Node) -> tuple[int, int]:
    reach = node.range()
    return reach.start.index, reach.end.index


def line_of(node: Node) -> int:
    return node.range().start.line + 1


def tokens(node: Node, header_only: bool = False) -> Iterator[str]:
    """The node's words without layout, comments and trailing commas.

    `header_only` leaves out the suites of a compound statement: what is left is its
    condition or signature.
    """
    kind = node.kind()
    if kind == "comment" or kind == "line_continuation":
        return
    if kind == "string" or not (children := node.children()):
        yield node.text()
        return
    for child, following in itertools.zip_longest(children, children[1:]):
        if header_only and child.kind() in NESTED:
            continue
        if child.kind() == "," and following and following.kind() in (")", "]", "}"):
            continue
        yield from tokens(child, header_only and kind == "decorated_definition")


def is_atom(expression: str) -> bool:
    """Whether an operator may stand beside the expression without parentheses."""
    nodes = SgRoot(expression.strip(), "python").root().children()
    if len(nodes) != 1 or nodes[0].kind() != "expression_statement":
        return False
    parts = nodes[0].children()
    return len(parts) == 1 and parts[0].kind() in ATOMS


def is_expression(text: str) -> bool:
    try:
        ast.parse(text.strip(), mode="eval")
    except SyntaxError:
        return False
    return True


def is_import(line: str) -> bool:
    try:
        body = ast.parse(line).body
    except SyntaxError:
        return False
    return len(body) == 1 and isinstance(body[0], ast.Import | ast.ImportFrom)


def pattern_fault(pattern: str) -> str | None:
    """Why `pattern` cannot be one statement or expression, or None."""
    try:
        body = ast.parse(textwrap.dedent(META.sub("_x", pattern)).strip()).body
    except SyntaxError as error:
        return error.msg
    if len(body) != 1:
        return f"{len(body)} statements"
    if isinstance(body[0], ast.Expr) and META.fullmatch(pattern.strip()):
        return "it would match everything"
    return None

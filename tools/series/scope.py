# SPDX-License-Identifier: Apache-2.0
"""From a dotted symbol to the node that defines it."""

from collections.abc import Iterator

from tools.series.syntax import Node

# What is defined inside these belongs to the namespace around them.
_TRANSPARENT = {
    "if_statement", "elif_clause", "else_clause", "try_statement", "except_clause",
    "finally_clause", "with_statement", "for_statement", "while_statement", "block",
    "decorated_definition", "expression_statement",
}  # fmt: skip


def definitions(root: Node, symbol: str) -> list[Node]:
    """Every definition of the dotted `symbol`: classes, functions, assigned names."""
    found = [root]
    for part in symbol.split("."):
        found = [node for outer in found for node, name in members(outer) if name == part]
    return found


def members(outer: Node) -> Iterator[tuple[Node, str]]:
    """The (node, name) pairs that a module, class or function defines directly."""
    if outer.kind() in ("class_definition", "function_definition"):
        outer = outer.field("body")
    elif outer.kind() != "module":
        return
    yield from _walk(outer)


def _walk(node: Node) -> Iterator[tuple[Node, str]]:
    for child in node.children():
        kind = child.kind()
        if kind in ("class_definition", "function_definition"):
            yield child, child.field("name").text()
        elif kind == "assignment":
            yield child, child.field("left").text()
        elif kind in _TRANSPARENT:
            yield from _walk(child)

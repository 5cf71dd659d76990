# SPDX-License-Identifier: Apache-2.0
"""One edit and one pristine file become splices: what is inserted or replaced, where.

Every edit is located in upstream's own text, never in another patch's result, so the
series is a set: the order of patches cannot matter.
"""

from tools.series import literals, plain, statements, syntax
from tools.series.patch import Edit
from tools.series.scope import definitions
from tools.series.splice import Miss
from tools.series.statements import Found
from tools.series.syntax import Node

_STRUCTURAL = {
    "append": literals.add,
    "prepend": literals.add,
    "first": statements.first,
    "before": statements.beside,
    "after": statements.beside,
    "replace": statements.substitute,
    "if_has": statements.widen,
}
_PLAIN = {"line": plain.line, "toml": plain.toml, "hunk": plain.hunk}


def locate(edit: Edit, text: str) -> Found:
    """Find the edit's place in the file's pristine text. Raises Miss."""
    root = None
    if edit.file.endswith(".py"):
        root = syntax.parse(text)
        if root is None:
            raise Miss(f"{edit.file} does not parse as Python")
    found = Found([], [])
    if edit.verb in _STRUCTURAL:
        found = _STRUCTURAL[edit.verb](edit, text, _scope(edit, root))
    elif edit.verb in _PLAIN:
        found.splices = _PLAIN[edit.verb](edit, text)
    if "import" in edit.fields:
        found.splices += statements.imports(edit, text, root)
    return found


def _scope(edit: Edit, root: Node) -> Node:
    if not edit.scope:
        return root
    nodes = definitions(root, edit.scope)
    if not nodes:
        raise Miss(f"symbol {edit.scope} is gone from {edit.file}", lost=edit.scope)
    if len(nodes) > 1:
        lines = ", ".join(str(syntax.line_of(node)) for node in nodes)
        raise Miss(f"{len(nodes)} definitions of {edit.scope} (lines {lines}), expected 1")
    return nodes[0]

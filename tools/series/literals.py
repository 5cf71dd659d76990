# SPDX-License-Identifier: Apache-2.0
"""The verbs `append` and `prepend`: into a literal collection or the body of a class."""

from tools.series import syntax
from tools.series.patch import Edit
from tools.series.splice import Miss, Splice, after_line, indent_at, indented, line_start
from tools.series.statements import Found, at_top, own_line, signature
from tools.series.syntax import Node, span

_COLLECTIONS = ("list", "tuple", "set", "dictionary", "subscript")


def add(edit: Edit, text: str, scope: Node) -> Found:
    """Our elements or members, last or first."""
    ours = edit.text(edit.verb)
    if scope.kind() == "class_definition":
        if edit.verb == "prepend":
            return Found([at_top(ours, text, scope)], signature(scope))
        last = [node for node in scope.field("body").children() if node.kind() != "comment"][-1]
        block = indented(ours, own_line(text, last))
        return Found([after_line(text, span(last)[1], block)], signature(scope))
    collection = _collection(scope)
    if collection is None:
        raise Miss(f"{edit.scope} is neither a class nor one literal collection")
    whole, inside = list(syntax.tokens(scope)), list(syntax.tokens(collection))
    # The elements come and go with every release; what they are elements of counts.
    anchor = [*whole[: len(whole) - len(inside)], collection.kind(), inside[0]]
    return Found(_into(edit.verb, ours, text, collection), anchor)


def _collection(definition: Node) -> Node | None:
    """The literal that is assigned, also as the one argument of a call."""
    value = definition.field("right")
    if value is not None and value.kind() == "call":
        arguments = [node for node in value.field("arguments").children() if node.is_named()]
        value = arguments[0] if len(arguments) == 1 else None
    return value if value is not None and value.kind() in _COLLECTIONS else None


def _into(verb: str, ours: str, text: str, collection: Node) -> list[Splice]:
    parts = [node for node in collection.children() if node.kind() != "comment"]
    if collection.kind() == "subscript":
        parts = parts[1:]
    opener, *elements, closer = parts
    lines = [line for line in ours.rstrip().splitlines() if line.strip()]
    lines[-1] = lines[-1].rstrip().rstrip(",") + ","
    inline = " ".join(line.strip() for line in lines)
    if not elements:
        at = span(opener)[1]
        return [Splice(at, at, inline)]
    start = span(elements[0])[0]
    first_of_line = not text[line_start(text, start) : start].strip()
    block = indented("\n".join(lines), indent_at(text, start))
    if verb == "prepend":
        if first_of_line:
            at = line_start(text, start)
            return [Splice(at, at, block)]
        return [Splice(start, start, inline + " ")]
    comma = elements[-1].kind() == ","
    end = span(elements[-1])[1]
    if "\n" in text[end : span(closer)[0]] and first_of_line:
        missing = [] if comma else [Splice(end, end, ",", once=True)]
        return [*missing, after_line(text, end, block)]
    return [Splice(end, end, " " + inline if comma else ", " + inline[:-1])]

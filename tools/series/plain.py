# SPDX-License-Identifier: Apache-2.0
"""Verbs for any kind of file: a literal line, a TOML key, an exact hunk."""

import re

import tomlkit
from tomlkit.exceptions import TOMLKitError

from tools.series.patch import TOML_KEY, Edit
from tools.series.splice import Miss, Splice, after_line, difference, indent_at, indented


def line(edit: Edit, text: str) -> list[Splice]:
    """A whole line, compared without the blanks around it."""
    wanted = edit.text("line").strip()
    splices, start = [], 0
    for row in text.splitlines(keepends=True):
        if row.strip() == wanted:
            indent = indent_at(text, start)
            if "with" in edit.fields:
                ours = indented(edit.text("with"), indent)
                splices.append(Splice(start, start + len(row), ours))
            else:
                splices.append(after_line(text, start, indented(edit.text("insert"), indent)))
        start += len(row)
    if len(splices) != edit.count:
        raise Miss(f"{len(splices)} lines are `{wanted}`, expected {edit.count}")
    return splices


def toml(edit: Edit, text: str) -> list[Splice]:
    """A new key; a key that exists is not changed."""
    try:
        document = tomlkit.parse(text)
    except TOMLKitError as error:
        raise Miss(f"not readable as TOML: {error}") from error
    dotted = edit.text("toml")
    *tables, last = [quoted or bare for quoted, bare in re.findall(TOML_KEY, dotted)]
    table = document
    for key in tables:
        table = table.setdefault(key, tomlkit.table())
        if not isinstance(table, dict):
            raise Miss(f"{key} of {dotted} is not a table")
    if last in table:
        raise Miss(f"key {dotted} is there already: {table[last]!r}")
    table.add(last, edit.fields["value"])
    return [difference(text, tomlkit.dumps(document))]


def hunk(edit: Edit, text: str) -> list[Splice]:
    """Exact text that stands once in the file; no fuzz."""
    lines = [row or " " for row in edit.text("hunk").splitlines()]
    old = "".join(row[1:] + "\n" for row in lines if row[0] != "+")
    starts = [found.start() for found in re.finditer(f"(?m)^(?={re.escape(old)})", text)]
    if len(starts) != 1:
        raise Miss(f"{len(starts)} places have the hunk's text, expected 1")
    splices, at = [], starts[0]
    for row in lines:
        size = len(row)  # one mark fewer, one newline more
        if row[0] == "+":
            splices.append(Splice(at, at, row[1:] + "\n"))
            continue
        if row[0] == "-":
            splices.append(Splice(at, at + size, ""))
        at += size
    return splices

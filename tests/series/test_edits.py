# SPDX-License-Identifier: Apache-2.0
"""Every verb: the text that comes out, to the byte, and what it refuses."""

import textwrap

import pytest

from tools.series.judge import CLEAN, CONFLICT, judge

MODULE = '''\
# a comment
"""Docstring."""

from __future__ import annotations

import os
from a import (
    b,
)

NAMES: tuple = Literal[
    "one",  # first
    "two",
    # "three",
]
TABLE = {"k": 1, "l": 2}
NO_COMMA = [
    1,
    2
]
EMPTY = []
FROZEN = frozenset({
    "x",
})


class Kind(Enum):
    """Kinds."""

    A = 1
    B = 2  # two


class Box:
    def size(self, n: int) -> int:
        """Sizes."""
        # counts first
        total = count(n)
        if n > 3 and os.name == "x":
            total = clip(total, 3)
        elif wide(n):
            total = 0
        else:
            total = spare(n)
        return total

    def bare(self): return 1
'''


def result(release, series, edit: str, text: str = MODULE, path: str = "m.py") -> str:
    edit = textwrap.dedent(edit).strip("\n").replace("\n", "\n  ")
    source = release({path: text})
    outcome = judge(series(p=f"- file: {path}\n  {edit}"), source)
    assert [v.reasons for v in outcome.verdicts] == [()]
    assert outcome.of(CLEAN)
    return outcome.rendered()[path]


def refusal(release, series, edit: str, text: str = MODULE, path: str = "m.py") -> str:
    edit = textwrap.dedent(edit).strip("\n").replace("\n", "\n  ")
    outcome = judge(series(p=f"- file: {path}\n  {edit}"), release({path: text}))
    assert [v.state for v in outcome.verdicts] == [CONFLICT]
    return outcome.verdicts[0].reasons[0]


CHANGES = [
    ('in: NAMES\nappend: |\n  "four",\n  "five"', '    "two",\n', '    "four",\n    "five",\n'),
    ('in: NAMES\nprepend: |\n  "zero",', "Literal[\n", '    "zero",\n'),
    ('in: TABLE\nappend: |\n  "m": 3', '"l": 2', ', "m": 3'),
    ('in: TABLE\nprepend: |\n  "j": 0,', "TABLE = {", '"j": 0, '),
    ("in: NO_COMMA\nappend: |\n  3,", "    2", ",\n    3,"),
    ("in: EMPTY\nappend: |\n  1", "EMPTY = [", "1,"),
    ('in: FROZEN\nappend: |\n  "y"', '    "x",\n', '    "y",\n'),
    ("in: Kind\nappend: |\n  C = 3", "B = 2  # two\n", "    C = 3\n"),
    ("in: Kind\nprepend: |\n  Z = 0", '"""Kinds."""\n', "    Z = 0\n"),
    (
        "in: Box.size\nfirst: |\n  if n < 0:\n      return 0",
        '"""Sizes."""\n',
        "        if n < 0:\n            return 0\n",
    ),
    (
        "in: Box.size\nafter: total = count($$$)\ninsert: |\n  total += 1",
        "total = count(n)\n",
        "        total += 1\n",
    ),
    (
        "in: Box.size\nbefore: return $X\ninsert: |\n  total += 1",
        "            total = spare(n)\n",
        "        total += 1\n",
    ),
    (
        'in: Box.size\nafter: "if $C: $$$"\ninsert: |\n  total += 1',
        "            total = spare(n)\n",
        "        total += 1\n",
    ),
    ("in: Box.size\nif_has: wide(n)\nor_when: n == 7", "elif wide(n)", " or (n == 7)"),
    ("import: import sys", "    b,\n)\n", "import sys\n"),
    ('line: "# a comment"\ninsert: |\n  # ours', "# a comment\n", "# ours\n"),
]


@pytest.mark.parametrize(("edit", "after", "ours"), CHANGES)
def test_our_text_follows_its_place_and_nothing_else_changes(release, series, edit, after, ours):
    assert MODULE.count(after) == 1
    assert result(release, series, edit) == MODULE.replace(after, after + ours)


def test_conditions(release, series):
    condition = 'n > 3 and os.name == "x"'
    widened = result(release, series, "in: Box.size\nif_has: clip($$$)\nor_when: n == 0")
    assert widened == MODULE.replace(condition, f"({condition}) or (n == 0)")
    narrowed = result(release, series, "in: Box.size\nif_has: os.name\nand_when: wide(n)")
    assert narrowed == MODULE.replace(condition, f"({condition}) and wide(n)")


def test_replace_keeps_captures_and_precedence(release, series):
    edit = "in: Box.size\nreplace: clip($A, $B)\nwith: clip($B, count($A))"
    assert "total = clip(3, count(total))" in result(release, series, edit)
    edit = "in: Box.size\nreplace: count($A)\nwith: |\n  wide(\n      $A,\n  )"
    changed = "total = wide(\n            n,\n        )\n"
    assert result(release, series, edit) == MODULE.replace("total = count(n)\n", changed)
    edit = "in: Box.size\nreplace: n > 3\nwith: n > 2 or n == 0"
    assert "if (n > 2 or n == 0) and os.name" in result(release, series, edit)
    edit = "in: Box\nreplace: total = $_\nwith: |\n  a = 1\n  total = a\ncount: 3\ncount_why: all"
    text = MODULE.replace("        total = count(n)\n", "")
    assert (
        result(release, series, edit, text).count("            a = 1\n            total = a\n") == 3
    )


def test_import_that_is_there_is_not_repeated(release, series):
    edit = "in: Box.size\nimport: import os\nfirst: |\n  n = n"
    assert result(release, series, edit).count("import os") == 1
    assert "imports this already" in refusal(release, series, "import: import os")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1\n", "import sys\nx = 1\n"),
        ('# c\n"""Doc."""\nx = 1\n', '# c\n"""Doc."""\nimport sys\nx = 1\n'),
        ("# c\n", "# c\nimport sys\n"),
        ("import os", "import os\nimport sys"),
    ],
)
def test_import_finds_the_top(release, series, text, expected):
    assert result(release, series, "import: import sys", text) == expected


REFUSALS = [
    ("in: Box.gone\nfirst: |\n  pass", "symbol Box.gone is gone from m.py"),
    ("in: TABLE\nfirst: |\n  pass", "neither a function nor a class"),
    ("in: Box.size\nappend: |\n  x", "neither a class nor one literal"),
    ("in: Box.bare\nfirst: |\n  pass", "shares it with another"),
    ("in: Box.bare\nbefore: return 1\ninsert: |\n  pass", "shares it with another"),
    ("in: Box.bare\nafter: total = $_\ninsert: |\n  pass", "elsewhere in the file: lines 38, 40"),
    ("in: Box.size\nafter: nothing($$$)\ninsert: |\n  pass", "0 matches of `nothing($$$)`"),
    ("in: Box.size\nafter: total = $_\ninsert: |\n  pass", "4 matches"),
    ("in: Box.size\nif_has: spare(n)\nor_when: a", "not in an `if` or the body of one"),
    ("in: Box.size\nif_has: count(n)\nor_when: a", "not in an `if` or the body of one"),
    ("in: Box.size\nfirst: |\n  m = missing", "missing, which nothing defines"),
    ("in: Box.size\nfirst: |\n  if n:", "the result is not Python"),
    ("in: Box.size\nreplace: wide(n)\nwith: wide(n)", "it changes nothing"),
    ("line: total = 0\ncount: 2\ncount_why: w\ninsert: |\n  pass", "1 lines are"),
]


@pytest.mark.parametrize(("edit", "reason"), REFUSALS)
def test_refuses(release, series, edit, reason):
    assert reason in refusal(release, series, edit)


def test_a_symbol_defined_twice_is_no_place(release, series):
    text = "try:\n    X = [1]\nexcept E:\n    X = [2]\n"
    assert "2 definitions of X" in refusal(release, series, "in: X\nappend: '3'", text)


def test_text_that_is_not_python(release, series):
    edit = "in: X\nappend: '3'"
    assert "does not parse" in refusal(release, series, edit, "X = [1]\nif:\n")


def test_positions_count_characters_and_newlines_stay(release, series):
    text = 'A = "é😀"\r\nY: T = Literal["ü😀"]  # 😀\r\n'
    after = text.replace('"ü😀"', '"ü😀", "b"')
    assert result(release, series, "in: Y\nappend: '\"b\"'", text) == after


def test_plain_files(release, series):
    text = "alpha\n  beta\n"
    edit = "line: beta\ninsert: |\n  gamma"
    assert result(release, series, edit, text, "a.txt") == "alpha\n  beta\n  gamma\n"
    assert result(release, series, 'line: beta\nwith: ""', text, "a.txt") == "alpha\n"
    edit = "hunk: |2\n   alpha\n  -  beta\n  +  delta\n  +omega"
    assert result(release, series, edit, text, "a.txt") == "alpha\n  delta\nomega\n"
    assert "0 places" in refusal(release, series, edit, "alpha\n beta\n", "a.txt")
    assert "2 places" in refusal(release, series, edit, text + text, "a.txt")


def test_toml(release, series):
    text = (
        '# top\n[project]\nname = "x" # here\n\n[project.entry-points."a.b"]\nc = "d"\n[tool.z]\n'
    )
    edit = 'toml: project.entry-points."a.b".ours\nvalue: m:f'
    after = text.replace('c = "d"\n', 'c = "d"\nours = "m:f"\n')
    assert result(release, series, edit, text, "p.toml") == after
    edit = "toml: project.name\nvalue: y"
    assert "is there already" in refusal(release, series, edit, text, "p.toml")

# SPDX-License-Identifier: Apache-2.0
"""What a patch file may not say."""

import pytest

from tools.errors import Problem
from tools.series.patch import load_series, parse_patch

GOOD = """\
subject: s
why: w
upstream: owner/repo#1
edits:
  - file: vllm/a.py
    in: A
    append: "x"
"""


def faults(text: str, name: str = "good") -> list[str]:
    found: list[str] = []
    parse_patch(name, text, found)
    return found


def test_good():
    assert faults(GOOD) == []
    assert faults(GOOD.replace("owner/repo#1", "none; ours alone")) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("subject: s\n", "", "`subject` is missing"),
        ("why: w\n", "why: ''\n", "`why` is missing or empty"),
        ("upstream: owner/repo#1\n", "", "`upstream` is missing"),
        ("owner/repo#1", "none", "`none` with the reason"),
        ("why: w\n", "why: w\nwhom: x\n", "unknown key `whom`"),
        ("why: w\n", "why: w\nwhy: x\n", "given twice"),
        ("why: w\n", "why: w\nunless: symbol\n", "PATH.py::SYMBOL"),
        ("edits:\n", "edits: []\nedit:\n", "unknown key `edit`"),
        ("    in: A\n", "", "`append` needs `in: SYMBOL`"),
        ("    in: A\n", "    in: A\n    where: x\n", "unknown key `where`"),
        ("    in: A\n", "    in: A\n    count: 1\n", "unknown key `count`"),
        ("    in: A\n", "    in: A\n    first: x\n", "exactly one verb"),
        ('    append: "x"\n', "", "exactly one verb"),
        ('append: "x"', "append: 3", "must be text"),
        ('append: "x"', 'append: ""', "is empty"),
        ('append: "x"', 'append: "1\\n2\\n3\\n4\\n5\\n6\\n7"', "7 lines of ours, at most 6"),
        ('append: "x"', "before: f($$$)", "needs `insert`"),
        ('append: "x"', "before: f($$$)\n    insert: x\n    count: 2", "needs `count_why`"),
        ('append: "x"', "before: f(\n    insert: x", "not a single piece of Python"),
        ('append: "x"', "before: f(); g()\n    insert: x", "not a single piece of Python"),
        ('append: "x"', "before: $X\n    insert: x", "match everything"),
        ('append: "x"', "replace: f($A)\n    with: g($B)", "which the pattern does not name"),
        ('append: "x"', "if_has: f()\n    or_when: x = 1", "must be one expression"),
        ('in: A\n    append: "x"', "import: x = 1", "import statements"),
        ("vllm/a.py", "../a.py", "inside upstream's tree"),
        ("vllm/a.py", "vllm/a.cpp", "work on .py files"),
        ('in: A\n    append: "x"', "releases: new\n    import: import a", "a version range"),
        ('in: A\n    append: "x"', 'toml: "a..b"\n    value: 1', "is a dotted key"),
        ('in: A\n    append: "x"', "hunk: |\n      +x", "needs at least one line"),
        ('in: A\n    append: "x"', "hunk: |\n      x", "must begin with"),
        ('in: A\n    append: "x"', "hunk: |2\n       x", "changes nothing"),
    ],
)
def test_bad(old, new, fault):
    assert GOOD.count(old) == 1
    assert any(fault in found for found in faults(GOOD.replace(old, new)))


def test_every_fault_of_every_file_is_told(tmp_path):
    (tmp_path / "one.yaml").write_text(GOOD.replace("why: w\n", ""))
    (tmp_path / "two.yaml").write_text(GOOD.replace("subject: s\n", ""))
    (tmp_path / "three.yml").write_text(GOOD)
    (tmp_path / "Four.yaml").write_text(": : :")
    with pytest.raises(Problem) as told:
        load_series(tmp_path)
    for text in ("one.yaml: `why`", "two.yaml: `subject`", "three.yml: not a", "Four.yaml: not r"):
        assert text in str(told.value)

# SPDX-License-Identifier: Apache-2.0
"""A hand edit in build/tree becomes the edit one would have written."""

import pytest

from tools.errors import Problem
from tools.series.capture import capture
from tools.series.judge import CLEAN, judge
from tools.series.project import Project
from tools.series.source import git
from tools.series.tree import write_tree

MODULE = '''\
"""Doc."""
import os

KINDS = Literal[
    "one",
    "two",
]


class Box:
    """A box."""

    A = 1

    def size(self, n, kinds):
        """Size."""
        # It counts.
        total = count(n, kinds)
        if n > 3 and wide(kinds):
            total = clip(total)
        report(total)
        return total
'''
OURS = """
- file: vllm/m.py
  in: Box.size
  after: total = count($$$)
  insert: |
    if n == 9:
        total = 9
"""


def edited(project: Project, old: str, new: str, message: str, path="vllm/m.py") -> Project:
    """build/tree with one hand-made commit."""
    write_tree(project, project.judged())
    text = (project.tree / path).read_text()
    assert text.count(old) == 1
    (project.tree / path).write_text(text.replace(old, new))
    commit(project, message)
    return project


def commit(project: Project, message: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    git(project.tree, *who, "commit", "--quiet", "--all", "-m", message)


CASES = [
    ('    "two",\n', '    "two",\n    "three",\n', {"in": "KINDS", "append": '"three",\n'}),
    ('    "one",\n', '    "zero",\n    "one",\n', {"in": "KINDS", "prepend": '"zero",\n'}),
    ("    A = 1\n", "    B = 2\n    A = 1\n", {"before": "A = $_", "insert": "B = 2\n"}),
    ("import os\n", "import os\nimport sys\n", {"import": "import sys"}),
    (
        '"""Size."""\n',
        '"""Size."""\n        n = abs(n)\n',
        {"in": "Box.size", "first": "n = abs(n)\n"},
    ),
    (
        "        report(total)\n",
        "        total -= 1\n        report(total)\n",
        {"after": "if n > 3 and wide(kinds): $$$", "insert": "total -= 1\n"},
    ),
    (
        "        report(total)\n",
        "        report(total)\n        n = 0\n",
        {"after": "report($$$)", "insert": "n = 0\n"},
    ),
    (
        "if n > 3 and wide(kinds):",
        "if (n > 3 and wide(kinds)) or (n == 0):",
        {"if_has": "wide($$$)", "or_when": "n == 0"},
    ),
    ("clip(total)", "clip(total, n)", {"replace": "clip(total)", "with": "clip(total, n)"}),
    ("# It counts.", "# We do.", {"hunk": "-        # It counts.\n+        # We do.\n"}),
]


@pytest.mark.parametrize(("old", "new", "fields"), CASES)
def test_the_edit_that_one_would_write(project, old, new, fields):
    project = edited(
        project({"1.0.0": {"vllm/m.py": MODULE}}), old, new, "box: better\n\nIt was not good.\n"
    )
    messages = capture(project)
    assert len(messages) == 1
    after = Project(project.root)
    (patch,) = after.patches
    (edit,) = patch.edits
    assert (patch.subject, patch.why) == ("box: better", "It was not good.")
    assert {key: edit.fields[key] for key in fields} == fields
    outcome = judge(after.patches, after.source())
    assert outcome.rendered()["vllm/m.py"] == MODULE.replace(old, new)
    assert (project.tree / "vllm/m.py").read_text() == MODULE.replace(old, new)
    assert outcome.of(CLEAN)


def test_fixup_adds_to_its_patch_and_amends_our_own_lines(project):
    project = project({"1.0.0": {"vllm/m.py": MODULE}}, nine=OURS)
    edited(project, "            total = 9\n", "            total = 10\n", "fixup! nine: does it")
    path = project.tree / "vllm/m.py"
    path.write_text(path.read_text().replace("return total", "return abs(total)"))
    commit(project, "more\n\nSeries-Patch: nine\n")
    text = path.read_text()
    capture(project)
    after = Project(project.root)
    assert [patch.name for patch in after.patches] == ["nine"]
    assert after.patches[0].edits[0].fields["insert"] == "if n == 9:\n    total = 10\n"
    assert after.patches[0].edits[1].fields["with"] == "return abs(total)"
    assert judge(after.patches, after.source()).rendered()["vllm/m.py"] == text


def test_several_places_of_one_commit(project):
    project = edited(
        project({"1.0.0": {"vllm/m.py": MODULE}}, nine=OURS),
        "        report(total)\n        return total\n",
        "        n = 1\n        report(total)\n        n = 2\n        return total\n",
        "box: two\n\nTwice.\n",
    )
    text = (project.tree / "vllm/m.py").read_text()
    assert len(capture(project)) == 2
    after = Project(project.root)
    assert judge(after.patches, after.source()).rendered()["vllm/m.py"] == text


REFUSED = [
    ("    A = 1\n", "".join(f"    B{n} = {n}\n" for n in range(9)), "m\n\nw", "at most 6"),
    ("    A = 1\n", "    A = 2\n", "no reason", "needs its reason"),
    ("    A = 1\n", "    A = 2\n", "fixup! gone", "no patch has the subject"),
]


@pytest.mark.parametrize(("old", "new", "message", "why"), REFUSED)
def test_refuses_and_writes_nothing(project, old, new, message, why):
    project = edited(project({"1.0.0": {"vllm/m.py": MODULE}}), old, new, message)
    with pytest.raises(Problem, match=why):
        capture(project)
    assert not list((project.root / "patches").iterdir())


def test_apply_keeps_hand_edits(project):
    project = edited(project({"1.0.0": {"vllm/m.py": MODULE}}), "A = 1", "A = 2", "mine")
    with pytest.raises(Problem, match="commits on top"):
        write_tree(project, project.judged())
    assert "A = 2" in (project.tree / "vllm/m.py").read_text()
    (project.tree / "vllm/m.py").write_text("x = 1\n")
    with pytest.raises(Problem, match="1 uncommitted"):
        write_tree(project, project.judged())
    write_tree(project, project.judged(), force=True)
    assert (project.tree / "vllm/m.py").read_text() == MODULE

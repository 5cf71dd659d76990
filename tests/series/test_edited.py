# SPDX-License-Identifier: Apache-2.0
"""Every edit at work in two patched trees: the newest release, which no CPU kernel wheel has
yet, and the last one that needs the edits which newer ones made obsolete.

The trees stand before the installed vllm; of compiled parts they have our own kernels only.
"""

import ast
import difflib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.series.cmake_scenarios import lines_that_run
from tools.models.catalog import make
from tools.pins import ROOT
from tools.series.judge import OBSOLETE, Outcome
from tools.series.patch import Edit
from tools.series.project import Project
from tools.series.splice import spliced
from tools.series.tree import overlay_files, write_tree
from tools.wheel import native
from tools.wheel.build import LIBRARY

RELEASES = ("0.31.0", "0.33.0")
SCENARIOS = Path(__file__).with_name("scenarios.py")
CMAKE = "CMakeLists.txt"


@pytest.fixture(scope="module", params=RELEASES)
def tree(request) -> tuple[Outcome, Path]:
    """The release's verdicts and its patched tree, kept in build/edited."""
    project = Project(ROOT)
    project.tree = ROOT / "build" / "edited" / request.param
    outcome = project.judged(request.param)
    write_tree(project, outcome)
    (project.tree / ".git/info/exclude").write_text("*.so\n__pycache__/\n")
    library = project.tree / LIBRARY
    library.unlink(missing_ok=True)
    library.symlink_to(native.build(platform.machine()))
    return outcome, project.tree


def test_every_file_of_ours_compiles(tree):
    outcome, folder = tree
    paths = [path for path in {*outcome.rendered(), *overlay_files(ROOT)} if path.endswith(".py")]
    assert len(paths) > len(outcome.rendered())
    for path in paths:
        compile((folder / path).read_text(), path, "exec")


def test_every_line_of_every_edit_runs(tree, tmp_path):
    outcome, folder = tree
    edited = sorted(path for path in outcome.rendered() if path.endswith(".py"))
    overlay = [p for p in overlay_files(ROOT) if p.endswith(".py") and "__main__" not in p]
    done = subprocess.run(
        [sys.executable, SCENARIOS, folder],
        input=json.dumps({"edited": edited, "overlay": overlay, "qwen35": str(make("tiny-qwen3.5"))}),
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    ran = json.loads(done.stdout.splitlines()[-1])
    ran[CMAKE] = lines_that_run(outcome.rendered()[CMAKE], tmp_path)
    for verdict in outcome.verdicts:
        if verdict.state != OBSOLETE:
            edit = verdict.edit
            idle = lines_of(edit, outcome) - reached(outcome, edit.file, set(ran[edit.file]))
            assert not idle, f"{edit.name}: no scenario runs {edit.file}, lines {sorted(idle)}"


def test_a_line_that_nothing_runs_is_missed(tree):
    for edit in (verdict.edit for verdict in tree[0].verdicts if verdict.state != OBSOLETE):
        assert lines_of(edit, tree[0]) and not reached(tree[0], edit.file, set())


def test_no_edit_is_obsolete_in_both():
    """So that each is run by the test above."""
    states = [Project(ROOT).judged(release).verdicts for release in RELEASES]
    for verdicts in zip(*states, strict=True):
        assert {verdict.state for verdict in verdicts} != {OBSOLETE}, verdicts[0].edit.name


def lines_of(edit: Edit, outcome: Outcome) -> set[int]:
    """The numbers of an edit's own lines in the patched file."""
    pristine, pairs = outcome.source.read(edit.file), outcome.placed[edit.file]
    without = spliced(pristine, [splice for other, splice in pairs if other != edit])
    texts = without.splitlines(), outcome.rendered()[edit.file].splitlines()
    changes = difflib.SequenceMatcher(None, *texts, autojunk=False).get_opcodes()
    lines = {line + 1 for kind, _, _, i, j in changes if kind != "equal" for line in range(i, j)}
    assert lines, edit.name
    return lines


def reached(outcome: Outcome, path: str, ran: set[int]) -> set[int]:
    """The lines of every statement that began to run, without those of its body.

    ran: of a Python file the first lines of statements; of any other just what ran.
    """
    if not path.endswith(".py"):
        return ran
    found = set()
    for node in ast.walk(ast.parse(outcome.rendered()[path])):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            lines = set(range(node.lineno, body[0].lineno if body else node.end_lineno + 1))
            found |= lines if lines & ran else set()
    return found

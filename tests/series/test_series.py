# SPDX-License-Identifier: Apache-2.0
"""The series as a whole: the tree, the lock, the checks, and our own patches."""

import hashlib
import io
import tarfile

import pytest

from tools import index
from tools.errors import Problem
from tools.pins import ROOT
from tools.series.check import check
from tools.series.judge import CLEAN, CONFLICT, DRIFTED, OBSOLETE, judge
from tools.series.lock import make_lock, read_lock, write_lock
from tools.series.project import Project
from tools.series.report import table
from tools.series.source import git, import_clone
from tools.series.tree import MADE, UPSTREAM, mailbox, write_tree
from tools.series.upstream import pinned_releases

MODULE = """\
KINDS = [
    "one",
]


def size(n):
    total = count(n)
    if wide(n):
        total = 0
    return total
"""
KIND = "- {file: vllm/m.py, in: KINDS, append: \"'%s'\"}"
SIZE = "- {file: vllm/m.py, in: size, after: total = count($$$), insert: %s}"


def test_patches_are_a_set(release, series):
    wide = "- {file: vllm/m.py, in: size, if_has: wide(n), or_when: %s, import: import os}"
    patches = series(
        a=KIND % "a" + "\n" + SIZE % "n = 1",
        b=SIZE % "n = 2" + "\n" + KIND % "b",
        c=wide % "n == 1",
        d=wide % "n == 2",
    )
    source = release({"vllm/m.py": MODULE})
    text = judge(patches, source).rendered()["vllm/m.py"]
    assert text == judge(reversed(patches), source).rendered()["vllm/m.py"]
    assert "    \"one\",\n    'a',\n    'b',\n]" in text
    assert "total = count(n)\n    n = 1\n    n = 2\n" in text
    assert "if wide(n) or (n == 1) or (n == 2):" in text
    assert text.count("import os") == 1


def test_edits_that_meet(release, series):
    patches = series(
        a="- {file: vllm/m.py, in: size, replace: total = 0, with: total = 1}",
        b="- {file: vllm/m.py, in: size, replace: '0', with: '2'}",
        c="- {file: vllm/m.py, in: size, if_has: wide(n), or_when: n}",
        d="- {file: vllm/m.py, in: size, if_has: wide(n), and_when: n}",
    )
    outcome = judge(patches, release({"vllm/m.py": MODULE}))
    reasons = {v.edit.patch: v.reasons for v in outcome.of(CONFLICT)}
    assert reasons == {
        "a": ("it changes the same text as patches/b.yaml edit 1",),
        "b": ("it changes the same text as patches/a.yaml edit 1",),
        "c": ("it changes the same text as patches/d.yaml edit 1",),
        "d": ("it changes the same text as patches/c.yaml edit 1",),
    }


def test_unless_and_releases(release, series):
    patches = series(
        a="- {file: vllm/m.py, in: size, unless: 'vllm/m.py::KINDS', first: n = 1}",
        b="- {file: vllm/m.py, in: size, unless: 'vllm/m.py::size.KINDS', first: n = 2}",
        c="- {file: vllm/m.py, in: size, releases: '>=2', first: n = 3}",
        d="- {file: vllm/gone.py, in: size, releases: '<1', first: n = 3}",
    )
    outcome = judge(patches, release({"vllm/m.py": MODULE}))
    assert [v.state for v in outcome.verdicts] == [OBSOLETE, CLEAN, OBSOLETE, OBSOLETE]
    assert outcome.verdicts[0].reasons == ("upstream has vllm/m.py::KINDS",)
    assert outcome.verdicts[2].reasons == ("it is for releases >=2",)


def test_tree(project):
    files = {"vllm/m.py": MODULE, "setup.py": "", "tests/t.py": "", "docs/d.md": ""}
    project = project({"1.0.0": files}, b=KIND % "b", a=SIZE % "n = 1")
    head = write_tree(project, project.judged())
    tree = project.tree
    assert not (tree / "tests").exists()
    assert (tree / "vllm/ours/code.py").read_text() == "OURS = 1\n"
    subjects = git(tree, "log", "--format=%s %cI").stdout.decode().splitlines()
    assert [line.rpartition(" ")[0] for line in reversed(subjects)] == [
        "vLLM 1.0.0", "overlay: the files we own", "a: does it", "b: does it",
    ]  # fmt: skip
    assert len({line.rpartition(" ")[2] for line in subjects}) == 1
    assert git(tree, "status", "--porcelain").stdout == b""
    assert git(tree, "rev-parse", MADE).stdout.decode().strip() == head
    untouched = (tree / "setup.py").stat()
    assert write_tree(project, project.judged()) == head
    assert (tree / "setup.py").stat() == untouched
    (project.root / "patches" / "b.yaml").rename(project.root / "patches" / "c.yaml")
    (project.root / "vllm" / "ours" / "code.py").rename(project.root / "vllm" / "ours" / "new.py")
    again = Project(project.root)
    head = write_tree(again, again.judged())
    assert (tree / "setup.py").stat() == untouched
    assert sorted(path.name for path in (tree / "vllm" / "ours").iterdir()) == ["new.py"]
    assert write_tree(again, again.judged(), force=True) == head
    assert (tree / "setup.py").stat() != untouched

    mails = mailbox(again, again.judged())
    git(tree, "checkout", "--quiet", "--detach", UPSTREAM)
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    git(tree, *who, "am", "--quiet", stdin=mails)
    assert git(tree, "diff", "--stat", "HEAD", MADE).stdout == b""


def test_conflict_leaves_the_tree(project):
    project = project({"1.0.0": {"vllm/m.py": MODULE}}, a=KIND % "a", b=SIZE % "n = 1")
    write_tree(project, project.judged())
    before = git(project.tree, "rev-parse", "HEAD").stdout
    path = project.root / "patches" / "b.yaml"
    path.write_text(path.read_text().replace("in: size", "in: sizes"))
    again = Project(project.root)
    with pytest.raises(Problem, match="1 of 2 edits conflict"):
        write_tree(again, again.judged())
    assert git(project.tree, "rev-parse", "HEAD").stdout == before


def test_overlay_hides_nothing(project):
    project = project({"1.0.0": {"vllm/ours/code.py": ""}}, a="- {file: a, line: b, with: c}")
    assert any("upstream has this file" in fault for fault in check(project, _sdist(project)))
    (project.root / "patches" / "a.yaml").unlink()
    again = Project(project.root)
    with pytest.raises(Problem, match="overlay's names"):
        write_tree(again, again.judged())


@pytest.mark.parametrize("name", ["/etc/x", "vllm-1/../../x", "vllm-1/a\nb", "vllm-1/vllm/link"])
def test_unsafe_archive(project, name):
    project = project({"1.0.0": {"vllm/m.py": MODULE}})
    sdist = project.pins.sdist()
    archive = index.fetch(sdist.project, sdist.file, sdist.sha256)
    with tarfile.open(archive, "w:gz") as tar:
        member = tarfile.TarInfo(name)
        if name.endswith("link"):
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(member, io.BytesIO(b""))
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    pins = project.root / "upstream.toml"
    pins.write_text(pins.read_text().replace(sdist.sha256, digest))
    with pytest.raises(Problem, match="unsafe member"):
        Project(project.root).source()


def test_source_from_a_clone(project, tmp_path):
    project = project({"1.0.0": {"vllm/m.py": MODULE}}, a=KIND % "a")
    clone = tmp_path / "clone"
    (clone / "vllm").mkdir(parents=True)
    (clone / "vllm" / "m.py").write_text("# from the clone\n" + MODULE)
    (clone / "SECOND.md").symlink_to("README.md")
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "x"], ["tag", "v1.0.0"]):
        git(clone, *command)
    commit = git(clone, "rev-parse", "HEAD").stdout.decode()[:9]
    with (project.root / "upstream.toml").open("a") as pins:
        pins.write(f'[releases."1.0.0".git]\ncommit = "{commit}"\n')
    with pytest.raises(Problem, match="not the commit that was pinned"):
        import_clone("1.0.0", clone, "0123456")
    import_clone("1.0.0", clone, commit)
    again = Project(project.root)
    assert again.source().read("vllm/m.py").startswith("# from the clone\n")
    assert set(again.source().modes()) == {"vllm/m.py"}
    write_tree(again, again.judged())
    assert "'a'" in (again.tree / "vllm" / "m.py").read_text()


def _sdist(project: Project):
    sdist = project.pins.sdist()
    return index.fetch(sdist.project, sdist.file, sdist.sha256)


def locked(project: Project, *releases: str) -> Project:
    outcomes = [judge(project.patches, project.source(release)) for release in releases]
    write_lock(project.lock_path, make_lock(outcomes, project.pins.release))
    return Project(project.root)


def test_lock_follows_what_was_reviewed(project):
    drifted = MODULE.replace("count(n)", "count(n, 2)")
    project = project(
        {
            "1.0.0": {"vllm/m.py": MODULE},
            "1.1.0": {"vllm/m.py": drifted},
            "1.2.0": {"vllm/m.py": MODULE},
        },
        a=SIZE % "n = 1",
    )
    assert project.judged().of(DRIFTED)[0].reasons == ("it is not in series.lock yet",)
    project = locked(project, "1.0.0")
    assert project.judged("1.0.0").of(CLEAN)
    (verdict,) = project.judged("1.1.0").of(DRIFTED)
    assert "total = count ( n , 2 )" in verdict.reasons[0]
    project = locked(project, "1.0.0", "1.1.0")
    assert project.judged("1.0.0").of(CLEAN)
    assert project.judged("1.1.0").of(CLEAN)
    assert project.judged("1.2.0").of(DRIFTED)
    text = project.lock_path.read_text()
    assert read_lock(project.lock_path).text() == text
    assert "total" not in text
    project.lock_path.write_text(text.replace("edit a 1", "edit a one"))
    with pytest.raises(Problem, match=r"series\.lock is damaged"):
        read_lock(project.lock_path)


def test_check(project):
    project = project({"1.0.0": {"vllm/m.py": MODULE}}, a=KIND % "a")
    (fault, stale) = check(project, _sdist(project))
    assert "patches/a.yaml edit 1: drifted: it is not in series.lock yet" in fault
    assert stale.startswith("series.lock: not of these patches")
    project = locked(project, "1.0.0")
    assert check(project, _sdist(project)) == []


UPSTREAM_TEXT = """\
def measure(n):
    total = weigh(n)

    )
    return total * 2
last = measure(3)
"""


def test_shared_text_is_four_telling_lines_in_a_row(project):
    project = locked(project({"1.0.0": {"vllm/m.py": UPSTREAM_TEXT}}), "1.0.0")
    broken = UPSTREAM_TEXT.replace("    return", "    something_of_ours()\n    return")
    (project.root / "broken.py").write_text(broken)
    assert check(project, _sdist(project)) == []
    same = UPSTREAM_TEXT.replace("    )\n", "").replace("    ", "\t")
    (project.root / "same.py").write_text(same)
    (fault,) = check(project, _sdist(project))
    assert fault.startswith("same.py: 4 lines are upstream's: `def measure(n):` and on")


def test_our_series_is_clean_and_checked():
    project = Project(ROOT)
    assert check(project, _sdist(project)) == []


def test_our_series_on_every_release_is_what_the_readme_says():
    project = Project(ROOT)
    outcomes = [project.judged(release) for release in pinned_releases(project.pins)]
    for outcome in outcomes:
        assert {verdict.state for verdict in outcome.verdicts} <= {CLEAN, OBSOLETE}
        assert outcome.rendered()
    assert table(outcomes) in (ROOT / "README.md").read_text()

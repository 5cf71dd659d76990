# SPDX-License-Identifier: Apache-2.0
"""The wheel itself: built from the pinned inputs, read member by member, installed elsewhere."""

import base64
import csv
import hashlib
import io
import platform
import re
import subprocess
import sys
import venv
import zipfile
from email import message_from_string
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tools.errors import Problem
from tools.index import fetch
from tools.pins import ROOT, Pins
from tools.wheel.__main__ import current_wheel
from tools.wheel.build import LIBRARY, Target, build
from tools.wheel.tree import PatchedTree

PINS = Pins()
TARGET = Target("cpu", platform.machine(), PINS.release, PINS.revision)
DIST_INFO = f"vllm-{TARGET.version}.dist-info"


@pytest.fixture(scope="module")
def path() -> Path:
    return current_wheel(TARGET, PINS)


@pytest.fixture(scope="module")
def wheel(path):
    with zipfile.ZipFile(path) as archive:
        yield archive


@pytest.fixture(scope="module")
def kernels():
    artifact = PINS.wheel(TARGET.target, TARGET.machine)
    with zipfile.ZipFile(fetch(artifact.project, artifact.file, artifact.sha256)) as archive:
        yield archive


def test_the_name_says_release_revision_and_platform(path):
    assert path.name == (
        f"vllm-{PINS.release}+tq{PINS.revision}.cpu-cp38-abi3-manylinux_2_28_{TARGET.machine}.whl"
    )


def test_record_lists_every_member_with_its_hash(wheel):
    rows = list(csv.reader(io.StringIO(wheel.read(f"{DIST_INFO}/RECORD").decode())))
    assert [row[0] for row in rows] == wheel.namelist()
    assert rows[-1] == [f"{DIST_INFO}/RECORD", "", ""]
    for name, digest, size in rows[:-1]:
        content = wheel.read(name)
        found = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        assert (digest, size) == (f"sha256={found}", str(len(content))), name


def test_there_is_one_dist_info_and_it_is_complete(wheel):
    folders = {name.split("/")[0] for name in wheel.namelist()}
    assert folders == {"vllm", DIST_INFO}
    names = {name.removeprefix(f"{DIST_INFO}/") for name in wheel.namelist()}
    assert {"METADATA", "WHEEL", "RECORD", "entry_points.txt"} <= names
    for name in ("LICENSE", "NOTICE"):
        assert wheel.read(f"{DIST_INFO}/licenses/{name}") == (ROOT / name).read_bytes()


def test_the_tag_is_that_of_the_file_name(wheel, path):
    lines = wheel.read(f"{DIST_INFO}/WHEEL").decode().splitlines()
    tag = "-".join(path.stem.split("-")[2:])
    assert f"Tag: {tag}" in lines and "Root-Is-Purelib: false" in lines


def test_requirements_are_met_by_the_pinned_ones(wheel):
    pins = {}
    for line in (ROOT / "requirements" / "cpu.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            pins[requirement.name] = str(requirement.specifier).removeprefix("==")
    message = message_from_string(wheel.read(f"{DIST_INFO}/METADATA").decode())
    for text in message.get_all("Requires-Dist"):
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            name = requirement.name.lower().replace("_", "-")
            assert name in pins, f"{name} is not pinned"
            assert requirement.specifier.contains(pins[name], prereleases=True), text
            assert name not in ("torchvision", "torchaudio", "torchcodec")


def test_the_kernels_are_the_published_ones(wheel, kernels):
    libraries = [name for name in kernels.namelist() if name.endswith(".so")]
    assert libraries
    for name in libraries:
        assert wheel.getinfo(name).CRC == kernels.getinfo(name).CRC


def test_python_is_the_patched_tree_but_for_the_packagers_changes(wheel, kernels, capfd):
    replaced, removed = PatchedTree().changes(kernels)
    kept = [line.split()[-1] for line in capfd.readouterr().err.splitlines()]
    tree = ROOT / "build" / "tree"
    differing = [
        name
        for name in wheel.namelist()
        if (tree / name).is_file()
        and name != LIBRARY
        and wheel.read(name) != (tree / name).read_bytes()
    ]
    assert sorted(differing) == sorted([*kept, "vllm/_version.py"])
    assert "vllm/turboquant/formats.py" in replaced and not removed & set(wheel.namelist())


def test_a_file_that_both_sides_changed_is_refused(kernels, tmp_path):
    replaced, _ = PatchedTree().changes(kernels)
    touched = next(name for name in sorted(replaced) if name in kernels.namelist())
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as other:
        other.writestr(touched, kernels.read(touched) + b"# the packager's line\n")
    with zipfile.ZipFile(tmp_path / "other.zip") as other:
        with pytest.raises(Problem, match=f"packager changed too\n  {touched}"):
            PatchedTree().changes(other)


def test_entry_points_are_the_trees(wheel):
    text = wheel.read(f"{DIST_INFO}/entry_points.txt").decode()
    assert "vllm = vllm.entrypoints.cli.main:main" in text
    assert text == PatchedTree().entry_points()


def test_the_same_inputs_give_the_same_bytes(path, tmp_path):
    again = build(TARGET, PINS, tmp_path)
    assert again.name == path.name and again.read_bytes() == path.read_bytes()
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_an_unchanged_checkout_builds_nothing(path, capsys):
    before = path.stat().st_mtime_ns
    assert current_wheel(TARGET, PINS) == path and path.stat().st_mtime_ns == before
    assert "up to date" in capsys.readouterr().out


def test_it_works_in_another_environment(path, tmp_path):
    """Installed by pip into a clean environment, run from a folder that is not ours.

    The requirements are borrowed from this environment, whose own vllm comes after.
    """
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-q", "--no-deps", "--no-compile", str(path)], check=True)
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    (borrowed,) = (Path(sys.prefix) / "lib").glob("python*/site-packages")
    (site / "borrowed.pth").write_text(f"{borrowed}\n")
    script = (
        "import vllm, torch\n"
        "from vllm.platforms import current_platform\n"
        "from vllm.turboquant import kernels\n"
        "print(vllm.__file__, vllm.__version__, current_platform.device_type)\n"
    )
    result = subprocess.run(
        [python, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    file, reported, platform_ = result.stdout.splitlines()[-1].split()
    assert Path(file).is_relative_to(site)
    assert (reported, platform_) == (TARGET.version, "cpu")
    assert (site / LIBRARY).exists()
    command = [tmp_path / "env" / "bin" / "vllm", "--version"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert TARGET.version in result.stdout


def test_this_environment_runs_the_present_wheel(path):
    """The rest of the suite tests what is installed: it must be this wheel."""
    assert version("vllm") == TARGET.version
    subprocess.run([sys.executable, "-m", "tools.wheel", "install"], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "cpu", "--machine", "riscv64"], "a wheel for riscv64 cannot be built here"),
        (["--target", "tpu"], "wheels tpu-.* is not pinned"),
        (["--target", "cpu", "--tag", "0.1.0"], "releases 0.1.0 .* is not pinned"),
    ],
)
def test_a_wheel_that_cannot_be_built_is_told_in_three_lines(arguments, message):
    command = [sys.executable, "-m", "tools.wheel", "build", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 3
    assert re.search(message, result.stderr)

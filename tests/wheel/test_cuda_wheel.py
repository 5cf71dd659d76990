# SPDX-License-Identifier: Apache-2.0
"""GPU wheels: packed from a stand-in for the published one, which is 330 MB."""

import csv
import io
import re
import subprocess
import sys
from email import message_from_string

import pytest

from tests.wheel.stand_in import LIBRARIES, Published, read
from tools.pins import ROOT, Pins
from tools.wheel import build as build_module
from tools.wheel.build import LIBRARY, Target, build
from tools.wheel.tree import TREE, PatchedTree

PINS = Pins()


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    PatchedTree.apply(PINS.release)
    return Published(tmp_path_factory.mktemp("published"), PINS.release)


@pytest.fixture(scope="module")
def cu130(published, tmp_path_factory):
    target = Target("cu130", "x86_64", PINS.release, PINS.revision)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_module, "fetch", published.fetch)
        return build(target, published, tmp_path_factory.mktemp("cu130"))


def test_cu130_is_the_published_wheel_with_our_python(cu130, published):
    assert cu130.name.startswith(f"vllm-{PINS.release}+tq{PINS.revision}.cu130-cp38-abi3-")
    ours, theirs = read(cu130), read(published.path)
    for name in LIBRARIES:
        assert ours.getinfo(name).CRC == theirs.getinfo(name).CRC
    for name in ("vllm/config/cache.py", "vllm/v1/engine/core.py", "vllm/turboquant/formats.py"):
        assert ours.read(name) == (TREE / name).read_bytes()
    assert ours.read("vllm/config/cache.py") != theirs.read("vllm/config/cache.py")
    assert LIBRARY not in ours.namelist()
    rows = csv.reader(io.StringIO(ours.read(ours.namelist()[-1]).decode()))
    assert [row[0] for row in rows] == ours.namelist()


def test_cu130_keeps_the_requirements_and_its_version_is_no_cpu_build(cu130):
    wheel = read(cu130)
    (name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
    message = message_from_string(wheel.read(name).decode())
    assert message["Version"] == f"{PINS.release}+tq{PINS.revision}.cu130"
    assert "nvidia-cutlass-dsl[cu13]==4.8.0" in message.get_all("Requires-Dist")
    # upstream takes any version with these letters for a CPU build
    assert "cpu" not in message["Version"]


def test_what_the_series_calls_imports_without_the_cpu_kernel():
    """Every module of ours that a patch imports, where vllm.turboquant.kernels cannot be."""
    text = "".join(path.read_text() for path in (ROOT / "patches").glob("*.yaml"))
    names = set(re.findall(r"(?:from|import) (vllm\.turboquant[.\w]*)", text)) - CPU_ONLY
    assert {"vllm.turboquant.startup", "vllm.turboquant.registration"} <= names
    script = (
        "import importlib, sys\n"
        "sys.modules['vllm.turboquant.kernels'] = None\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
    )
    subprocess.run([sys.executable, "-c", script, *sorted(names)], check=True)


CPU_ONLY = {"vllm.turboquant.linear"}  # imported where upstream's CPU linear layers are made

# SPDX-License-Identifier: Apache-2.0
"""The cu124 build's ptxas: found, checked, and really the one that Triton takes."""

import os
import subprocess
import sys

import pytest
import torch

from vllm.turboquant import ptxas
from vllm.turboquant.ptxas import VARIABLES, take_ptxas

CU124 = "0.32.0+tq1.cu124"


def tool(folder, release: str, name: str = "ptxas"):
    """A program that answers --version as ptxas of that release does."""
    path = folder / name
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.131'\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that what a test sets is undone


def test_other_builds_are_left_alone(monkeypatch):
    monkeypatch.setattr(ptxas, "_packaged", lambda: pytest.fail("looked for ptxas"))
    take_ptxas("0.32.0+tq1.cu130")
    take_ptxas("0.32.0+tq1.cpu")
    assert not any(os.environ[name] for name in VARIABLES)


def test_triton_takes_the_packaged_one(tmp_path, monkeypatch):
    monkeypatch.setattr(ptxas, "_packaged", lambda: tool(tmp_path, "12.4"))
    take_ptxas(CU124)
    assert [os.environ[name] for name in VARIABLES] == [str(tmp_path / "ptxas")] * 2
    script = (
        "from triton import knobs\n"
        "for tool in (knobs.nvidia.ptxas, knobs.nvidia.ptxas_blackwell):\n"
        "    print(tool.path, tool.version)\n"
    )
    said = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert said.stdout.splitlines() == [f"{tmp_path / 'ptxas'} 12.4"] * 2


def test_a_path_that_the_user_set_serves_both(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLES[0], tool(tmp_path, "12.3"))
    take_ptxas(CU124)
    assert os.environ[VARIABLES[1]] == os.environ[VARIABLES[0]]


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize(
    ("release", "message"), [("12.8", "is release 12.8"), ("", "not a ptxas that runs")]
)
def test_a_wrong_ptxas_stops_the_start(tmp_path, monkeypatch, variable, release, message):
    path = tool(tmp_path, release) if release else str(tmp_path / "none")
    monkeypatch.setenv(variable, path)
    with pytest.raises(ImportError, match=message) as error:
        take_ptxas(CU124)
    assert path in str(error.value) and "12.4.131" in str(error.value)


def test_a_missing_package_stops_the_start(monkeypatch):
    monkeypatch.setattr(ptxas, "PACKAGE", "no-such-package")
    with pytest.raises(ImportError, match="pip install no-such-package==12.4.131"):
        take_ptxas(CU124)


def test_a_torch_for_newer_drivers_stops_the_start(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ImportError, match="installed torch for CUDA 13.0"):
        take_ptxas(CU124)

# SPDX-License-Identifier: Apache-2.0
"""The kernel core, built with sanitizers and without torch, on random cases."""

import platform
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.kernels import core
from vllm.turboquant import kernels

SOURCES = Path(__file__).parents[2] / "csrc" / "turboquant"
CHECKS = "-std=c++20 -O1 -fopenmp -fsanitize=address,undefined -fno-sanitize-recover=all".split()
ROUNDS = 6


def build(folder: Path) -> Path:
    """core.cpp linked with the units it runs."""
    units = tomllib.loads((SOURCES / "build.toml").read_text())["unit"]
    parts = [
        (SOURCES / unit["file"], unit.get("flags", []))
        for unit in units
        if core.is_core(unit["file"]) and unit.get("arch", platform.machine()) == platform.machine()
    ]
    parts.append((core.SOURCE, []))
    jobs = []
    for source, flags in parts:
        target = folder / f"{source.stem}.o"
        command = ["g++", *CHECKS, *flags, f"-I{SOURCES}", "-c", str(source), "-o", str(target)]
        jobs.append((target, subprocess.Popen(command, stderr=subprocess.PIPE, text=True)))
    for target, job in jobs:
        _, errors = job.communicate()
        assert job.returncode == 0, errors
    program = folder / "sanitized"
    subprocess.run(["g++", *CHECKS, *(str(t) for t, _ in jobs), "-o", str(program)], check=True)
    return program


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("sanitized"))


@pytest.fixture(scope="module")
def digests(program) -> dict[str, str]:
    return dict(core.run([program], ROUNDS, variant) for variant in kernels.variants())


def test_no_finding_in_any_variant(digests):
    assert set(digests) == set(kernels.variants())


def test_variants_write_the_same_bytes(digests):
    assert len(set(digests.values())) == 1

# SPDX-License-Identifier: Apache-2.0
"""The aarch64 variants, cross-compiled and run by qemu, against this host's.

The objects are those of the wheel. Each CPU is the least that a variant may need: Cortex-A57 is
Armv8.0, Neoverse N1 Armv8.2 with dot products; an instruction beyond that ends the program.
"""

import platform
import subprocess
from pathlib import Path

import pytest

from tests import cross
from tests.kernels import core
from tools.wheel import native

ROUNDS = 2  # qemu takes some 20 times as long as the host
CPUS = {"neoverse-n1": "neon", "cortex-a57": "portable"}


def link(machine: str, folder: Path, *flags: str) -> Path:
    """core.cpp with the wheel's objects for `machine`."""
    objects = [str(path) for name, path in native.objects(machine).items() if core.is_core(name)]
    compiler = native.Toolchain.find().command
    source = ["-std=c++20", "-O2", "-fopenmp", f"-I{native.SOURCES}", str(core.SOURCE)]
    program = folder / machine
    command = [*compiler, *source, *objects, *flags, "-o", str(program)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return program


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    cross.require()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", cross.COMPILER)
        return link("aarch64", tmp_path_factory.mktemp("aarch64"), "-static")


@pytest.fixture(scope="module")
def expected(program, tmp_path_factory) -> str:
    """The digest that this host's best variant gives."""
    host = link(platform.machine(), tmp_path_factory.mktemp("host"))
    return core.run([host], ROUNDS)[1]


@pytest.mark.parametrize("cpu", CPUS)
def test_the_best_variant_of_a_cpu_writes_the_same_bytes(cpu, program, expected):
    assert core.run([cross.EMULATOR, "-cpu", cpu, program], ROUNDS) == (CPUS[cpu], expected)


def test_digests_depend_on_the_cases(program, expected):
    assert core.run([cross.EMULATOR, program], 0)[1] != expected


def test_variants_are_chosen_by_name_and_refused_where_the_cpu_lacks_them(program):
    emulate = [cross.EMULATOR, "-cpu"]
    assert core.run([*emulate, "neoverse-n1", program], 0, "portable")[0] == "portable"
    with pytest.raises(AssertionError, match="VLLM_TQ_ISA is neon; this CPU runs portable"):
        core.run([*emulate, "cortex-a57", program], 0, "neon")

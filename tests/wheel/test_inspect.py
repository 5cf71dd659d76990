# SPDX-License-Identifier: Apache-2.0
"""What a file needs of a host: read from libraries made here, and judged."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.wheel.gpu_code import container, entry, library
from tools.errors import Problem
from tools.pins import ROOT
from tools.wheel.fatbin import CUBIN, PTX
from tools.wheel.inspect import expect, honest_tag, inspect, report

OLD = container(
    entry(CUBIN, 80, (1, 7), b"a" * 13), entry(CUBIN, 89, (1, 7)), entry(PTX, 90, (8, 4))
)
NEW_CUBIN = container(entry(CUBIN, 80, (1, 8)))
NEW_PTX = container(entry(CUBIN, 80, (1, 7)), entry(PTX, 80, (8, 7)))


def made(folder: Path, **what) -> Path:
    return library(folder / "lib.so", **what)


def test_cubins_ptx_and_runtime_are_read(tmp_path):
    path = made(tmp_path, fatbin=OLD + bytes(24) + NEW_CUBIN, needs="libcudart.so.12")
    (found,) = inspect(path)
    assert found.runtime == ["libcudart.so.12"]
    assert found.archs(CUBIN) == [80, 89] and found.archs(PTX) == [90]
    assert [image.version for image in found.images] == [(1, 7), (1, 7), (8, 4), (1, 8)]


def test_code_for_driver_550_is_accepted(tmp_path):
    path = made(tmp_path, fatbin=OLD, needs="libcudart.so.12")
    libraries = inspect(path)
    expect(path, libraries, "cu124")
    text = report(path, libraries)
    assert "driver   525 or newer; 550 or newer on GPUs that no cubin fits" in text
    assert "ABI 7: 80 89" in text and "8.4: 90" in text


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"fatbin": OLD, "needs": "libcudart.so.13"}, r"needs driver 580: libcudart\.so\.13$"),
        ({"fatbin": OLD, "needs": "libnvrtc.so.13"}, r"needs driver 580: libnvrtc\.so\.13$"),
        ({"fatbin": NEW_CUBIN}, r"needs driver 580: cubins in the ELF format of CUDA 13 \(ABI 8\)"),
        ({"fatbin": NEW_PTX}, r"needs driver 570: PTX 8\.7$"),
        ({"fatbin": container(entry(CUBIN, 80, (1, 7)), entry(PTX, 80, (9, 7)))}, "of CUDA 13.7"),
    ],
)
def test_code_for_newer_drivers_is_refused_with_the_reason(tmp_path, what, message):
    path = made(tmp_path, **what)
    with pytest.raises(Problem, match=rf"driver 550 \(CUDA 12\.4\)\n(?m:.*{message})"):
        expect(path, inspect(path), "cu124")


def test_a_file_of_another_kind_is_refused(tmp_path):
    gpu, cpu = made(tmp_path, fatbin=OLD), library(tmp_path / "cpu.so")
    expect(cpu, inspect(cpu), "cpu")
    with pytest.raises(Problem, match="is no CPU wheel\n.*lib.so"):
        expect(gpu, inspect(gpu), "cpu")
    with pytest.raises(Problem, match="has no GPU code"):
        expect(cpu, inspect(cpu), "cu124")
    assert "none: no CUDA code" in report(cpu, inspect(cpu))


def test_a_wheel_is_read_member_by_member_whatever_their_names(tmp_path):
    # pow's symbol got a new version in glibc 2.29: the file name below promises less
    body = '#include <cmath>\nextern "C" double f(double x) { return std::pow(x, x); }\n'
    program = made(tmp_path, fatbin=OLD, body=body)
    wheels = [tmp_path / f"x-1-cp38-abi3-manylinux_2_{n}_x86_64.whl" for n in (28, 39)]
    for wheel in wheels:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.write(program, "x/program")
            archive.writestr("x/text.so", "not ELF")
    (found,) = inspect(wheels[0])
    assert found.name == "x/program" and found.archs(CUBIN) == [80, 89]
    expect(wheels[1], inspect(wheels[1]), "cu124")
    with pytest.raises(Problem, match=r"newer glibc than 2\.28 is needed by x/program \(2\.29\)"):
        expect(wheels[0], inspect(wheels[0]), "cu124")


def test_a_tag_is_raised_to_what_was_compiled(tmp_path):
    tag = "cp38-abi3-manylinux_2_28_x86_64"
    plain = library(tmp_path / "plain.so")
    assert honest_tag(tag, [plain]) == tag
    body = '#include <cmath>\nextern "C" double f(double x) { return std::pow(x, x); }\n'
    glibc = library(tmp_path / "glibc.so", body=body)
    assert honest_tag(tag, [plain, glibc]) == "cp38-abi3-manylinux_2_29_x86_64"
    body = "#include <charconv>\nauto f(char* p, double x) { return std::to_chars(p, p + 9, x); }\n"
    libstdcxx = library(tmp_path / "libstdcxx.so", body=body)  # new with GCC 11
    assert honest_tag(tag, [libstdcxx, glibc]) == "cp38-abi3-manylinux_2_34_x86_64"


@pytest.mark.parametrize(
    ("fatbin", "message"),
    [
        (OLD[:-20], "damaged at byte 0"),
        (b"\1" * 64, "damaged at byte 0"),
        (OLD + container(entry(9, 80, (1, 7))), "unknown form .kind 9."),
        (container(entry(CUBIN, 80, (1, 7)) + b"\1" * 8), "cut off at byte"),
    ],
    ids=["short", "no container", "unknown kind", "rest"],
)
def test_damaged_gpu_code_is_an_error_not_a_clean_bill(tmp_path, fatbin, message):
    path = made(tmp_path, fatbin=fatbin)
    with pytest.raises(Problem, match=f"cannot be inspected\n.*{message}"):
        inspect(path)


def test_the_command_prints_the_report_then_the_verdict(tmp_path):
    path = made(tmp_path, fatbin=NEW_PTX, needs="libcudart.so.13")
    command = [sys.executable, "-m", "tools.wheel", "inspect", str(path), "--expect", "cu124"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1 and "8.7: 80" in result.stdout
    assert result.stderr.startswith("error: lib.so cannot be served by driver 550 (CUDA 12.4)\n")
    path.write_bytes(b"neither")
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 3

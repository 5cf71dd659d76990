# SPDX-License-Identifier: Apache-2.0
"""Compiling: a small library that torch can call, and every way to fail."""

import platform
import subprocess
import sys
from dataclasses import replace

import pytest

from tests import cross
from tools.errors import Problem
from tools.wheel import elf, native

OPERATOR = """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <cmath>
#include <stdexcept>
#include "twice.h"
void run(torch::stable::Tensor x) {
  if (x.dim() != 1) throw std::runtime_error("expected one dimension");
  float* p = static_cast<float*>(x.data_ptr());
#pragma omp parallel for
  for (int64_t i = 0; i < x.numel(); i++) p[i] = TWICE * std::exp2(double(p[i]));
}
STABLE_TORCH_LIBRARY(tq_build_test, m) { m.def("run(Tensor(a!) x) -> ()"); }
STABLE_TORCH_LIBRARY_IMPL(tq_build_test, CPU, m) { m.impl("run", TORCH_BOX(&run)); }
"""
USE = """
import sys, torch
torch.ops.load_library(sys.argv[1])
x = torch.arange(5.0)
torch.ops.tq_build_test.run(x)
assert x.tolist() == [2.0, 4.0, 8.0, 16.0, 32.0], x
try:
    torch.ops.tq_build_test.run(torch.zeros(2, 2))
except RuntimeError as error:
    assert "expected one dimension" in str(error)
else:
    sys.exit("no error")
"""
UNITS = '[[unit]]\nfile = "run.cpp"\n[[unit]]\nfile = "other.cpp"\narch = "pdp11"\n'


@pytest.fixture
def sources(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "CACHE", tmp_path / "objects")
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "run.cpp").write_text(OPERATOR)
    (folder / "twice.h").write_text("#define TWICE 2\n")
    (folder / "other.cpp").write_text("#error for another machine\n")
    (folder / "build.toml").write_text(UNITS)
    return folder


def test_the_library_works_is_cached_and_follows_its_headers(sources, capsys):
    library = native.build(platform.machine(), sources)
    subprocess.run([sys.executable, "-c", USE, library], check=True)
    assert elf.too_new(library) == []
    assert not any("gomp" in name or "iomp" in name for name in elf.needed(library))
    capsys.readouterr()
    assert native.build(platform.machine(), sources) == library
    assert "compiling" not in capsys.readouterr().err
    (sources / "twice.h").write_text("#define TWICE 2 // reworded\n")
    assert native.build(platform.machine(), sources) != library


def test_the_library_for_aarch64_links_and_keeps_to_its_floor(tmp_path, monkeypatch):
    cross.require()
    monkeypatch.setenv("CXX", cross.COMPILER)
    objects = native.objects("aarch64")
    # In place of torch's library for aarch64, which is large, an empty one of its name.
    toolchain = native.Toolchain.find()
    stand_in = tmp_path / "torch" / "lib" / "libtorch_cpu.so"
    stand_in.parent.mkdir(parents=True)
    empty = [cross.COMPILER, "-shared", "-x", "c++", "/dev/null", "-o", stand_in]
    subprocess.run(empty, check=True)
    (tmp_path / "torch" / "include").symlink_to(toolchain.torch / "include")
    stood_in = replace(toolchain, torch=tmp_path / "torch")
    monkeypatch.setattr(native.Toolchain, "find", lambda: stood_in)
    # Such a library is of no use to anyone, so it stays out of the cache.
    monkeypatch.setattr(native, "CACHE", tmp_path / "objects")
    native.CACHE.mkdir()
    for object_ in objects.values():
        (native.CACHE / object_.name).symlink_to(object_)
    library = native.build("aarch64")
    assert {"neon.cpp", "binding.cpp"} <= {*objects} and "avx2.cpp" not in objects
    assert elf.too_new(library) == []
    assert not any("gomp" in name for name in elf.needed(library))


def test_a_source_that_does_not_compile_leaves_nothing(sources, capfd):
    (sources / "run.cpp").write_text("int f() { return no_such_name; }\n")
    with pytest.raises(Problem, match=r"failed with status 1\n.*run-[0-9a-f]+\.o"):
        native.build(platform.machine(), sources)
    assert "no_such_name" in capfd.readouterr().err
    assert not list(native.CACHE.glob("run-*"))


def test_no_compiler_is_named_in_three_lines(sources, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(Problem, match="no C[+][+] compiler\n.*no-such-compiler") as error:
        native.build(platform.machine(), sources)
    assert len(str(error.value).splitlines()) == 3


@pytest.mark.parametrize("change", ["unlisted", "absent"])
def test_sources_and_their_list_must_agree(sources, change):
    if change == "unlisted":
        (sources / "more.cpp").write_text("")
    else:
        (sources / "other.cpp").unlink()
    with pytest.raises(Problem, match=r"build.toml disagree\n.*(more|other)\.cpp"):
        native.build(platform.machine(), sources)


def test_symbols_above_a_floor_are_found(sources):
    library = native.build(platform.machine(), sources)
    found = elf.too_new(library, {"GLIBC": (2, 2), "GLIBCXX": (3, 4), "CXXABI": (1, 3)})
    assert found and all("@" in symbol for symbol in found)

# SPDX-License-Identifier: Apache-2.0
"""The cu124 wheel from end to end, on a few of upstream's sources: nvcc 12.4 really runs.

The whole takes hours; what is left out here is only the number of sources.
"""

import os
import subprocess
from email import message_from_string

import pytest

from tests.wheel.stand_in import LIBRARIES, Published, read
from tools.errors import Problem
from tools.pins import Pins
from tools.wheel import build as build_module
from tools.wheel import elf, inspect, metadata
from tools.wheel.build import Target, build
from tools.wheel.cuda import kernels as kernels_module
from tools.wheel.cuda import toolkit as toolkit_module
from tools.wheel.cuda.kernels import Kernels
from tools.wheel.cuda.toolkit import Toolkit
from tools.wheel.fatbin import CUBIN
from tools.wheel.tree import PatchedTree

PINS = Pins()
KERNEL = "cuda_utils_kernels"
ONLY = rf"/(spinloop|fs_io|cumem_allocator|torch_bindings|{KERNEL})[.](cpp|cu)$"


@pytest.fixture(scope="module")
def toolkit() -> Toolkit:
    """nvcc 12.4, in CUDA_HOME or put together once; a host that can have neither skips."""
    try:
        return Toolkit.find()
    except Problem as problem:
        if "no Debian package source" not in str(problem):
            raise
        pytest.skip(str(problem))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cu124")


@pytest.fixture(scope="module")
def kernels(toolkit, folder):
    """A small source for one GPU, linked with C++ as in the whole, and all that has no GPU code."""
    PatchedTree.apply(PINS.release)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels_module, "BUILD", folder / "kernels")
        patch.setenv("VLLM_CUTLASS_SRC_DIR", str(folder))  # none of these needs it
        yield Kernels(PINS.release, "8.0", ONLY)


@pytest.fixture(scope="module")
def libraries(kernels):
    return kernels.build(jobs=os.cpu_count())


def test_the_libraries_are_for_driver_550_and_have_the_needs_of_a_gpu_host(libraries):
    assert {"vllm/_C_stable_libtorch.abi3.so", "vllm/_moe_C_stable_libtorch.abi3.so"} <= {*libraries}
    for name, path in libraries.items():
        (library,) = inspect.inspect(path)
        needs = set(elf.needed(path))
        if name.endswith("_C_stable_libtorch.abi3.so"):
            assert library.runtime == ["libcudart.so.12"]
            assert {"libtorch_cuda.so", "libcuda.so.1"} <= needs
            assert library.archs(CUBIN) == ([80] if "/_C_" in name else [])
        elif "cumem" not in name:  # these serve hosts without a GPU as well
            assert not any("cuda" in need for need in needs)
    inspect.expect(path, [inspect.inspect(p)[0] for p in libraries.values()], "cu124")


def test_a_second_run_compiles_nothing_and_an_interrupted_one_goes_on(kernels, libraries, capfd):
    objects = {path: path.stat().st_mtime_ns for path in kernels.folder.rglob("*.cpp.o")}
    (gpu_object,) = kernels.folder.rglob(f"{KERNEL}.cu.o")
    gpu_object.write_bytes(b"")  # what a killed compiler may leave
    os.utime(gpu_object, ns=(0, 0))
    kernels.build(jobs=1)
    said = capfd.readouterr().err
    assert "Building CUDA" in said and "Building CXX" not in said
    assert gpu_object.stat().st_size > 0
    assert objects == {path: path.stat().st_mtime_ns for path in objects}
    kernels.build(jobs=1)
    assert "ninja: no work to do" in capfd.readouterr().err


def test_the_wheel_has_them_in_the_place_of_those_for_newer_drivers(libraries, folder):
    published = Published(folder, PINS.release)
    target = Target("cu124", "x86_64", PINS.release, PINS.revision, "8.0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_module, "fetch", published.fetch)
        patch.setattr(PatchedTree, "apply", lambda *_: PatchedTree())  # the fixture did
        patch.setattr(build_module, "_compiled", lambda *_: libraries)
        path = build(target, published, folder)
    wheel = read(path)
    for name, library in libraries.items():
        assert wheel.read(name) == library.read_bytes()
    assert "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so" in LIBRARIES
    assert "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so" not in wheel.namelist()
    assert "vllm/vllm-rs" in wheel.namelist()
    assert b"take_ptxas" in wheel.read("vllm/__init__.py")
    message = message_from_string(wheel.read(f"vllm-{target.version}.dist-info/METADATA").decode())
    requirements = message.get_all("Requires-Dist")
    assert metadata.PTXAS_12_4 in requirements
    assert not any("cu13" in text or "flashinfer" in text for text in requirements)
    inspect.expect(path, inspect.inspect(path), "cu124")


def test_a_wheel_with_code_for_newer_drivers_is_not_written(kernels, folder):
    published = Published(folder, PINS.release)
    target = Target("cu124", "x86_64", PINS.release, 77, "8.0")
    compiled = {"vllm/_C_stable_libtorch.abi3.so": folder / "0.so"}  # the stand-in's own
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_module, "fetch", published.fetch)
        patch.setattr(PatchedTree, "apply", lambda *_: PatchedTree())
        patch.setattr(build_module, "_compiled", lambda *_: compiled)
        with pytest.raises(Problem, match=r"driver 550 \(CUDA 12\.4\)\n.*_C_stable_libtorch"):
            build(target, published, folder)
    assert not list(folder.glob("*tq77*"))


def test_another_toolkit_in_cuda_home_is_refused(tmp_path, monkeypatch):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho Cuda compilation tools, release 13.0, V13.0.88\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(Problem, match="which is 13.0.88"):
        Toolkit.find()
    nvcc.unlink()
    with pytest.raises(Problem, match="which is no toolkit"):
        Toolkit.find()


def test_a_host_without_a_source_of_nvcc_is_told_what_to_do(monkeypatch):
    monkeypatch.setattr(toolkit_module.shutil, "which", lambda _: None)
    with pytest.raises(Problem, match="point CUDA_HOME at it"):
        toolkit_module._mirror()


def test_cutlass_is_upstreams_revision_or_a_local_folder(tmp_path, monkeypatch, cache):
    origin = tmp_path / "cutlass.git"
    git = ["git", "-c", "user.name=n", "-c", "user.email=e", "-C", str(origin)]
    subprocess.run(["git", "init", "-q", str(origin)], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "v"], check=True)
    subprocess.run([*git, "tag", "v9.9"], check=True)
    cmake = f'set(CUTLASS_REVISION "v9.9")\nGIT_REPOSITORY file://{tmp_path}/cutlass.git\n'
    monkeypatch.delenv("VLLM_CUTLASS_SRC_DIR", raising=False)
    assert kernels_module._cutlass(cmake) == cache / "cutlass-v9.9"
    with pytest.raises(Problem, match="cannot fetch CUTLASS v8"):
        kernels_module._cutlass(cmake.replace("v9.9", "v8"))
    with pytest.raises(Problem, match="no longer names"):
        kernels_module._cutlass("")
    monkeypatch.setenv("VLLM_CUTLASS_SRC_DIR", str(tmp_path / "none"))
    with pytest.raises(Problem, match="no CUTLASS"):
        kernels_module._cutlass(cmake)


def test_unknown_gpus_are_refused():
    with pytest.raises(Problem, match="compiled for 12.0\n"):
        Kernels(PINS.release, "8.0;12.0")


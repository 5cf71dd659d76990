# SPDX-License-Identifier: Apache-2.0
"""upstream.toml, and the pinned requirements that go with it."""

import re
from email import message_from_string

import pytest
from packaging.requirements import Requirement

from tools.errors import Problem
from tools.pins import ROOT, Pins
from tools.wheel import metadata
from tools.wheel.tree import TREE, PatchedTree


def pinned(file: str) -> dict[str, Requirement]:
    lines = (ROOT / "requirements" / file).read_text().splitlines()
    wanted = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {requirement.name: requirement for requirement in wanted}


def test_every_artifact_has_a_full_hash_and_a_name_of_its_release():
    pins = Pins()
    artifacts = [pins.sdist(), pins.wheel("cpu", "x86_64"), pins.wheel("cpu", "aarch64")]
    assert all(pins.release in artifact.file for artifact in artifacts)
    for artifact in [*artifacts, pins.model("smollm2")]:
        assert re.fullmatch("[0-9a-f]{64}", artifact.sha256)
        assert artifact.file.startswith(artifact.project.replace("-", "_"))


@pytest.mark.parametrize(
    "ask", [lambda p: p.sdist("0.1.0"), lambda p: p.wheel("tpu", "x86_64"), lambda p: p.model("x")]
)
def test_what_is_not_pinned_is_refused_with_what_is(ask):
    with pytest.raises(Problem, match=r"is not pinned\n.*(0\.32\.0|cpu-x86_64|smollm2)"):
        ask(Pins())


def test_a_damaged_pin_is_one_message(tmp_path):
    path = tmp_path / "upstream.toml"
    path.write_text("[upstream\n")
    with pytest.raises(Problem, match="the pin cannot be read"):
        Pins(path)


@pytest.mark.parametrize("release", ["0.32.0", "0.33.0"])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_published_gpu_wheels_are_pinned(release, machine):
    artifact = Pins().wheel("cu130", machine, release)
    assert artifact.file == f"vllm-{release}-cp38-abi3-manylinux_2_28_{machine}.whl"
    assert re.fullmatch("[0-9a-f]{64}", artifact.sha256)


@pytest.mark.parametrize("file", ["cpu.txt", "cu130.txt", "dev.txt"])
def test_requirements_are_exact_and_public(file):
    for requirement in pinned(file).values():
        assert re.fullmatch(r"==[^,+*]+", str(requirement.specifier)), requirement
        assert requirement.url is None


def test_no_package_is_pinned_twice():
    assert not pinned("cpu.txt").keys() & pinned("dev.txt").keys()


def test_cu124_has_exact_pins_and_nothing_of_cuda_13():
    pins = pinned("cu124.txt")
    for name, requirement in pins.items():
        assert re.fullmatch(r"==[^,*]+", str(requirement.specifier)), requirement
        assert not requirement.extras and requirement.url is None
        assert "cu13" not in str(requirement)
        # xgrammar needs this one everywhere; upstream's own pin of it is flashinfer's
        assert name not in metadata.CUDA_13 or name == "apache-tvm-ffi"
        # NVIDIA's packages carry the CUDA they are for in their name, those of CUDA 13 nothing
        assert not re.match("(nvidia|cuda)-", name) or name.endswith("-cu12"), name
    assert str(pins["torch"].specifier) == "==2.13.0+cu126"
    assert str(pins["nvidia-cuda-nvcc-cu12"]) == metadata.PTXAS_12_4
    others = {name: str(pin.specifier) for name, pin in pins.items() if name not in CUDA_PINS}
    cpu = {name: str(pin.specifier) for name, pin in pinned("cpu.txt").items()}
    assert others == {name: cpu[name] for name in others}


@pytest.fixture(scope="module")
def asked() -> list[str]:
    """What upstream's own requirement files ask of CUDA hosts."""
    PatchedTree.apply(Pins().release)
    lines = [line for file in ("common.txt", "cuda.txt") for line in _requirements(file)]
    bare = (line.split("#")[0].strip() for line in lines)
    return [line for line in bare if line and not line.startswith("-")]


@pytest.mark.parametrize("target", ["cu124", "cu130"])
def test_gpu_pins_meet_what_the_wheel_asks(asked, target):
    kernel = "Name: vllm\nVersion: 1\n" + "".join(f"Requires-Dist: {line}\n" for line in asked)
    message = message_from_string(metadata.metadata(kernel, f"1+tq1.{target}", []))
    pins = pinned(f"{target}.txt")
    texts = message.get_all("Requires-Dist")
    assert "torch==2.13.0" in texts and (metadata.PTXAS_12_4 in texts) == (target == "cu124")
    for requirement in map(Requirement, texts):
        if requirement.marker is None or requirement.marker.evaluate(LINUX):
            name = requirement.name.lower().replace("_", "-")
            assert name in pins, f"{name} is not pinned"
            (pin,) = pins[name].specifier
            assert requirement.specifier.contains(pin.version, prereleases=True), requirement


def _requirements(file: str) -> list[str]:
    return (TREE / "requirements" / file).read_text().splitlines()


CUDA_PINS = {"torch", "triton", "nvidia-cuda-nvcc-cu12", "nvtx"}
LINUX = {"extra": "", "python_version": "3.11", "platform_machine": "x86_64"}

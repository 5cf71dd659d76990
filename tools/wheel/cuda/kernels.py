# SPDX-License-Identifier: Apache-2.0
"""Upstream's kernels compiled with nvcc 12.4, every object kept between runs.

Which sources, with which flags for which GPU, is decided by upstream's own CMakeLists.txt,
which runs here with patches/cu124-cmake.yaml applied and torch/TorchConfig.cmake in torch's
place. ninja compiles: a run that was interrupted goes on where it stopped, a changed header
compiles again what includes it.
"""

import hashlib
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from tools.cache import cache_dir, locked, new_folder
from tools.errors import Problem
from tools.pins import ROOT
from tools.wheel.cuda.toolkit import Toolkit
from tools.wheel.tree import TREE

BUILD = ROOT / "build" / "cu124"
SHIM = Path(__file__).with_name("torch")
SOURCES = ("CMakeLists.txt", "cmake", "csrc")
ARCHS = "8.0;8.6;8.9"  # A100; A10, RTX 30; L4, RTX 40
KNOWN_ARCHS = ("7.5", "8.0", "8.6", "8.7", "8.9", "9.0")


@dataclass(frozen=True)
class Kernels:
    """What to compile: of a release, for GPUs ("8.0;8.6"); `only`, for trials, a regular
    expression that leaves out all other sources."""

    release: str
    archs: str = ARCHS
    only: str = ""

    def __post_init__(self) -> None:
        if unknown := [arch for arch in self.archs.split(";") if arch not in KNOWN_ARCHS]:
            raise Problem(
                f"no kernels can be compiled for {', '.join(unknown)}",
                f"CUDA 12.4 and upstream have {', '.join(KNOWN_ARCHS)}",
                'write --archs "8.0;8.9", or leave it out',
            )

    @property
    def folder(self) -> Path:
        """Where the objects are kept."""
        trial = "-" + hashlib.sha256(self.only.encode()).hexdigest()[:8] if self.only else ""
        return BUILD / f"{self.release}-{self.archs.replace(';', '-')}{trial}"

    def build(self, jobs: int) -> dict[str, Path]:
        """Compile what is missing of build/tree's sources; libraries by their place in a wheel.

        Raises Problem when the toolkit, a source or the linker fails; objects stay.
        """
        toolkit = Toolkit.find()
        source, objects, out = (self.folder / name for name in ("source", "objects", "out"))
        _copy_sources(source)
        cutlass = _cutlass((source / "CMakeLists.txt").read_text())
        self._configure(toolkit, cutlass, source, objects)
        ninja = [sys.executable, "-m", "ninja", "-C", str(objects), f"-j{jobs}"]
        _run([*ninja, "-k0"], "compile", f"objects are kept in {objects}; run the command again")
        with new_folder(out) as folder:
            install = [*_cmake(), "--install", str(objects), "--strip", "--prefix", str(folder)]
            _run(install, "collect", f"remove {objects} and run the command again")
        return {str(path.relative_to(out)): path for path in sorted(out.rglob("*.so"))}

    def _configure(self, toolkit: Toolkit, cutlass: Path, source: Path, objects: Path) -> None:
        torch = Path(find_spec("torch").origin).parent
        nothing = self.folder / "nothing"
        nothing.mkdir(exist_ok=True)
        given = {
            "CMAKE_BUILD_TYPE": "Release",
            "VLLM_TQ_OWN_KERNELS": "ON",
            "VLLM_TQ_ONLY": self.only,
            "VLLM_PYTHON_EXECUTABLE": sys.executable,
            "Torch_DIR": SHIM,
            "TORCH_FOLDER": torch,
            "TORCH_VERSION": version("torch").split("+")[0],
            "TORCH_CUDA_ARCH_LIST": self.archs,
            "CUDA_TOOLKIT_ROOT_DIR": toolkit.home,
            # CUTLASS is headers: its own CMake project is not entered
            "FETCHCONTENT_SOURCE_DIR_CUTLASS": nothing,
            "CUTLASS_DIR": cutlass,
            "CUTLASS_INCLUDE_DIR": cutlass / "include",
            "CUTLASS_TOOLS_UTIL_INCLUDE_DIR": cutlass / "tools" / "util" / "include",
        }
        options = [f"-D{name}={value}" for name, value in given.items()]
        command = [*_cmake(), "-G", "Ninja", "-Wno-dev", "-S", str(source), "-B", str(objects)]
        # a change of these must reach every object, generated sources included
        mark, done = "\n".join([toolkit.version, *options]), self.folder / "configured"
        if done.exists() and done.read_text() == mark:
            return  # ninja itself notices changes of CMakeLists.txt
        done.unlink(missing_ok=True)
        (objects / "CMakeCache.txt").unlink(missing_ok=True)
        _run([*command, *options], "configure", "see its messages above")
        done.write_text(mark)


def _copy_sources(target: Path) -> None:
    """Upstream's patched sources; files that did not change keep their time for ninja."""
    command = ["git", "-C", str(TREE), "ls-files", "-z", "--", *SOURCES]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        content, copy = (TREE / name).read_bytes(), target / name
        if not copy.exists() or copy.read_bytes() != content:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(content)


def _cutlass(cmake: str) -> Path:
    """$VLLM_CUTLASS_SRC_DIR, or upstream's pinned revision, cloned once."""
    if named := os.environ.get("VLLM_CUTLASS_SRC_DIR"):
        folder = Path(named).resolve()
        if not folder.is_dir():
            raise Problem(
                "no CUTLASS",
                f"VLLM_CUTLASS_SRC_DIR is {named}, which is no folder",
                "point it at a checkout of CUTLASS, or unset it to have one cloned",
            )
        return folder
    revision = re.search(r'set\(CUTLASS_REVISION "([^"]+)"\)', cmake)
    url = re.search(r"GIT_REPOSITORY (\S+/cutlass\S*)", cmake)
    if revision is None or url is None:
        raise Problem(
            "upstream's CUTLASS is not found",
            "CMakeLists.txt no longer names a revision and a repository",
            "point VLLM_CUTLASS_SRC_DIR at a checkout of the revision it uses",
        )
    folder = cache_dir() / f"cutlass-{revision[1]}"
    with locked(folder):
        if not folder.exists():
            with new_folder(folder) as new:
                clone = ["git", "clone", "--quiet", "--depth=1", f"--branch={revision[1]}"]
                hint = "point VLLM_CUTLASS_SRC_DIR at a checkout of it"
                _run([*clone, url[1], str(new)], f"fetch CUTLASS {revision[1]}", hint)
    return folder


def _cmake() -> list[str]:
    return [sys.executable, "-m", "cmake"]


def _run(command: list[str], what: str, next_step: str) -> None:
    # nvcc links a program to try itself, for which the assembled toolkit has no archive
    environment = {**os.environ, "NVCC_PREPEND_FLAGS": "-cudart shared"}
    result = subprocess.run(command, stdout=sys.stderr, env=environment)
    if result.returncode:
        tool = command[2] if command[0] == sys.executable else command[0]
        raise Problem(
            f"the CUDA kernels: cannot {what}",
            f"{tool} ended with status {result.returncode}; its messages are above",
            next_step,
        )

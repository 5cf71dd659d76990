# SPDX-License-Identifier: Apache-2.0
"""Compiling csrc/turboquant into one shared library against torch's stable ABI.

csrc/turboquant/build.toml has one [[unit]] per source: `file`, the `flags` it needs beside
FLAGS, and `arch` where only one machine has it. No other file is compiled.

The library carries no OpenMP runtime of its own: its calls are resolved by the one that
torch brings, so that there is one pool of threads. Objects are cached by the hash of all
that goes into them.
"""

import hashlib
import os
import shlex
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from shutil import which

from tools.cache import locked
from tools.errors import Problem
from tools.pins import ROOT
from tools.wheel import elf

SOURCES = ROOT / "csrc" / "turboquant"
FLOOR = Path(__file__).with_name("floor.cpp")
CACHE = ROOT / "build" / "native"
FLAGS = (
    "-std=c++20 -O3 -fopenmp -fPIC -fvisibility=hidden -Wall -Wextra"
    " -Wno-restrict"  # GCC 12 warns inside its own std::string
    " -DTORCH_TARGET_VERSION=0x020a000000000000"  # torch 2.10, the oldest that may load it
)
LINK = (
    "-shared -s -Wl,--as-needed -Wl,--build-id=none"
    " -Wl,--wrap=exp,--wrap=exp2,--wrap=log,--wrap=log2"  # see floor.cpp
)
EXPORTS = "{ local: *; };\n"  # registration is static construction; nothing is called by name


@dataclass(frozen=True)
class Toolchain:
    """The compiler's command, what it calls itself, and the torch it compiles against."""

    command: list[str]
    identity: str
    torch: Path

    @classmethod
    def find(cls) -> "Toolchain":
        """$CXX or g++, and the torch of this environment."""
        command = shlex.split(os.environ.get("CXX", "g++"))
        if which(command[0]) is None:
            raise Problem(
                "no C++ compiler",
                f"{command[0]} is not on PATH",
                "install g++ 12 or newer, or name another compiler in CXX",
            )
        spec = find_spec("torch")
        if spec is None or spec.origin is None:
            raise Problem(
                "no torch to compile against",
                f"{sys.executable} has none",
                "run make setup and use .venv/bin/python",
            )
        result = subprocess.run([*command, "--version"], capture_output=True, text=True)
        identity = f"{result.stdout} torch {version('torch')}"
        return cls(command, identity, Path(spec.origin).parent)


def build(machine: str, sources: Path = SOURCES) -> Path:
    """The shared library for `machine`, compiled now unless the cache holds it.

    Raises Problem when there is no compiler, a file does not compile, or the result
    would not load on a manylinux_2_28 host.
    """
    toolchain = Toolchain.find()
    parts = list(objects(machine, sources).values())
    library = CACHE / f"kernels-{_digest(LINK, EXPORTS, *(part.name for part in parts))}.so"
    with locked(CACHE):
        if not library.exists():
            _link(toolchain, parts, library)
    return library


def objects(machine: str, sources: Path = SOURCES) -> dict[str, Path]:
    """The object file of each source for `machine`, compiled now unless the cache holds it.

    Raises Problem when there is no compiler or a file does not compile.
    """
    toolchain = Toolchain.find()
    CACHE.mkdir(parents=True, exist_ok=True)
    common = [*shlex.split(FLAGS), f"-ffile-prefix-map={ROOT}=."]
    headers = "".join(path.read_text() for path in sorted(sources.rglob("*.h")))
    jobs = {}
    for source, flags in {**_units(sources, machine), FLOOR: []}.items():
        key = _digest(toolchain.identity, headers, source.read_text(), *common, *flags)
        jobs[CACHE / f"{source.stem}-{key}.o"] = (source, [*common, *flags])
    with locked(CACHE), ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in [pool.submit(_compile, toolchain, *jobs[o], o) for o in jobs]:
            done.result()
    return {source.name: object_ for object_, (source, _) in jobs.items()}


def _units(sources: Path, machine: str) -> dict[Path, list[str]]:
    """The sources of `machine` with their own flags."""
    units = tomllib.loads((sources / "build.toml").read_text())["unit"]
    listed = {unit["file"] for unit in units}
    if stray := {path.name for path in sources.glob("*.cpp")} ^ listed:
        raise Problem(
            f"the sources and {sources.name}/build.toml disagree",
            f"in one but not in the other: {', '.join(sorted(stray))}",
            "give every .cpp file one [[unit]]",
        )
    return {
        sources / unit["file"]: unit.get("flags", [])
        for unit in units
        if unit.get("arch", machine) == machine
    }


def _compile(toolchain: Toolchain, source: Path, flags: list[str], target: Path) -> None:
    if target.exists():
        return
    print(f"compiling {source.name}", file=sys.stderr, flush=True)
    include = ["-isystem", str(toolchain.torch / "include")]
    _run([*toolchain.command, *flags, *include, "-c", str(source)], target)


def _link(toolchain: Toolchain, objects: list[Path], library: Path) -> None:
    exports = CACHE / "exports.map"
    exports.write_text(EXPORTS)
    partial = library.with_suffix(".unchecked")
    command = [*toolchain.command, *shlex.split(LINK), f"-Wl,--version-script={exports}"]
    libraries = [f"-L{toolchain.torch / 'lib'}", "-ltorch_cpu", "-lm"]
    _run([*command, *map(str, objects), *libraries], partial)
    if symbols := elf.too_new(partial):
        partial.unlink()
        raise Problem(
            "the native library would not load on a manylinux_2_28 host",
            f"it needs {', '.join(symbols)}",
            "use an older equivalent, or give it a home in tools/wheel/floor.cpp",
        )
    os.replace(partial, library)


def _run(command: list[str], target: Path) -> None:
    """Run the compiler; `target` appears only when it succeeds."""
    partial = target.with_name(f"{target.name}.part")
    result = subprocess.run([*command, "-o", str(partial)], capture_output=True, text=True)
    sys.stderr.write(result.stderr)
    if result.returncode:
        partial.unlink(missing_ok=True)
        raise Problem(
            f"{command[0]} failed with status {result.returncode}",
            f"making {target.name}; its messages are above",
            "correct the source, or use g++ 12 or newer (CXX names another compiler)",
        )
    os.replace(partial, target)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

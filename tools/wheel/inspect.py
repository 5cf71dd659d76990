# SPDX-License-Identifier: Apache-2.0
"""What a wheel, or one library, needs of a user's host: NVIDIA driver, GPU, glibc.

Three things in a library bind it to a driver:

- the CUDA runtime it links (libcudart.so.12): any driver of that major version;
- its cubins, finished GPU code: CUDA 13's tools write an ELF format of their own, which only
  drivers of CUDA 13 load. A cubin for sm_80 runs on 8.x GPUs from 8.0 on, and on no other;
- its PTX, GPU code that the driver finishes where no cubin fits the GPU: the driver must know
  that PTX version.

Figures: NVIDIA's CUDA release notes (driver of each toolkit), its compatibility guide, and
the table of PTX ISA releases.
"""

import io
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

from tools.errors import Problem
from tools.wheel import elf
from tools.wheel.fatbin import CUBIN, PTX, Image, images

# The driver branch that came with each toolkit.
DRIVERS = {
    (11, 0): 450, (12, 0): 525, (12, 1): 530, (12, 2): 535, (12, 3): 545, (12, 4): 550,
    (12, 5): 555, (12, 6): 560, (12, 7): 565, (12, 8): 570, (12, 9): 575, (13, 0): 580,
    (13, 1): 590, (13, 2): 595,
}  # fmt: skip
EXPECTED = {"cpu": None, "cu124": (12, 4), "cu130": (13, 0)}
# Their number is the major version of CUDA; other libraries of NVIDIA's count differently.
RUNTIME = re.compile(r"lib(?:cudart|nvrtc|cublas|cublasLt|nvJitLink)\.so\.(\d+)")
CUBIN_ABI_13 = 8
# The glibc of the first distributions with this libstdc++ (GLIBCXX_3.4.x) or a newer one.
LIBSTDCXX = {25: (2, 31), 29: (2, 34), 30: (2, 35), 31: (2, 39), 33: (2, 41)}
Version = tuple[int, ...]


@dataclass(frozen=True)
class Library:
    """One ELF file: its name, bytes, needs and GPU code."""

    name: str
    size: int
    glibc: Version
    runtime: list[str]
    images: list[Image]

    def archs(self, kind: int) -> list[int]:
        """The GPU architectures it has this kind of code for."""
        return sorted({image.arch for image in self.images if image.kind == kind})

    @property
    def cuda(self) -> dict[str, Version]:
        """The CUDA version that each thing in it asks of the driver, by what it is."""
        found = {}
        for name in self.runtime:
            match = RUNTIME.fullmatch(name)
            assert match
            found[name] = (int(match[1]), 0)
        for image in sorted(self.images, reverse=True):  # cubins first
            if image.kind == PTX:
                found["PTX " + _dotted(image.version)] = _cuda_of_ptx(image.version)
            elif image.version[1] >= CUBIN_ABI_13:
                found[f"cubins in the ELF format of CUDA 13 (ABI {image.version[1]})"] = (13, 0)
        return found


def inspect(path: Path) -> list[Library]:
    """The ELF files of a wheel, or the one that `path` is, in order of their names.

    Raises Problem when the file is neither, or damaged.
    """
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                found = list(_in(archive))
        else:
            with path.open("rb") as file:
                found = [_library(path.name, path.stat().st_size, file)]
    except (OSError, ELFError, ValueError, zipfile.BadZipFile) as error:
        raise Problem(
            f"{path.name} cannot be inspected",
            f"{type(error).__name__}: {error}",
            "give a wheel, a shared library or an object file, and fetch it again if damaged",
        ) from error
    return found


def report(path: Path, libraries: list[Library]) -> str:
    """What the file needs, in words, then one row per library."""
    lines = [path.name]
    if tag := platform_tag(path):
        lines.append(f"  tag      {tag}")
    if glibc := max((library.glibc for library in libraries), default=()):
        lines.append(f"  glibc    {_dotted(glibc)} or newer")
    lines.append(f"  driver   {_driver_line(libraries)}")
    rows = [("library", "MB", "glibc", "CUDA", "cubins", "PTX")]
    for library in libraries:
        size, glibc = f"{library.size / 1e6:.1f}", _dotted(library.glibc)
        code = (_code(library, CUBIN), _code(library, PTX))
        rows.append((library.name, size, glibc, " ".join(library.runtime) or "-", *code))
    widths = [max(len(row[column]) for row in rows) for column in range(5)] + [0]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def expect(path: Path, libraries: list[Library], target: str) -> None:
    """Raise Problem unless the file serves hosts of `target`: cpu, cu124 or cu130."""
    _expect_glibc(path, libraries)
    limit = EXPECTED[target]
    if limit is None:
        if cuda := [library.name for library in libraries if library.cuda or library.images]:
            raise Problem(
                f"{path.name} is no CPU wheel",
                f"CUDA code in {', '.join(cuda)}",
                "inspect the file that was meant",
            )
        return
    host = f"driver {DRIVERS[limit]} (CUDA {_dotted(limit)})"
    if not any(library.archs(CUBIN) for library in libraries):
        raise Problem(
            f"{path.name} has no GPU code", f"nothing for {host}", "inspect the file that was meant"
        )
    reasons = []
    for library in libraries:
        above = {thing: version for thing, version in library.cuda.items() if version > limit}
        if above:
            things = ", ".join(above)
            reasons.append(f"{library.name} needs driver {_driver(max(above.values()))}: {things}")
    if reasons:
        raise Problem(
            f"{path.name} cannot be served by {host}",
            "\n  ".join(reasons),
            "update the driver, or use a wheel compiled for it: ./build_wheel.sh --target cu124",
        )


def for_newer_drivers(path: Path, target: str) -> set[str]:
    """The files of a wheel that hosts of `target` cannot load."""
    limit = EXPECTED[target]
    assert limit, f"{target} has no driver"
    above = (lib for lib in inspect(path) if any(cuda > limit for cuda in lib.cuda.values()))
    return {library.name for library in above}


def honest_tag(tag: str, compiled: list[Path]) -> str:
    """A wheel's tag, its glibc raised to that of hosts on which what is compiled here loads."""
    match = re.fullmatch(r"(.+-manylinux)_(\d+)_(\d+)_(\w+)", tag)
    assert match, f"{tag} is no manylinux tag"
    floors: list[Version] = [(int(match[2]), int(match[3]))]
    for path in compiled:
        with path.open("rb") as file:
            parsed = ELFFile(file)
            floors.append(elf.newest(parsed, "GLIBC"))
            libstdcxx = elf.newest(parsed, "GLIBCXX")
            floors += [glibc for last, glibc in LIBSTDCXX.items() if libstdcxx >= (3, 4, last)]
    return f"{match[1]}_{'_'.join(map(str, max(floors)))}_{match[4]}"


def platform_tag(path: Path) -> str:
    """The platform that a wheel's file name promises; "" for another file."""
    return path.stem.split("-")[-1] if path.suffix == ".whl" else ""


def _expect_glibc(path: Path, libraries: list[Library]) -> None:
    tag = re.match(r"manylinux_(\d+)_(\d+)_", platform_tag(path))
    if tag is None:
        return
    promised = (int(tag[1]), int(tag[2]))
    above = [f"{lib.name} ({_dotted(lib.glibc)})" for lib in libraries if lib.glibc > promised]
    if above:
        raise Problem(
            f"{path.name} does not keep what its name says",
            f"a newer glibc than {_dotted(promised)} is needed by {', '.join(above)}",
            "compile in a manylinux container of that glibc, or tag the wheel as it is",
        )


def _in(archive: zipfile.ZipFile) -> Iterator[Library]:
    for info in sorted(archive.infolist(), key=lambda info: info.filename):
        with archive.open(info) as member:
            is_elf = member.read(4) == b"\x7fELF"
        if is_elf:
            yield _library(info.filename, info.file_size, io.BytesIO(archive.read(info)))


def _library(name: str, size: int, file: BinaryIO) -> Library:
    parsed = ELFFile(file)
    runtime = [needed for needed in elf.needed_by(parsed) if RUNTIME.fullmatch(needed)]
    return Library(name, size, elf.newest(parsed, "GLIBC"), runtime, images(parsed))


def _driver_line(libraries: list[Library]) -> str:
    needs = [need for library in libraries for need in library.cuda.items()]
    if not needs and not any(library.images for library in libraries):
        return "none: no CUDA code"
    floor = max((version for thing, version in needs if not _is_ptx(thing)), default=(12, 0))
    words = f"{_driver(floor)} or newer"
    ptx = max((version for thing, version in needs if _is_ptx(thing)), default=floor)
    if ptx > floor:
        words += f"; {_driver(ptx)} or newer on GPUs that no cubin fits, for the PTX"
    return words


def _code(library: Library, kind: int) -> str:
    versions = {image.version for image in library.images if image.kind == kind}
    if not versions:
        return "-"
    label = "/".join(_dotted(v) if kind == PTX else f"ABI {v[1]}" for v in sorted(versions))
    return f"{label}: {' '.join(map(str, library.archs(kind)))}"


def _is_ptx(thing: str) -> bool:
    return thing.startswith("PTX")


def _cuda_of_ptx(version: Version) -> Version:
    """The first toolkit of a PTX ISA version (its table of releases)."""
    major, minor = version
    if major < 8:
        return (11, 0)
    if major == 8 and minor > 5:
        return (12, minor + 1)  # 8.6 came with 12.7; 12.5 and 12.6 share 8.5
    return (major + 4, minor)


def _driver(cuda: Version) -> str:
    known = DRIVERS.get(cuda)
    return str(known) if known else f"of CUDA {_dotted(cuda)}"


def _dotted(version: Version) -> str:
    return ".".join(map(str, version)) or "-"

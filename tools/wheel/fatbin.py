# SPDX-License-Identifier: Apache-2.0
"""The GPU code inside a library: which architectures, in what form, how new.

nvcc puts it into the section .nv_fatbin (__nv_relfatbin for code linked on the device), a
row of containers. NVIDIA does not document them; what is read here was found by compiling
with nvcc 12.4 and 13.0 and is tested against both. Little-endian:

    container   u32 magic, u16 version, u16 header bytes, u64 bytes that follow
    entry       u16 kind (1 PTX, 2 cubin), u16 version, u32 header bytes, u64 payload bytes,
                u32, u32, u16 minor, u16 major, u32 architecture (80 for sm_80), ...

major.minor is the ISA version of PTX. For a cubin the minor is the ABI version of its ELF
header (7 from CUDA 12's tools, 8 from CUDA 13's, which older drivers do not load). Payloads
may be compressed (LZ4 or zstd); nothing here needs to read them.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

from elftools.elf.elffile import ELFFile

SECTIONS = (".nv_fatbin", "__nv_relfatbin")
MAGIC = 0xBA55ED50
CONTAINER = struct.Struct("<IHHQ")
ENTRY = struct.Struct("<HHIQIIHHI")
PTX, CUBIN = 1, 2


class Image(NamedTuple):
    """One piece of GPU code: `arch` 80 is sm_80; `version` is PTX's ISA, or (1, ELF ABI)."""

    kind: int
    arch: int
    version: tuple[int, int]


def images(elf: ELFFile) -> list[Image]:
    """Every image of a library or object file; ValueError where a container is damaged."""
    found: list[Image] = []
    for name in SECTIONS:
        if section := elf.get_section_by_name(name):
            found += _containers(section.data())
    return found


def _containers(data: bytes) -> Iterator[Image]:
    at = 0
    while at + CONTAINER.size <= len(data):
        if not any(data[at : at + 8]):  # the linker aligns containers with zeros
            at += 8
            continue
        magic, _, header, size = CONTAINER.unpack_from(data, at)
        end = at + header + size
        if magic != MAGIC or header < CONTAINER.size or end > len(data):
            raise ValueError(f"GPU code is damaged at byte {at} of its section")
        yield from _entries(data, at + header, end)
        at = end


def _entries(data: bytes, at: int, end: int) -> Iterator[Image]:
    while at < end:
        if at + ENTRY.size > end:
            raise ValueError(f"GPU code is cut off at byte {at} of its section")
        kind, _, header, size, _, _, minor, major, arch = ENTRY.unpack_from(data, at)
        if kind not in (PTX, CUBIN) or header < ENTRY.size or at + header + size > end:
            raise ValueError(f"GPU code of unknown form (kind {kind}) at byte {at} of its section")
        yield Image(kind, arch, (major, minor))
        at += header + size

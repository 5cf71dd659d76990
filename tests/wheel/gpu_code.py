# SPDX-License-Identifier: Apache-2.0
"""Shared libraries with GPU code in them, made by the C++ compiler alone."""

import struct
import subprocess
from pathlib import Path

PTX, CUBIN = 1, 2


def entry(kind: int, arch: int, version: tuple[int, int], payload: bytes = b"\x7fELF") -> bytes:
    """One image as nvcc lays it out; `version` is (major, minor)."""
    major, minor = version
    padded = payload.ljust(-(-len(payload) // 8) * 8, b"\0")
    head = struct.pack("<HHIQIIHHI", kind, 0x101, 64, len(padded), 0, 0, minor, major, arch)
    return head.ljust(64, b"\0") + padded


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(path: Path, fatbin: bytes = b"", needs: str = "", body: str = "") -> Path:
    """A shared library whose .nv_fatbin holds these bytes and which needs that soname."""
    source = path.with_suffix(".cpp")
    data = ",".join(map(str, fatbin))
    section = '__attribute__((section(".nv_fatbin"), used)) static const unsigned char code[]'
    source.write_text((f"{section} = {{{data}}};\n" if fatbin else "") + body)
    command = ["g++", "-shared", "-fPIC", str(source), "-o", str(path)]
    if needs:
        stub = path.parent / needs
        subprocess.run(
            ["g++", "-shared", "-x", "c++", "/dev/null", f"-Wl,-soname,{needs}", "-o", str(stub)],
            check=True,
        )
        command += ["-Wl,--no-as-needed", str(stub)]
    subprocess.run(command, check=True)
    return path

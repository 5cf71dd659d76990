# SPDX-License-Identifier: Apache-2.0
"""A digest of everything a wheel is made of, to tell whether one must be built again."""

import hashlib
from pathlib import Path

from tools.pins import ROOT
from tools.wheel.build import Target
from tools.wheel.native import Toolchain

FILES = ("upstream.toml", "LICENSE", "NOTICE")
FOLDERS = ("patches", "vllm", "csrc/turboquant", "tools/series", "tools/wheel")
LEFT_OUT = (".pyc", ".so")  # made from the others


def digest(target: Target) -> str:
    """SHA-256 over the inputs' paths and bytes, the target and, if used, the compiler."""
    compiler = Toolchain.find().identity if target.compiles else "none"
    total = hashlib.sha256(f"{target} {compiler}".encode())
    for path in _paths():
        total.update(f"\0{path.relative_to(ROOT)}\0".encode())
        total.update(path.read_bytes())
    return total.hexdigest()


def _paths() -> list[Path]:
    found = [ROOT / name for name in FILES]
    for folder in FOLDERS:
        found += (
            path
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and path.suffix not in LEFT_OUT
        )
    return sorted(found)

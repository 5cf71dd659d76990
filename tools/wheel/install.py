# SPDX-License-Identifier: Apache-2.0
"""Installing the wheel into the environment this runs in, once per wheel."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tools.cache import sha256_of
from tools.errors import Problem

STAMP = Path(sys.prefix) / ".installed-wheel"


def install(wheel: Path) -> bool:
    """Install `wheel` without its requirements; False when it is there already.

    The requirements are those of requirements/cpu.txt; that they suffice is checked.
    """
    stamp = f"{wheel.name} {sha256_of(wheel)}\n"
    if STAMP.exists() and STAMP.read_text() == stamp and _installed() in wheel.name:
        return False
    STAMP.unlink(missing_ok=True)
    print(f"installing {wheel.name}", file=sys.stderr, flush=True)
    _pip("install", "--quiet", "--no-deps", "--force-reinstall", str(wheel))
    _pip("check")
    STAMP.write_text(stamp)
    return True


def _installed() -> str:
    try:
        return version("vllm")
    except PackageNotFoundError:
        return "no vllm at all"


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if result.returncode:
        sys.stderr.write(result.stdout)
        raise Problem(
            f"pip {arguments[0]} ended with status {result.returncode}",
            f"in {sys.prefix}; its messages are above",
            "make clean and make setup give a fresh environment",
        )

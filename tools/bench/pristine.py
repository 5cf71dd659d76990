# SPDX-License-Identifier: Apache-2.0
"""Upstream's own wheel, unpatched, in an environment of its own with the same requirements.

The environment is a folder of links to the packages of the one this runs in, all but our vllm: the
same files, so no version can differ, and no second copy of torch. pip then installs the pinned
kernel wheel into it. It lies in build/ and is made again when anything it is made of changes.
"""

import hashlib
import platform
import subprocess
import sys
import sysconfig
from pathlib import Path

from tools.cache import locked, new_folder
from tools.errors import Problem
from tools.index import fetch
from tools.pins import ROOT, Artifact, Pins

OURS = "vllm"


def python() -> Path:
    """The interpreter of an environment that holds upstream's pinned CPU wheel."""
    pins = Pins()
    pin = pins.wheel("cpu", platform.machine())
    target = ROOT / "build" / "bench" / f"upstream-{pins.release}"
    stamp, interpreter = target / "made_of", target / "bin" / "python"
    with locked(target):
        wanted = _made_of(pin)
        if not stamp.exists() or stamp.read_text() != wanted:
            print(f"installing upstream's {pin.file}", file=sys.stderr, flush=True)
            wheel = fetch(pin.project, pin.file, pin.sha256)
            with new_folder(target) as folder:
                _link(folder)
                _install(folder, wheel)
                (folder / "made_of").write_text(wanted)
    return interpreter


def _packages() -> Path:
    return Path(sysconfig.get_path("platlib"))


def _shared() -> list[Path]:
    """Everything in our packages but vllm and its metadata."""
    return [
        path
        for path in sorted(_packages().iterdir())
        if path.name != OURS and not path.name.startswith(f"{OURS}-") and path.name != "__pycache__"
    ]


def _made_of(pin: Artifact) -> str:
    """Changes with the wheel, with this environment's packages and with its place."""
    names = "\n".join(map(str, _shared()))
    return f"{pin.file} {pin.sha256}\n{hashlib.sha256(names.encode()).hexdigest()}\n"


def _link(folder: Path) -> None:
    """An environment around links to our packages and to the libraries beside them."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    packages.mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    config = (Path(sys.prefix) / "pyvenv.cfg").read_text()
    (folder / "pyvenv.cfg").write_text(config)
    for path in _shared():
        (packages / path.name).symlink_to(path)
    for library in (Path(sys.prefix) / "lib").glob("*.so*"):  # Intel's OpenMP is found there
        (folder / "lib" / library.name).symlink_to(library)


def _install(folder: Path, wheel: Path) -> None:
    command = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    command += ["install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode:
        raise Problem(
            f"pip could not install upstream's wheel (status {result.returncode})",
            (result.stdout.strip().splitlines() or ["it said nothing"])[-1],
            "make setup, then run this again",
        )

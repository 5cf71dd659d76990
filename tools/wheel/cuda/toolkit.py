# SPDX-License-Identifier: Apache-2.0
"""nvcc 12.4: the toolkit in $CUDA_HOME, or one put together from packages, once.

No package index has the whole of it. Debian has the compiler (in the release that
upstream.toml names, whatever release this machine runs), PyPI the headers and the runtime
library. cuBLAS is 363 MB and only two of its headers are needed: those are fetched alone.
"""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tools.cache import cache_dir, locked, new_folder, sha256_of
from tools.errors import Problem
from tools.index import fetch, fetch_members
from tools.pins import PIN_FILE

VERSION = "12.4"
DEBIAN_HOME = "usr/lib/nvidia-cuda-toolkit"
TOOLS = ("cudafe++", "fatbinary", "nvlink", "ptxas", "bin2c")
PROFILE = """\
NVVMIR_LIBRARY_DIR = $(_HERE_)/../nvvm/libdevice
PATH += $(_HERE_)/../nvvm/bin:$(_HERE_):
INCLUDES += "-I$(_HERE_)/../include"
LIBRARIES =+ $(_SPACE_) "-L$(_HERE_)/../lib64"
"""


@dataclass(frozen=True)
class Toolkit:
    """A folder with bin/nvcc, include and lib64, and what nvcc calls itself."""

    home: Path
    version: str

    @classmethod
    def find(cls) -> "Toolkit":
        """The one in $CUDA_HOME where that is 12.4, else the assembled one.

        Raises Problem when CUDA_HOME names another version or the packages cannot be had.
        """
        if named := os.environ.get("CUDA_HOME"):
            version = _version(Path(named))
            if not version.startswith(f"{VERSION}."):
                raise Problem(
                    f"the wheel for driver 550 is compiled by CUDA {VERSION}",
                    f"CUDA_HOME is {named}, which is {version or 'no toolkit'}",
                    f"point CUDA_HOME at a CUDA {VERSION} toolkit, or unset it to have one put together",
                )
            return cls(Path(named), version)
        home = assembled()
        return cls(home, _version(home))


def assembled() -> Path:
    """The folder of the assembled toolkit, made now unless the cache has it."""
    parts = tomllib.loads(PIN_FILE.read_text())["cuda124"]
    digest = hashlib.sha256(f"{parts} {PROFILE}".encode()).hexdigest()[:12]
    home = cache_dir() / f"cuda-{VERSION}-{digest}"
    with locked(home):
        if not home.exists():
            with new_folder(home) as folder:
                _compiler(_debian(parts["compiler"]), folder)
                for part in parts["headers"].values():
                    _headers(fetch(part["project"], part["file"], part["sha256"]), folder)
                cublas = parts["cublas"]
                members = fetch_members(cublas["project"], cublas["file"], cublas["members"])
                for name, content in members.items():
                    (folder / "include" / Path(name).name).write_bytes(content)
                if not _version(folder).startswith(f"{VERSION}."):
                    raise Problem(
                        "the assembled CUDA toolkit does not run",
                        f"{folder}/bin/nvcc --version says nothing of {VERSION}",
                        "it needs x86-64 and glibc 2.34; else point CUDA_HOME at a toolkit",
                    )
    return home


def _version(home: Path) -> str:
    """nvcc's version, such as 12.4.131; "" where none runs."""
    try:
        command = [home / "bin" / "nvcc", "--version"]
        result = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return ""
    match = re.search(r"\bV(\d+\.\d+\.\d+)", result.stdout)
    return match[1] if match else ""


def _compiler(package: Path, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        _run(["dpkg-deb", "-x", str(package), scratch])
        debian, usr = Path(scratch) / DEBIAN_HOME, Path(scratch) / "usr"
        for place in ("bin", "nvvm/bin", "include", "lib64"):
            (folder / place).mkdir(parents=True)
        for tool in TOOLS:
            shutil.move(usr / "bin" / tool, folder / "bin")
        shutil.move(debian / "bin" / "nvcc", folder / "bin")
        shutil.move(debian / "bin" / "crt", folder / "bin")
        shutil.move(debian / "bin" / "cicc", folder / "nvvm" / "bin")
        shutil.move(debian / "libdevice", folder / "nvvm")
    (folder / "bin" / "nvcc.profile").write_text(PROFILE)
    # nvcc always names this archive when it links; we link nothing on the device
    (folder / "lib64" / "libcudadevrt.a").write_bytes(b"!<arch>\n")


def _headers(wheel: Path, folder: Path) -> None:
    """Unpack nvidia/*/include and the runtime library of a PyPI package."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            found = re.fullmatch(r"nvidia/\w+/(include/.+\.\w+|include/.+/\w+|lib/lib.+)", name)
            if found is None or name.endswith("__init__.py"):
                continue
            target = folder / found[1].replace("lib/", "lib64/", 1)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(name))
            if ".so." in target.name:
                link = target.with_name(target.name.split(".so.")[0] + ".so")
                link.symlink_to(target.name)


def _debian(part: dict[str, str]) -> Path:
    """The pinned package file, fetched by apt from the mirror this machine uses."""
    target = cache_dir() / "downloads" / part["file"]
    with locked(target):
        if not target.exists() or sha256_of(target) != part["sha256"]:
            with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
                package = _apt_download(part, Path(scratch))
                if sha256_of(package) != part["sha256"]:
                    raise Problem(
                        f"{part['file']} is not the file that was pinned",
                        f"sha256 {sha256_of(package)}, pinned {part['sha256']}",
                        "do not use it; compare upstream.toml with Debian's package list",
                    )
                os.replace(package, target)
    return target


def _apt_download(part: dict[str, str], scratch: Path) -> Path:
    """Let apt fetch from another release without touching the system's own lists."""
    sources = scratch / "sources.list"
    keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
    sources.write_text(
        f"deb [arch=amd64 signed-by={keyring}] {_mirror()} {part['suite']} {part['component']}\n"
    )
    for folder in ("lists/partial", "cache/archives/partial"):
        (scratch / folder).mkdir(parents=True)
    own = {
        "Dir::Etc::SourceList": sources,
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State::Lists": scratch / "lists",
        "Dir::Cache": scratch / "cache",
        "APT::Sandbox::User": "root",
    }
    options = [f"-o{key}={value}" for key, value in own.items()]
    _run(["apt-get", *options, "-q", "update"], scratch)
    _run(["apt-get", *options, "-q", "download", f"{part['package']}={part['version']}"], scratch)
    (package,) = scratch.glob("*.deb")
    return package


def _mirror() -> str:
    command = ["apt-get", "indextargets", "--no-release-info", "--format", "$(REPO_URI)"]
    if shutil.which("apt-get"):
        for uri in subprocess.run(command, capture_output=True, text=True).stdout.split():
            if uri.rstrip("/").endswith("/debian"):
                return uri
    raise Problem(
        f"no CUDA {VERSION} toolkit",
        "CUDA_HOME is not set, and this machine has no Debian package source to take one from",
        f"install CUDA {VERSION} and point CUDA_HOME at it, or build on Debian",
    )


def _run(command: list[str], folder: Path | None = None) -> None:
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if result.returncode:
        said = (result.stderr or result.stdout).strip().splitlines() or ["nothing"]
        raise Problem(
            f"{command[0]} ended with status {result.returncode}",
            f"putting the CUDA {VERSION} toolkit together; it said: {said[-1]}",
            "check the network, or point CUDA_HOME at an installed toolkit",
        )

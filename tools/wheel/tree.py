# SPDX-License-Identifier: Apache-2.0
"""What the series changes, against upstream and against the kernel wheel.

Of upstream's Python only what the series changes is replaced in the wheel. The kernel
wheel's packager may have changed files as well: those changes stay, and are named; a file
that both changed is refused.
"""

import hashlib
import subprocess
import sys
import tomllib
import zipfile

from tools.errors import Problem
from tools.pins import ROOT
from tools.wheel import metadata

TREE = ROOT / "build" / "tree"
UPSTREAM = "refs/series/upstream"
VERSION_FILE = "vllm/_version.py"  # whoever builds a wheel writes this one


class PatchedTree:
    """build/tree at the series' last commit."""

    def __init__(self) -> None:
        self._upstream = {}  # git's blob id by path
        for line in _git("ls-tree", "-r", UPSTREAM, "vllm"):
            about, path = line.split("\t")
            self._upstream[path] = about.split()[2]

    @classmethod
    def apply(cls, release: str) -> "PatchedTree":
        """Make build/tree for `release` and read it."""
        command = [sys.executable, "-m", "tools.series", "apply", release]
        if status := subprocess.run(command, cwd=ROOT).returncode:
            raise Problem(
                "the series does not apply",
                f"python -m tools.series apply {release} ended with status {status}",
                "see its messages above",
            )
        return cls()

    def entry_points(self) -> str:
        """entry_points.txt as the patched pyproject.toml declares it."""
        pyproject = tomllib.loads((TREE / "pyproject.toml").read_text())
        return metadata.entry_points(pyproject["project"])

    def changes(self, kernels: zipfile.ZipFile) -> tuple[dict[str, bytes], set[str]]:
        """Files to put into the wheel, by path, and files to leave out of it."""
        blobs = {path: _blob(kernels.read(path)) for path in self._in(kernels)}
        repackaged = {path for path in blobs if blobs[path] != self._upstream[path]}
        repackaged.discard(VERSION_FILE)
        replaced, removed = {}, set()
        for line in _git("diff", "--name-status", "--no-renames", UPSTREAM, "HEAD", "--", "vllm"):
            status, path = line.split("\t")
            if status == "D":
                removed.add(path)
            else:
                replaced[path] = (TREE / path).read_bytes()
        if disputed := repackaged & (replaced.keys() | removed):
            raise Problem(
                "the series changes files that the kernel wheel's packager changed too",
                ", ".join(sorted(disputed)),
                "carry the packager's change in the patch, then drop this check for that file",
            )
        for path in sorted(repackaged):
            print(f"keeping the packager's change to {path}", file=sys.stderr)
        return replaced, removed

    def _in(self, kernels: zipfile.ZipFile) -> set[str]:
        return self._upstream.keys() & set(kernels.namelist())


def _blob(content: bytes) -> str:
    """Git's name for a file of this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _git(*arguments: str) -> list[str]:
    command = ["git", "-C", str(TREE), "-c", "core.quotePath=off", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()

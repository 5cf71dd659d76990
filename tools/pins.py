# SPDX-License-Identifier: Apache-2.0
"""Typed reading of upstream.toml."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from tools.errors import Problem

ROOT = Path(__file__).resolve().parent.parent
PIN_FILE = ROOT / "upstream.toml"


@dataclass(frozen=True)
class Artifact:
    """One file of the package index: project, file name, SHA-256 in hex."""

    project: str
    file: str
    sha256: str


class Pins:
    """The pinned release and the artifacts known for it and its neighbours."""

    def __init__(self, path: Path = PIN_FILE) -> None:
        self.path = path
        try:
            self._data = tomllib.loads(path.read_text())
            self.release: str = self._data["upstream"]["release"]
            self.revision: int = self._data["upstream"]["revision"]
        except (OSError, tomllib.TOMLDecodeError, KeyError) as error:
            raise Problem(
                "the pin cannot be read", f"{path}: {error!r}", "restore upstream.toml from git"
            ) from error

    def sdist(self, release: str | None = None) -> Artifact:
        """The source distribution of `release` (default: the pinned one)."""
        return self._artifact("releases", release or self.release, "sdist")

    def wheel(self, target: str, machine: str, release: str | None = None) -> Artifact:
        """The kernel wheel for a target ("cpu") on a machine ("x86_64", "aarch64")."""
        return self._artifact("releases", release or self.release, "wheels", f"{target}-{machine}")

    def model(self, name: str) -> Artifact:
        """The package that carries the model `name`."""
        return self._artifact("models", name)

    def _artifact(self, *keys: str) -> Artifact:
        table = self._data
        for key in keys:
            if key not in table:
                raise Problem(
                    f"{' '.join(keys)} is not pinned",
                    f"{self.path} has {', '.join(sorted(table)) or 'nothing'} where {key} is asked",
                    "choose one of these, or add the file's name and sha256 there",
                )
            table = table[key]
        return Artifact(table["project"], table["file"], table["sha256"])

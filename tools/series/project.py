# SPDX-License-Identifier: Apache-2.0
"""The repository as the verbs see it: the pin, the patches, the lock, upstream's source."""

from functools import cached_property
from pathlib import Path

from tools.pins import Pins
from tools.series.judge import Outcome, judge
from tools.series.lock import Lock, read_lock
from tools.series.patch import Patch, load_series
from tools.series.source import Source, open_source
from tools.series.upstream import pinned_commit, sdist


class Project:
    """Everything is read when it is first asked for, and once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tree = root / "build" / "tree"
        self.lock_path = root / "series.lock"
        self._sources: dict[str, Source] = {}

    @cached_property
    def pins(self) -> Pins:
        return Pins(self.root / "upstream.toml")

    @cached_property
    def patches(self) -> list[Patch]:
        return load_series(self.root / "patches")

    @cached_property
    def lock(self) -> Lock:
        return read_lock(self.lock_path)

    def source(self, release: str | None = None) -> Source:
        release = release or self.pins.release
        if release not in self._sources:
            commit = pinned_commit(self.pins, release)
            self._sources[release] = open_source(release, sdist(self.pins, release), commit)
        return self._sources[release]

    def judged(self, release: str | None = None) -> Outcome:
        """The series at `release`, compared with what was reviewed."""
        source = self.source(release)
        return judge(self.patches, source, self.lock.reviewed(source.release))

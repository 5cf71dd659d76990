# SPDX-License-Identifier: Apache-2.0
"""Small upstream releases as real git repositories, and patches as real files."""

import hashlib
import io
import itertools
import tarfile
import textwrap
from importlib.metadata import version

import pytest

from tools.series.patch import load_series
from tools.series.project import Project
from tools.series.source import BRANCH, Source, commit_header, git, write_file


@pytest.fixture
def release(tmp_path):
    """release({path: text}, "1.0.0") -> Source."""
    counter = itertools.count()

    def make(files: dict[str, str], name: str = "1.0.0") -> Source:
        repository = tmp_path / f"upstream-{next(counter)}.git"
        repository.mkdir()
        git(repository, "init", "--quiet", "--bare")
        stream = io.BytesIO()
        stream.write(commit_header(BRANCH, name))
        for path, text in files.items():
            write_file(stream, path, text.encode())
        git(repository, "fast-import", "--quiet", stdin=stream.getvalue())
        return Source(name, repository)

    return make


@pytest.fixture
def series(tmp_path):
    """series(name="yaml of the edits", …) -> [Patch]."""
    counter = itertools.count()

    def make(**patches: str):
        folder = tmp_path / f"patches-{next(counter)}"
        folder.mkdir()
        for name, edits in patches.items():
            head = "subject: s\nwhy: w\nupstream: none; a test\nedits:\n"
            body = textwrap.indent(textwrap.dedent(edits).strip("\n"), "  ") + "\n"
            (folder / f"{name.replace('_', '-')}.yaml").write_text(head + body)
        return load_series(folder)

    return make


@pytest.fixture
def project(tmp_path, monkeypatch):
    """project({release: {path: text}}, name="yaml of the edits", …) -> Project.

    The first release is the pin. Its sdist lies in a cache of the test's own, so the real
    fetch, hash and import run, without a network.
    """
    monkeypatch.setenv("VLLM_TQ_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "repository"
    (root / "patches").mkdir(parents=True)
    (root / "vllm" / "ours").mkdir(parents=True)
    (root / "vllm" / "ours" / "code.py").write_text("OURS = 1\n")
    (root / ".gitignore").write_text("/build/\n")
    (root / "requirements").mkdir()
    (root / "requirements" / "cpu.txt").write_text(f"# Pinned.\n\nrequests=={version('requests')}\n")
    git(root, "init", "--quiet")
    downloads = tmp_path / "cache" / "downloads"
    downloads.mkdir(parents=True)

    def make(releases: dict[str, dict[str, str]], **patches: str) -> Project:
        lines = ["[upstream]", f'release = "{next(iter(releases))}"', "revision = 1"]
        for release, files in releases.items():
            archive = downloads / f"vllm-{release}.tar.gz"
            with tarfile.open(archive, "w:gz") as tar:
                for path, text in files.items():
                    member = tarfile.TarInfo(f"vllm-{release}/{path}")
                    member.size = len(text.encode())
                    tar.addfile(member, io.BytesIO(text.encode()))
            digest = hashlib.sha256(archive.read_bytes()).hexdigest()
            lines += [f'[releases."{release}".sdist]', 'project = "vllm"']
            lines += [f'file = "{archive.name}"', f'sha256 = "{digest}"']
        (root / "upstream.toml").write_text("\n".join(lines) + "\n")
        for name, edits in patches.items():
            body = textwrap.indent(textwrap.dedent(edits).strip("\n"), "  ")
            head = f'subject: "{name}: does it"\nwhy: w\nupstream: none; a test\nedits:\n'
            (root / "patches" / f"{name.replace('_', '-')}.yaml").write_text(head + body + "\n")
        return Project(root)

    return make

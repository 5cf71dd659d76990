# SPDX-License-Identifier: Apache-2.0
"""Upstream's files at one release, read from a bare git repository in the cache.

The release's sdist is streamed from its archive straight into git: nothing of it is
ever unpacked onto the disk by name, and what is read cannot have been edited.
"""

import os
import re
import subprocess
import tarfile
import tempfile
from functools import cache
from pathlib import Path, PurePosixPath

from tools.cache import cache_dir, locked, new_folder
from tools.errors import Problem
from tools.index import fetch
from tools.pins import Artifact

# Not needed to build, test or patch; a third of the files and half of the bytes.
LEFT_OUT = ("benchmarks", "docker", "docs", "examples", "tests", "vllm.egg-info")
BRANCH = "refs/heads/upstream"
# Everything that enters a commit id is fixed, so that the same input gives the same id.
IDENTITY = b"vLLM-TQ series <series@localhost> 946684800 +0000"
_ENVIRONMENT = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}


def git(
    folder: Path, *arguments: str, stdin: bytes | None = None, check: bool = True
) -> subprocess.CompletedProcess[bytes]:
    """Run git in `folder` without the user's configuration; the completed process."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            input=stdin,
            capture_output=True,
            env=environment | _ENVIRONMENT,
        )
    except FileNotFoundError as error:
        raise Problem("git is missing", "it is not on PATH", "install git") from error
    if check and done.returncode:
        message = done.stderr.decode(errors="replace").strip()
        raise Problem(
            f"git {arguments[0]} failed: {message}",
            f"in {folder}",
            "remove that folder if it is damaged, and run the command again",
        )
    return done


class Source:
    """One release. Paths are relative to upstream's root, with `/`."""

    def __init__(self, release: str, repository: Path) -> None:
        self.release = release
        self.repository = repository
        self.read = cache(self._read)
        self.modes = cache(self._modes)  # file mode by path

    def _read(self, path: str) -> str | None:
        """The file's text, newlines as they are; None where there is no such file."""
        if path not in self.modes():
            return None
        return git(self.repository, "cat-file", "blob", f"{BRANCH}:{path}").stdout.decode("utf-8")

    def _modes(self) -> dict[str, int]:
        listing = git(self.repository, "ls-tree", "-r", "-z", BRANCH).stdout.decode()
        entries = [entry.split("\t", 1) for entry in listing.split("\0") if entry]
        return {path: int(about.split()[0], 8) for about, path in entries}

    def paths(self) -> set[str]:
        return set(self.modes())

    def mode(self, path: str) -> int:
        return self.modes()[path]

    def definitions_of(self, name: str) -> list[str]:
        """Where `name` is defined at any depth, as PATH:LINE."""
        found = git(
            self.repository, "grep", "-n", "-F", "-w", name, BRANCH, "--", "*.py", check=False
        ).stdout.decode(errors="replace")
        word = re.escape(name)
        defines = re.compile(rf"\s*((async )?def|class) {word}\b|\s*{word}\s*(:[^=]*)?=[^=]")
        lines = (line.split(":", 3)[1:] for line in found.splitlines())
        return [f"{path}:{number}" for path, number, text in lines if defines.match(text)]


def open_source(release: str, sdist: Artifact, commit: str | None = None) -> Source:
    """The source of `release`: imported before, or its sdist is fetched and imported.

    One that `import_clone` brought at `commit` serves where the sdist was never fetched.
    """
    repository = _repository(release, sdist.sha256[:12])
    if commit and not repository.is_dir() and _repository(release, commit).is_dir():
        return Source(release, _repository(release, commit))
    with locked(repository):
        if not repository.is_dir():
            archive = fetch(sdist.project, sdist.file, sdist.sha256)
            with new_folder(repository) as partial:
                _import(archive, partial, release)
    return Source(release, repository)


def import_clone(release: str, clone: Path, commit: str) -> Source:
    """Take the release from a clone of upstream's repository, where its tag is `commit`."""
    tag = f"v{release}"
    found = git(clone, "rev-parse", "--verify", f"{tag}^{{commit}}").stdout.decode().strip()
    if not found.startswith(commit):
        raise Problem(
            f"{tag} is not the commit that was pinned",
            f"{clone} has {found}, upstream.toml {commit}",
            "do not use it; compare with the commit that the project published",
        )
    repository = _repository(release, commit)
    with (
        locked(repository),
        new_folder(repository) as partial,
        tempfile.NamedTemporaryFile(suffix=".tar.gz") as archive,
    ):
        git(clone, "archive", f"--prefix=vllm-{release}/", "--output", archive.name, found)
        _import(Path(archive.name), partial, release)
    return Source(release, repository)


def _repository(release: str, origin: str) -> Path:
    return cache_dir() / "upstream" / f"{release}-{origin}.git"


def _import(archive: Path, repository: Path, release: str) -> None:
    git(repository, "init", "--quiet", "--bare")
    importer = subprocess.Popen(
        ["git", "-C", str(repository), "fast-import", "--quiet"], stdin=subprocess.PIPE
    )
    try:
        with tarfile.open(archive, "r|gz") as tar, importer.stdin as stream:
            stream.write(commit_header(BRANCH, f"vLLM {release}"))
            for member in tar:
                if (path := _safe_path(member, archive)) is not None:
                    write_file(stream, path, tar.extractfile(member).read(), member.mode)
            stream.write(b"done\n")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise Problem(
            f"the source archive cannot be read: {error}",
            f"in {archive}",
            "remove that file and run the command again, with room on the disk",
        ) from error
    finally:
        status = importer.wait()
    if status:
        raise Problem("git fast-import failed", f"in {repository}", "check the room on the disk")
    git(repository, "symbolic-ref", "HEAD", BRANCH)


def _safe_path(member: tarfile.TarInfo, archive: Path) -> str | None:
    """The path below the archive's one top folder; None for what is left out."""
    parts = PurePosixPath(member.name).parts
    control = any(ord(character) < 32 or character in '"\\' for character in member.name)
    inside = parts[1:]
    # A link at the top is a second name of a document, for people.
    left_out = inside[0] in LEFT_OUT or inside[0][0] == "." if len(inside) > 1 else member.issym()
    plain = member.isfile() or member.isdir() or left_out
    if not plain or member.name.startswith("/") or ".." in parts or control:
        raise Problem(
            f"the source archive holds an unsafe member: {member.name!r}",
            f"in {archive}",
            "do not use it; compare its sha256 with the one the project publishes",
        )
    return None if left_out or member.isdir() else "/".join(inside)


def commit_header(branch: str, message: str, parent: str | None = None) -> bytes:
    """The opening of a fast-import commit; its files follow."""
    body = message.encode()
    lines = [b"commit " + branch.encode(), b"committer " + IDENTITY, b"data %d" % len(body), body]
    if parent:
        lines.append(b"from " + parent.encode())
    return b"\n".join(lines) + b"\n"


def write_file(stream, path: str, content: bytes, mode: int = 0o644) -> None:
    """One file of a fast-import commit."""
    kind = b"100755" if mode & 0o111 else b"100644"
    stream.write(b"M %s inline %s\ndata %d\n" % (kind, path.encode(), len(content)))
    stream.write(content + b"\n")

# SPDX-License-Identifier: Apache-2.0
"""Verified downloads from the package index, by project and file name.

The client library knows the public index; PIP_INDEX_URL names another, as for pip.
Files lie in the cache folder ($VLLM_TQ_CACHE, or ~/.cache/vllm-tq) and are hashed
before every use, so a damaged copy is noticed and replaced.
"""

import errno
import hashlib
import io
import os
import sys
import time
import zipfile
from pathlib import Path

import requests
from pypi_simple import PYPI_SIMPLE_ENDPOINT, DistributionPackage, NoSuchProjectError, PyPISimple
from pypi_simple.errors import UnsupportedContentTypeError
from requests.adapters import HTTPAdapter, Retry

from tools.cache import cache_dir, locked, sha256_of
from tools.errors import Problem

TIMEOUT = (30.0, 180.0)  # seconds to connect, seconds without a byte


class FetchError(Problem):
    """A file could not be had, or is not the one that was pinned."""


def fetch(project: str, filename: str, sha256: str) -> Path:
    """The path of the verified file; downloaded unless the cache already holds it.

    Raises FetchError when the index cannot be reached or lacks the file, when the
    hash differs, and when the disk is full. The path exists only when it is whole.
    """
    target = cache_dir() / "downloads" / filename
    try:
        with locked(target):
            if not _is_cached(target, sha256):
                _download(project, target, sha256)
    except OSError as error:
        if isinstance(error, requests.RequestException):
            raise FetchError(
                f"cannot fetch {filename}",
                f"the package index did not deliver {project}: {_reason(error)}",
                f"check the network or set PIP_INDEX_URL, or copy the file to {target}",
            ) from error
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise FetchError(
            f"cannot store {filename}: {'the disk is full' if full else error.strerror}",
            f"in {target.parent}",
            "make room or permit writing there, or point VLLM_TQ_CACHE at another folder",
        ) from error
    return target


def fetch_members(project: str, filename: str, members: dict[str, str]) -> dict[str, bytes]:
    """Some members of a wheel, name -> content, without fetching the rest of it.

    `members` has the SHA-256 of each. Raises FetchError when the index cannot be reached,
    does not serve parts of files, or has others.
    """
    endpoint = os.environ.get("PIP_INDEX_URL") or PYPI_SIMPLE_ENDPOINT
    try:
        with PyPISimple(endpoint) as client:
            remote = _Remote(client.s, _find(client, project, filename).url)
            with zipfile.ZipFile(io.BufferedReader(remote, 1 << 16)) as archive:
                found = {name: archive.read(name) for name in members}
    except (requests.RequestException, zipfile.BadZipFile, KeyError) as error:
        raise FetchError(
            f"cannot fetch parts of {filename}",
            f"the package index did not deliver them: {type(error).__name__}: {error}",
            "check the network; an index set in PIP_INDEX_URL must serve byte ranges",
        ) from error
    for name, content in found.items():
        if hashlib.sha256(content).hexdigest() != members[name]:
            raise FetchError(
                f"{name} is not the file that was pinned",
                f"its sha256 in {filename} differs from upstream.toml's",
                "do not use it; compare with the published package",
            )
    return found


class _Remote(io.RawIOBase):
    """A file on a server, read in byte ranges."""

    def __init__(self, session: requests.Session, url: str) -> None:
        self._session, self._url, self._at = session, url, 0
        self._size = int(self._range("bytes=0-0").headers["Content-Range"].rsplit("/", 1)[1])

    def _range(self, asked: str) -> requests.Response:
        response = self._session.get(self._url, headers={"Range": asked}, timeout=TIMEOUT)
        response.raise_for_status()
        if response.status_code != requests.codes.partial_content:
            raise requests.RequestException("the server sends whole files only")
        return response

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: memoryview) -> int:
        end = min(self._at + len(buffer), self._size)
        if end <= self._at:
            return 0
        content = self._range(f"bytes={self._at}-{end - 1}").content
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


def _is_cached(target: Path, sha256: str) -> bool:
    if not target.exists():
        return False
    if sha256_of(target) == sha256:
        return True
    print(f"{target} is damaged (its sha256 differs): fetching it again", file=sys.stderr)
    target.unlink()
    return False


def _download(project: str, target: Path, sha256: str) -> None:
    partial = target.with_name(f"{target.name}.part")
    try:
        endpoint = os.environ.get("PIP_INDEX_URL") or PYPI_SIMPLE_ENDPOINT
        with PyPISimple(endpoint) as client:
            retry = HTTPAdapter(max_retries=Retry(3, backoff_factor=1, status_forcelist=[502, 503]))
            client.s.mount("https://", retry)
            package = _find(client, project, target.name)
            client.download_package(
                package,
                partial,
                verify=False,  # the pin below is the authority, not the index
                progress=lambda total: Progress(target.name, total),
                timeout=TIMEOUT,
            )
        found = sha256_of(partial)
        if found != sha256:
            raise FetchError(
                f"{target.name} is not the file that was pinned",
                f"sha256 {found}, pinned {sha256}",
                "do not use it; compare upstream.toml with the release's published hash",
            )
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _find(client: PyPISimple, project: str, filename: str) -> DistributionPackage:
    try:
        page = client.get_project_page(project, timeout=TIMEOUT)
    except (NoSuchProjectError, UnsupportedContentTypeError) as error:
        raise FetchError(
            f"cannot fetch {filename}",
            f"the package index has no usable page for {project}: {error}",
            "check the project's name in upstream.toml, and PIP_INDEX_URL if it is set",
        ) from error
    for package in page.packages:
        if package.filename == filename:
            return package
    raise FetchError(
        f"cannot fetch {filename}",
        f"the package index lists {len(page.packages)} files of {project}, not this one",
        "check the name in upstream.toml; the release may have been withdrawn",
    )


def _reason(error: requests.RequestException) -> str:
    """The innermost cause, which is the readable one, on one line."""
    cause: BaseException = error
    while cause.__cause__ or cause.__context__:
        cause = cause.__cause__ or cause.__context__
    return f"{type(cause).__name__}: {cause}".splitlines()[0]


class Progress:
    """A line on stderr: rewritten while bytes arrive on a terminal, once elsewhere."""

    def __init__(self, name: str, total: int | None) -> None:
        self.name, self.total = name, total
        self.done, self.shown_at = 0, 0.0

    def __enter__(self) -> "Progress":
        if not sys.stderr.isatty():
            size = f" ({self.total / 1e6:.0f} MB)" if self.total else ""
            print(f"fetching {self.name}{size}", file=sys.stderr, flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        if sys.stderr.isatty():
            self._show("\n")

    def update(self, increment: int) -> None:
        self.done += increment
        if sys.stderr.isatty() and time.monotonic() - self.shown_at > 0.2:
            self.shown_at = time.monotonic()
            self._show("")

    def _show(self, end: str) -> None:
        of_total = f" of {self.total / 1e6:.0f}" if self.total else ""
        line = f"\rfetching {self.name}: {self.done / 1e6:.0f}{of_total} MB"
        print(line, end=end, file=sys.stderr, flush=True)

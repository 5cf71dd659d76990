# SPDX-License-Identifier: Apache-2.0
"""The cache folder: what can be made again, whole or not at all."""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_dir() -> Path:
    """$VLLM_TQ_CACHE, or ~/.cache/vllm-tq."""
    configured = os.environ.get("VLLM_TQ_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "vllm-tq"


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once or not at all; its folder is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.part")
    partial.write_text(text)
    os.replace(partial, path)


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """One process at a time makes `target`; a second one waits here."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{target}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A scratch folder that replaces `target` when the block ends without an error.

    Call it under `locked(target)`: replacing a folder takes two renames.
    """
    partial = target.with_name(f"{target.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        if target.exists():
            shutil.rmtree(target)
        os.replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)

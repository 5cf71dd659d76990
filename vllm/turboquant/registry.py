# SPDX-License-Identifier: Apache-2.0
"""Where profiles live, and which one belongs to a model.

Looked for by identity: the user's cache folder ($VLLM_TQ_CACHE or ~/.cache/vllm-tq, below
profiles/), then the folder that ships with the package.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm.turboquant.formats import Format
from vllm.turboquant.identity import ModelIdentity
from vllm.turboquant.profile import Profile, read

SHIPPED = Path(__file__).with_name("profiles")


def cached_path(model: ModelIdentity, fmt: Format, strict: bool = False) -> Path:
    """The file in the user's cache folder that a model's profile is kept in."""
    configured = os.environ.get("VLLM_TQ_CACHE")
    root = Path(configured) if configured else Path.home() / ".cache" / "vllm-tq"
    return root / "profiles" / file_name(model, fmt, strict)


def file_name(model: ModelIdentity, fmt: Format, strict: bool = False) -> str:
    """Equal for equal identities, formats and kinds of scale only."""
    kind = "-strict" if strict else ""
    return f"{model.slug}-{fmt.name.removeprefix('tdsf_')}{kind}.safetensors"


def find(model: ModelIdentity, fmt: Format, strict: bool = False) -> Path | None:
    """The profile file of a model, or None where it has none."""
    for path in (cached_path(model, fmt, strict), SHIPPED / file_name(model, fmt, strict)):
        if path.is_file():
            return path
    return None


def open_profile(
    path: Path,
    model: ModelIdentity | None,
    fmt: Format,
    *,
    strict: bool = False,
    any_model: bool = False,
) -> Profile:
    """Read a profile for a model, None for one that cannot be identified.

    strict: demand one whose formula alone is the scale. any_model: accept a profile of another
    model; its numbers will not suit this one.
    Raises ValueError for an unusable file, another format or kind, or another model.
    """
    profile = read(path)
    if profile.format != fmt:
        raise ValueError(
            f"{path} is a profile for {profile.format.name}, the cache is {fmt.name}.\n"
            "Fit one for this format with `vllm turboquant calibrate`."
        )
    if strict and not profile.strict:
        raise ValueError(
            f"{path} is a profile with a scale byte per token, strict TDSF is asked for.\n"
            "Fit one with `vllm turboquant calibrate --strict`."
        )
    if profile.model != model and not any_model:
        raise ValueError(
            f"{path} is a profile of another model and would cost accuracy.\n"
            f"  fitted on  {profile.model}\n"
            f"  serving    {model or 'a model that cannot be identified'}\n"
            "Fit one with `vllm turboquant calibrate`, or set VLLM_TQ_ANY_PROFILE=1 to use it."
        )
    return profile


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time makes the file `path`; a second one waits here."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

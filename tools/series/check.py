# SPDX-License-Identifier: Apache-2.0
"""`check`: what a reviewer would otherwise have to look for by hand."""

import re
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from tools.series.judge import CLEAN, CONFLICT, OBSOLETE, judge
from tools.series.lock import make_lock
from tools.series.project import Project
from tools.series.source import git
from tools.series.tree import shadowed

SHARED_RUN = 4
EVERYBODYS = {"LICENSE"}


def check(project: Project, sdist: Path) -> list[str]:
    """Every fault that is found, each with where it is; empty when there is none."""
    outcome, root = project.judged(), project.root
    faults = [
        f"{verdict.edit.name}: {verdict.state}: {'; '.join(verdict.reasons)}"
        for verdict in outcome.verdicts
        if verdict.state not in (CLEAN, OBSOLETE)
    ]
    faults += [f"{path}: upstream has this file" for path in shadowed(root, outcome.source)]
    if not outcome.of(CONFLICT):
        if judge(reversed(project.patches), outcome.source).rendered() != outcome.rendered():
            faults.append("patches/: in reverse order they give other files")
        made = make_lock([outcome], project.pins.release)
        if (made.files, made.edits.keys()) != (project.lock.files, project.lock.edits.keys()):
            faults.append("series.lock: not of these patches; run `python -m tools.series lock`")
    return faults + list(shared_text(root, committed(root), sdist))


def committed(root: Path) -> list[str]:
    """What git tracks or would add."""
    names = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").stdout
    return sorted(name for name in names.decode().split("\0") if name and (root / name).is_file())


def shared_text(root: Path, names: Iterable[str], sdist: Path) -> Iterator[str]:
    """Files of ours with a run of 4 or more telling lines that upstream has too."""
    ours: dict[tuple[str, ...], str] = {}
    for name in names:
        own = [line for line in _lines((root / name).read_bytes()) if _tells(line)]
        if name not in EVERYBODYS:
            runs = (tuple(own[at : at + SHARED_RUN]) for at in range(len(own) - SHARED_RUN + 1))
            ours |= dict.fromkeys(runs, name)
    known = {line for run in ours for line in run}
    found: dict[str, str] = {}
    with tarfile.open(sdist, "r|gz") as tar:
        for member in tar:
            run: tuple[str, ...] = ()
            for line in _lines(tar.extractfile(member).read()) if member.isfile() else []:
                if line in known:
                    run = (*run[1 - SHARED_RUN :], line)
                    if name := ours.get(run):
                        found.setdefault(name, f"`{run[0]}` and on, as in {member.name}")
                elif run and _tells(line):
                    run = ()
    for name, where in sorted(found.items()):
        yield f"{name}: {SHARED_RUN} lines are upstream's: {where}"


def _lines(content: bytes) -> list[str]:
    if b"\0" in content[:1024]:
        return []
    return [line.strip() for line in content.decode("utf-8", errors="replace").splitlines()]


def _tells(line: str) -> bool:
    """Whether a line can tell whose text it is."""
    return len(re.sub(r"\W", "", line)) >= 8 and not _COMMON.match(line)


# Imports, bare names, decorators and returns, and parameters as an interface dictates them.
_COMMON = re.compile(r"(import|from) |\w+,$|@\w+$|return \w+$|\w+: [^=]*( = [\w.]+)?,$")

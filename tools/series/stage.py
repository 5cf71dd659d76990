# SPDX-License-Identifier: Apache-2.0
"""`stage`: build/RELEASE, a copy of this checkout that has another release as its pin.

The copy is a whole checkout with its own environment, build folder and dist, so everything
that works for the pin works there unchanged. What it differs in is pinned there only.
"""

from pathlib import Path

from tools.series.check import committed
from tools.series.pin import pinned
from tools.series.project import Project
from tools.series.source import git


def stage(project: Project, release: str) -> Path:
    """Make the copy or bring it up to date; files that stay the same keep their times."""
    folder = project.root / "build" / release
    texts = pinned(project, release, project.pins.revision)
    wanted = {name: (project.root / name).read_bytes() for name in committed(project.root)}
    wanted |= {name: text.encode() for name, text in texts.items()}
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "--quiet")  # a checkout of its own: git lists its files, not ours
    for name in set(committed(folder)) - wanted.keys():
        (folder / name).unlink()
    for name, content in wanted.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_bytes() != content:
            path.write_bytes(content)
        path.chmod((project.root / name).stat().st_mode)
    return folder

# SPDX-License-Identifier: Apache-2.0
"""`bump`: move the pin to another release, when the series is good for it."""

import sys

from tools.cache import write_whole
from tools.errors import Problem
from tools.series import report
from tools.series.judge import CONFLICT, judge
from tools.series.lock import make_lock, write_lock
from tools.series.pin import pinned
from tools.series.project import Project
from tools.series.upstream import kernel_machines, pinned_releases


def bump(project: Project, release: str, reviewed: bool) -> str:
    """Write upstream.toml, requirements/cpu.txt and series.lock; what was done, in a line.

    With a conflict, or a drift that is not `reviewed`, only a draft is written: the report
    with upstream's own changes around every edit.
    """
    old, outcome = project.judged(), project.judged(release)
    code = report.exit_code(outcome)
    if code == 1 or (code == 2 and not reviewed):
        draft = project.root / "build" / f"bump-{release}.md"
        draft.parent.mkdir(exist_ok=True)
        draft.write_text(report.markdown(old, outcome))
        report.blocks(outcome, sys.stderr)
        again = "" if code == 1 else " --reviewed"
        what = "conflicts with" if code == 1 else "applies to, but hangs on changed lines of,"
        raise Problem(
            f"the series {what} vLLM {release}",
            f"the pin stays at {old.source.release}; upstream's changes are in {draft}",
            f"read them, correct patches/, then `python -m tools.series bump {release}{again}`",
        )
    for path, text in pinned(project, release, revision=1).items():
        write_whole(project.root / path, text)
    after = Project(project.root)
    lock_series(after)
    machines = kernel_machines(after.pins, release)
    return f"pinned vLLM {release}; kernel wheels: {', '.join(machines) or 'none published yet'}"


def lock_series(project: Project) -> list[str]:
    """Record the anchors of every pinned release as reviewed; the releases."""
    releases = pinned_releases(project.pins)
    outcomes = [judge(project.patches, project.source(release)) for release in releases]
    if any(outcome.of(CONFLICT) for outcome in outcomes):
        for outcome in outcomes:
            report.blocks(outcome, sys.stderr)
        raise Problem("the series conflicts", "series.lock stays as it was", "correct patches/")
    write_lock(project.lock_path, make_lock(outcomes, project.pins.release))
    return releases

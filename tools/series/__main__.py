# SPDX-License-Identifier: Apache-2.0
"""The patch series, from pristine source to build/tree."""

import argparse
import sys
import time
from pathlib import Path

from tools import index
from tools.cache import write_whole
from tools.errors import Problem, run
from tools.pins import ROOT
from tools.series import report, tree
from tools.series.bump import bump, lock_series
from tools.series.capture import capture
from tools.series.check import check
from tools.series.pin import described
from tools.series.project import Project
from tools.series.source import import_clone
from tools.series.stage import stage
from tools.series.upstream import pinned_commit


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.series", description=__doc__)
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    def verb(work, summary: str, **arguments: dict) -> None:
        command = verbs.add_parser(
            work.__name__.partition("_")[0], help=summary, description=summary
        )
        for name, options in arguments.items():
            command.add_argument(name if "nargs" in options else f"--{name}", **options)
        command.set_defaults(work=work)

    one = {"nargs": "?", "help": "default: the pinned release"}
    many = {"nargs": "*", "metavar": "release"}
    verb(
        fetch, "bring a release's source into the cache, verified", release=one,
        clone={"metavar": "PATH", "help": "take it from a clone of upstream, by tag"},
    )  # fmt: skip
    verb(
        apply, "make build/tree: upstream, the overlay, one commit per patch", release=one,
        force={"action": "store_true", "help": "throw away hand edits in build/tree"},
    )  # fmt: skip
    verb(status, "the verdict on every edit, for each release", releases=many)
    verb(
        show, "a patch as an ordinary diff, or all of them for `git am`",
        patch={"nargs": "?"}, release=one,
        mbox={"action": "store_true", "help": "upstream to build/tree as a mailbox"},
    )  # fmt: skip
    verb(capture_tree, "turn hand-made commits in build/tree into edits")
    verb(check_series, "everything that can be wrong with the series at the pinned release")
    verb(lock, "record the series as reviewed, for all releases of upstream.toml")
    verb(
        add, "keep the series good for one more release, by its entry in upstream.toml",
        release={"nargs": None},
    )  # fmt: skip
    verb(
        bump_pin, "move the pin to another release", release={"nargs": None},
        reviewed={"action": "store_true", "help": "drifted edits were looked at and are right"},
    )  # fmt: skip
    verb(
        stage_release, "build/RELEASE: a copy of this checkout that pins another release",
        release={"nargs": None},
    )  # fmt: skip
    arguments = vars(parser.parse_args())
    work = arguments.pop("work")
    return work(Project(ROOT), **arguments)


def fetch(project: Project, release: str | None, clone: str | None) -> int:
    release = release or project.pins.release
    if clone is None:
        source = project.source(release)
    elif commit := pinned_commit(project.pins, release):
        source = import_clone(release, Path(clone), commit)
    else:
        raise Problem(
            f"the commit of vLLM {release} is not pinned",
            f'{project.pins.path} has no [releases."{release}".git]',
            "add its `commit`, or fetch the sdist instead",
        )
    print(f"vLLM {release}: {len(source.modes())} files in {source.repository}")
    return 0


def apply(project: Project, release: str | None, force: bool) -> int:
    started = time.monotonic()
    outcome = project.judged(release)
    release = outcome.source.release
    report.blocks(outcome, sys.stderr)
    head = tree.write_tree(project, outcome, force)
    print(
        f"build/tree: vLLM {release}, {len(project.patches)} patches, "
        f"{len(outcome.rendered())} files changed, commit {head[:12]} "
        f"({time.monotonic() - started:.1f} s)"
    )
    return 0


def status(project: Project, releases: list[str]) -> int:
    outcomes = [project.judged(release) for release in releases or [None]]
    print(report.table(outcomes), report.needless(outcomes), sep="\n\n", end="")
    for outcome in outcomes:
        report.blocks(outcome, sys.stdout)
    return max((report.exit_code(outcome) for outcome in outcomes), key=[0, 2, 1].index)


def show(project: Project, patch: str | None, release: str | None, mbox: bool) -> int:
    if mbox:
        outcome = project.judged(release or patch)
        sys.stdout.buffer.write(tree.mailbox(project, outcome))
        return report.exit_code(outcome)
    if patch not in {known.name for known in project.patches}:
        raise Problem(f"no patch {patch}", "in patches/", "name one of them without `.yaml`")
    outcome = project.judged(release)
    print(report.diff(outcome, patch), end="")
    return report.exit_code(outcome)


def capture_tree(project: Project) -> int:
    for message in capture(project):
        print(message)
    print("review them under patches/, then run `python -m tools.series lock`")
    return 0


def check_series(project: Project) -> int:
    sdist = project.pins.sdist()
    faults = check(project, index.fetch(sdist.project, sdist.file, sdist.sha256))
    for fault in faults:
        print(fault)
    edits = sum(len(patch.edits) for patch in project.patches)
    print(f"{edits} edits in {len(project.patches)} patches: {len(faults)} faults")
    return 1 if faults else 0


def lock(project: Project) -> int:
    print(f"series.lock: reviewed for {', '.join(lock_series(project))}")
    return 0


def add(project: Project, release: str) -> int:
    write_whole(project.pins.path, described(project, release))
    return lock(Project(project.root))


def bump_pin(project: Project, release: str, reviewed: bool) -> int:
    print(bump(project, release, reviewed))
    return 0


def stage_release(project: Project, release: str) -> int:
    print(f"{stage(project, release).relative_to(project.root)}: this checkout at vLLM {release}")
    return 0


if __name__ == "__main__":
    run(main)

# SPDX-License-Identifier: Apache-2.0
"""The daily question: is the series good for upstream's newest release?

    python -m tools.upstream_job --out build/upstream

Writes into the folder `--out`: status.json, report.md and, unless an edit conflicts,
series-RELEASE.mbox, series.lock as it will be after the review, and test.log where a CPU
kernel wheel of the release allows tests. Exit status: 0 clean or nothing new, 1 conflict,
2 drifted, 3 the result does not compile or its tests fail.
"""

import argparse
import json
import platform
import subprocess
from pathlib import Path

from packaging.version import Version

from tools.errors import run
from tools.pins import ROOT
from tools.series import report
from tools.series.judge import Outcome, judge
from tools.series.lock import make_lock, write_lock
from tools.series.pin import kernel_wheels
from tools.series.project import Project
from tools.series.tree import mailbox, overlay_files
from tools.series.upstream import newest_release, pinned_releases

BROKEN = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "upstream")
    parser.add_argument("--release", help="instead of the newest one")
    parser.add_argument("--no-tests", action="store_true", help="stop after byte-compiling")
    arguments = parser.parse_args()
    test = [] if arguments.no_tests else ["make", "test"]
    return try_release(Project(ROOT), arguments.release or newest_release(), arguments.out, test)


def try_release(project: Project, release: str, out: Path, test: list[str]) -> int:
    """Do everything for one release; the exit status. `test` gets `UPSTREAM=RELEASE` added."""
    out.mkdir(parents=True, exist_ok=True)
    for pattern in ("status.json", "report.md", "series-*.mbox", "series.lock", "test.log"):
        for stale in out.glob(pattern):
            stale.unlink()
    pin = project.pins.release
    if Version(release) <= Version(pin):
        _write_status(out, {"pin": pin, "release": release, "state": "current"})
        print(f"vLLM {release} is not above the pin {pin}: nothing to do")
        return 0
    old, new = project.judged(), project.judged(release)
    status = report.exit_code(new)
    summary = {"pin": pin} | report.record(new)
    parts = [report.markdown(old, new)]
    if status != 1:
        failures = _build(project, new, out)
        if not failures and test:
            summary["tests"] = _run_tests(project, release, test, out)
            parts.append(f"Tests: {summary['tests']}.\n")
            failures = ["the tests fail: see test.log"] if summary["tests"] == "failed" else []
        if failures:
            status = BROKEN
            parts += ["## Broken\n", *(f"- {failure}\n" for failure in failures)]
            summary |= {"state": "broken", "failures": failures}
    (out / "report.md").write_text("\n".join(parts))
    _write_status(out, summary)
    print(f"vLLM {release}: {summary['state']}; see {out / 'report.md'}")
    return status


def _build(project: Project, new: Outcome, out: Path) -> list[str]:
    """Commit the series onto the release, as mails, and write the lock; what does not compile."""
    release = new.source.release
    (out / f"series-{release}.mbox").write_bytes(mailbox(project, new))
    known = [judge(project.patches, project.source(past)) for past in pinned_releases(project.pins)]
    others = [outcome for outcome in known if outcome.source.release != release]
    write_lock(out / "series.lock", make_lock([*others, new], release))
    overlay = {path: file.read_bytes() for path, file in overlay_files(project.root).items()}
    failures = []
    for path, text in sorted((overlay | new.rendered()).items()):
        if not path.endswith(".py"):
            continue
        try:
            compile(text, path, "exec")
        except SyntaxError as error:
            failures.append(f"{path}:{error.lineno}: {error.msg}")
    return failures


def _run_tests(project: Project, release: str, test: list[str], out: Path) -> str:
    """passed, failed, or why there are none."""
    if f"cpu-{platform.machine()}" not in kernel_wheels(release):
        return f"none: no CPU kernel wheel of {release} for {platform.machine()} yet"
    with (out / "test.log").open("w") as log:
        command = [*test, f"UPSTREAM={release}"]
        done = subprocess.run(command, cwd=project.root, stdout=log, stderr=subprocess.STDOUT)
    return "failed" if done.returncode else "passed"


def _write_status(out: Path, summary: dict[str, object]) -> None:
    (out / "status.json").write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    run(main)

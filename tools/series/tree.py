# SPDX-License-Identifier: Apache-2.0
"""build/tree: a git repository of upstream, the overlay, and one commit per patch."""

import io
import tempfile
from pathlib import Path

from tools.cache import locked, new_folder
from tools.errors import Problem
from tools.series.judge import CONFLICT, Outcome
from tools.series.project import Project
from tools.series.source import BRANCH, Source, commit_header, git, write_file

SERIES = "refs/heads/series"
MADE = "refs/series/made"  # what we made; a HEAD elsewhere is somebody's work
UPSTREAM = "refs/series/upstream"


def overlay_files(root: Path) -> dict[str, Path]:
    """Our own files by their path in upstream's tree."""
    return {
        path.relative_to(root).as_posix(): path
        for path in sorted((root / "vllm").rglob("*"))
        if path.is_file() and path.suffix not in (".pyc", ".so") and path.name[0] != "."
    }


def shadowed(root: Path, source: Source) -> list[str]:
    """Overlay files that upstream has too."""
    return sorted(overlay_files(root).keys() & source.paths())


def write_tree(project: Project, outcome: Outcome, force: bool = False) -> str:
    """Make build/tree; the id of its last commit. Hand edits in it stop this.

    A tree of the same upstream release is brought up to date, and files that stay the
    same keep their times; otherwise, and with `force`, it is made anew.
    """
    tree = project.tree
    _refuse(project, outcome)
    with locked(tree):
        if tree.exists() and not force and (work := uncaptured(tree)):
            raise Problem(
                f"build/tree holds work that is not in the series: {work}",
                f"in {tree}",
                "run `python -m tools.series capture`, or `apply --force` to throw it away",
            )
        upstream = git(outcome.source.repository, "rev-parse", BRANCH).stdout
        if tree.exists() and not force and git(tree, "rev-parse", UPSTREAM).stdout == upstream:
            _commit_series(project, outcome, tree)
            git(tree, "reset", "--quiet", "--hard")
        else:
            with new_folder(tree) as partial:
                _clone(outcome.source, partial)
                _commit_series(project, outcome, partial)
                git(partial, "reset", "--quiet", "--hard")
        return git(tree, "rev-parse", "HEAD").stdout.decode().strip()


def mailbox(project: Project, outcome: Outcome) -> bytes:
    """The overlay and the patches as mails that `git am` applies to upstream's tag."""
    _refuse(project, outcome)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _clone(outcome.source, folder)
        _commit_series(project, outcome, folder)
        return git(
            folder, "format-patch", "--stdout", "--binary", "--full-index", "--zero-commit",
            "--no-signature", "--no-stat", f"{UPSTREAM}..series",
        ).stdout  # fmt: skip


def _refuse(project: Project, outcome: Outcome) -> None:
    """Stop before anything is written where an edit conflicts or the overlay hides a file."""
    if conflicts := outcome.of(CONFLICT):
        release, number = outcome.source.release, len(outcome.verdicts)
        raise Problem(
            f"{len(conflicts)} of {number} edits conflict with vLLM {release}",
            "nothing was written",
            "correct them under patches/ (docs/patches.md)",
        )
    if hidden := shadowed(project.root, outcome.source):
        raise Problem(
            f"upstream has {len(hidden)} files of the overlay's names",
            ", ".join(hidden),
            "rename ours: what we own never hides what upstream ships",
        )


def _clone(source: Source, folder: Path) -> None:
    """Upstream's commit as refs/series/upstream of a repository in the empty `folder`."""
    clone = ("clone", "--quiet", "--local", "--no-checkout", "--origin", "cache")
    git(folder, *clone, str(source.repository), ".")
    git(folder, "remote", "remove", "cache")
    git(folder, "update-ref", UPSTREAM, BRANCH)
    git(folder, "symbolic-ref", "HEAD", SERIES)
    git(folder, "branch", "--quiet", "-D", "upstream")


def _commit_series(project: Project, outcome: Outcome, folder: Path) -> None:
    """The branch `series` of the repository, not checked out."""
    git(folder, "fast-import", "--quiet", "--force", stdin=_commits(project, outcome))
    git(folder, "update-ref", MADE, SERIES)


def uncaptured(tree: Path) -> str:
    """What in `tree` was made by hand, or ""."""
    if not (tree / ".git").is_dir():
        return "it is not a tree of ours"
    if changed := git(tree, "status", "--porcelain").stdout.decode().splitlines():
        return f"{len(changed)} uncommitted changes ({changed[0].strip()})"
    made = git(tree, "rev-parse", "--verify", "--quiet", MADE, check=False).stdout
    if git(tree, "rev-parse", "HEAD").stdout != made:
        return "commits on top of it"
    return ""


def _commits(project: Project, outcome: Outcome) -> bytes:
    """The fast-import stream of the overlay's commit and one per patch."""
    stream = io.BytesIO()
    stream.write(commit_header(SERIES, "overlay: the files we own", UPSTREAM))
    for path, file in overlay_files(project.root).items():
        write_file(stream, path, file.read_bytes(), file.stat().st_mode)
    done: list[str] = []
    before: dict[str, str] = {}
    for patch in sorted(project.patches, key=lambda patch: patch.name):
        done.append(patch.name)
        after = outcome.rendered(done)
        files = {path: text for path, text in after.items() if before.get(path) != text}
        before = after
        if not files:
            continue  # every edit of it is obsolete here
        message = f"{patch.subject}\n\n{patch.why}\n\n"
        message += f"Upstream: {patch.upstream}\nSeries-Patch: {patch.name}\n"
        stream.write(commit_header(SERIES, message))
        for path, text in files.items():
            write_file(stream, path, text.encode(), outcome.source.mode(path))
    return stream.getvalue()

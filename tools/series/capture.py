# SPDX-License-Identifier: Apache-2.0
"""`capture`: commits made by hand in build/tree become edits in patches/.

`git commit --fixup=COMMIT` and a `Series-Patch: NAME` trailer name the patch; any other
commit makes a new one. An edit is accepted only when replaying it on pristine source
gives the bytes of the commit.
"""

import re
import textwrap
from dataclasses import dataclass, replace

import yaml

from tools.cache import write_whole
from tools.errors import Problem
from tools.series.judge import CONFLICT, judge
from tools.series.patch import OUR_TEXT, Edit, Patch, parse_edit, parse_patch
from tools.series.project import Project
from tools.series.propose import Change, Fields, changes, proposals
from tools.series.source import Source, git
from tools.series.tree import MADE, UPSTREAM, overlay_files, write_tree


@dataclass(frozen=True)
class Commit:
    """`files`: upstream's files that the commit changes, with their new text."""

    patch: str
    subject: str
    why: str
    files: dict[str, str]


def capture(project: Project) -> list[str]:
    """Write the edits and make the tree anew; one line per edit. A Problem writes nothing."""
    folder, tree = project.root / "patches", project.tree
    texts = {patch.name: (folder / f"{patch.name}.yaml").read_text() for patch in project.patches}
    commits = _commits(project)
    release = git(tree, "log", "-1", "--format=%s", UPSTREAM).stdout.decode().split()[-1]
    source = project.source(release)
    _same_start(project, source, {path for commit in commits for path in commit.files})
    changed: dict[str, str] = {}
    messages: list[str] = []
    for commit in commits:
        for path, new in commit.files.items():
            while (now := _render(_parsed(texts), path, source)) != new:
                text = texts.get(commit.patch) or _new_patch(commit)
                change = changes(now, new)[0]
                text, did = _captured(change, commit.patch, text, path, _parsed(texts), source)
                texts[commit.patch] = changed[commit.patch] = text
                messages.append(f"patches/{commit.patch}.yaml: {path}: {did}")
    for name, text in changed.items():
        write_whole(folder / f"{name}.yaml", text)
    after = Project(project.root)
    write_tree(after, judge(after.patches, source), force=True)
    return messages


def _commits(project: Project) -> list[Commit]:
    tree = project.tree
    if not (tree / ".git").is_dir():
        raise Problem("there is no build/tree", f"in {tree}", "run `python -m tools.series apply`")
    if git(tree, "status", "--porcelain").stdout:
        raise Problem(
            "build/tree has changes that are not committed",
            f"in {tree}",
            "commit them there: `git commit --fixup=COMMIT` for a patch that exists",
        )
    ids = git(tree, "rev-list", "--reverse", f"{MADE}..HEAD").stdout.decode().split()
    if not ids:
        raise Problem(
            "nothing to capture", f"no commit of yours in {tree}", "edit and commit there"
        )
    names = {patch.subject: patch.name for patch in project.patches}
    return [_commit(project, commit, names) for commit in ids]


def _commit(project: Project, commit: str, names: dict[str, str]) -> Commit:
    tree, ours = project.tree, overlay_files(project.root)
    subject, _, body = git(tree, "log", "-1", "--format=%B", commit).stdout.decode().partition("\n")
    trailer = re.search(r"^Series-Patch: *(\S+)$", body, re.MULTILINE)
    body = re.sub(r"^(Series-Patch|Signed-off-by): .*$", "", body, flags=re.MULTILINE).strip()
    if subject.startswith("fixup! "):
        subject = subject.removeprefix("fixup! ")
        if subject not in names:
            raise _refusal(commit[:12], f"no patch has the subject `{subject}`")
        name = names[subject]
    elif trailer:
        name = trailer[1]
    else:
        name = re.sub(r"[^a-z0-9]+", "-", subject.lower()).strip("-")
    if name not in names.values() and not body:
        raise Problem(
            "a new patch needs its reason",
            f"commit {commit[:12]} `{subject}` has a subject only",
            "say why in the commit message: `git commit --amend` in build/tree",
        )
    files = {}
    difference = git(tree, "diff", "--name-status", "--no-renames", f"{commit}^", commit).stdout
    for line in difference.decode().splitlines():
        status, path = line.split("\t")
        if status != "M" or path in ours:
            raise _refusal(path, "only changes to upstream's files are edits; ours are in vllm/")
        files[path] = git(tree, "show", f"{commit}:{path}").stdout.decode()
    return Commit(name, subject, body, files)


def _same_start(project: Project, source: Source, paths: set[str]) -> None:
    for path in paths:
        made = git(project.tree, "show", f"{MADE}:{path}").stdout.decode()
        if _render(project.patches, path, source) != made:
            raise _refusal(path, "patches/ changed after build/tree was made")


def _captured(
    change: Change, name: str, text: str, path: str, known: list[Patch], source: Source
) -> tuple[str, str]:
    """The patch file's text with the change in it, and what was written."""
    own = next((patch for patch in known if patch.name == name), None)
    for edit in own.edits if own else ():
        for amended in _amendments(text, edit, change) if edit.file == path else ():
            others = [patch for patch in known if patch.name != name]
            faults: list[str] = []
            patch = parse_patch(name, amended, faults)
            if not faults and _render([*others, patch], path, source) == change.alone:
                return amended, f"edit {edit.number} amended"
    number = len(own.edits) + 1 if own else 1
    own = own or Patch(name, name, "", "", ())
    problem = "no edit gives the same bytes"
    for fields in proposals(change, path.endswith(".py")):
        fields = {"file": path} | fields
        faults = []
        edit = parse_edit(name, number, fields, None, faults)
        if edit is None or faults:
            problem = "; ".join(faults)
            continue
        others = [patch for patch in known if patch.name != name]
        candidate = replace(own, edits=(*own.edits, edit))
        if _render([*others, candidate], path, source) == change.alone:
            note = " (exact text: no structural edit gives the same bytes)"
            return text + _yaml(fields), edit.verb + (note if edit.verb == "hunk" else "")
    raise _refusal(f"{path}, line {change.start + 1}", problem)


def _amendments(text: str, edit: Edit, change: Change):
    """The patch file's text with our own lines changed inside one of its edits."""
    old = change.old.splitlines()[change.start : change.end]
    new = change.new.splitlines()[change.new_start : change.new_end]
    was = textwrap.dedent("\n".join(old)).splitlines()
    if was and any(all(line in edit.text(key) for line in was) for key in OUR_TEXT):
        indent = len(old[0]) - len(was[0])
        for at, line in enumerate(text.splitlines()):
            shift = " " * (len(line) - len(line.lstrip()))
            rows = text.splitlines()
            if rows[at : at + len(was)] == [shift + row if row else row for row in was]:
                rows[at : at + len(was)] = [shift + row[indent:] for row in new]
                yield "\n".join(rows) + "\n"


def _parsed(texts: dict[str, str]) -> list[Patch]:
    faults: list[str] = []
    patches = [parse_patch(name, text, faults) for name, text in sorted(texts.items())]
    if faults:
        raise _refusal("the series", "; ".join(faults))
    return patches


def _render(patches: list[Patch], path: str, source: Source) -> str | None:
    """One file under the edits of it; None where they conflict."""
    here = [
        replace(patch, edits=tuple(edit for edit in patch.edits if edit.file == path))
        for patch in patches
    ]
    outcome = judge(here, source)
    if outcome.of(CONFLICT):
        return None
    return outcome.rendered().get(path, source.read(path))


def _new_patch(commit: Commit) -> str:
    why = textwrap.indent(commit.why, "  ")
    subject = yaml.safe_dump(commit.subject, width=1000, default_style='"').strip()
    return (
        "# SPDX-License-Identifier: Apache-2.0\n"
        f"subject: {subject}\nwhy: |\n{why}\nupstream: none yet\nedits:\n"
    )


def _yaml(fields: Fields) -> str:
    lines = []
    for key, value in fields.items():
        if key in ("append", "prepend", "first", "insert", "hunk") or "\n" in value:
            mark = "|2" if value[:1] in (" ", "\n") else "|"
            lines.append(f"{key}: {mark}\n" + textwrap.indent(value.rstrip("\n"), "  "))
        else:
            scalar = yaml.safe_dump(value, width=1000).removesuffix("\n...\n").strip()
            lines.append(f"{key}: {scalar}")
    return "  - " + textwrap.indent("\n".join(lines), "    ").lstrip() + "\n"


def _refusal(where: str, why: str) -> Problem:
    return Problem(f"cannot capture: {why}", where, "edit the file under patches/ by hand")

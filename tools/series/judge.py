# SPDX-License-Identifier: Apache-2.0
"""The verdict on every edit at one release, and the files that come out."""

import ast
import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from tools.series.edits import locate
from tools.series.names import undefined
from tools.series.patch import OUR_TEXT, Edit, Patch
from tools.series.scope import definitions
from tools.series.source import Source
from tools.series.splice import Miss, Splice, clash, spliced
from tools.series.syntax import parse

CLEAN, DRIFTED, CONFLICT, OBSOLETE = "clean", "drifted", "conflict", "obsolete"
Reviewed = dict[tuple[str, int], str]


@dataclass(frozen=True)
class Verdict:
    """`fingerprint` is the anchor's, "-" where the edit needs none, "" where it failed."""

    edit: Edit
    state: str
    reasons: tuple[str, ...] = ()
    fingerprint: str = ""


@dataclass
class Outcome:
    """What the series does at one release.

    `placed[path]` holds (edit, splice) pairs in the order in which they follow each other
    where they meet.
    """

    source: Source
    verdicts: list[Verdict] = field(default_factory=list)
    placed: dict[str, list[tuple[Edit, Splice]]] = field(default_factory=dict)

    def of(self, *states: str) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.state in states]

    def rendered(self, patches: Iterable[str] | None = None) -> dict[str, str]:
        """The changed files, with all patches or only the named ones."""
        chosen = None if patches is None else set(patches)
        files = {}
        for path, pairs in sorted(self.placed.items()):
            wanted = [splice for edit, splice in pairs if chosen is None or edit.patch in chosen]
            if wanted:
                files[path] = spliced(self.source.read(path), wanted)
        return files

    def condemn(self, edit: Edit, reason: str) -> None:
        for index, verdict in enumerate(self.verdicts):
            if verdict.edit is edit:
                known = verdict.reasons if verdict.state == CONFLICT else ()
                reasons = tuple(dict.fromkeys([*known, reason]))
                self.verdicts[index] = replace(verdict, state=CONFLICT, reasons=reasons)


def judge(patches: Iterable[Patch], source: Source, reviewed: Reviewed | None = None) -> Outcome:
    """Locate every edit on the pristine source.

    `reviewed` maps (patch, edit number) to the fingerprint that was reviewed for this
    release; without it nothing is `drifted`.
    """
    outcome = Outcome(source)
    for patch in patches:
        for edit in patch.edits:
            verdict, splices = _judge(edit, source, reviewed)
            outcome.verdicts.append(verdict)
            outcome.placed.setdefault(edit.file, []).extend((edit, part) for part in splices)
    outcome.placed = {path: pairs for path, pairs in outcome.placed.items() if pairs}
    for pairs in outcome.placed.values():
        # The name decides where two patches meet, so their order in a list cannot.
        pairs.sort(key=lambda pair: (pair[0].patch, pair[0].number))
        for one, other in _collisions(pairs):
            outcome.condemn(one, f"it changes the same text as {other.name}")
            outcome.condemn(other, f"it changes the same text as {one.name}")
    broken = {verdict.edit.file for verdict in outcome.of(CONFLICT)}
    for path, text in outcome.rendered().items():
        if path not in broken:
            _check_result(outcome, path, text)
    return outcome


def _judge(edit: Edit, source: Source, reviewed: Reviewed | None) -> tuple[Verdict, list[Splice]]:
    if edit.releases is not None and not edit.releases.contains(source.release, prereleases=True):
        return Verdict(edit, OBSOLETE, (f"it is for releases {edit.releases}",), OBSOLETE), []
    if edit.unless and _exists(edit.unless, source):
        return Verdict(edit, OBSOLETE, (f"upstream has {edit.unless}",), OBSOLETE), []
    text = source.read(edit.file)
    try:
        if text is None:
            raise Miss(f"{edit.file} does not exist", lost=edit.scope)
        found = locate(edit, text)
    except Miss as miss:
        return Verdict(edit, CONFLICT, (str(miss), *_hints(miss, source))), []
    words = "\0".join(found.anchor).encode()
    fingerprint = hashlib.sha256(words).hexdigest()[:12] if words else "-"
    verdict = Verdict(edit, CLEAN, (), fingerprint)
    if reviewed is not None:
        known = reviewed.get((edit.patch, edit.number))
        if known is None:
            verdict = replace(verdict, state=DRIFTED, reasons=("it is not in series.lock yet",))
        elif known != fingerprint:
            now = " ".join(found.anchor)
            now = now if len(now) <= 90 else f"{now[:87]}..."
            why = f"it applies, but what it hangs on was rewritten, now: {now}"
            verdict = replace(verdict, state=DRIFTED, reasons=(why,))
    return verdict, found.splices


def _exists(symbol: str, source: Source) -> bool:
    path, _, name = symbol.partition("::")
    text = source.read(path)
    root = parse(text) if text is not None else None
    return root is not None and bool(definitions(root, name))


def _hints(miss: Miss, source: Source) -> Iterator[str]:
    """Where a lost symbol is defined now."""
    if miss.lost:
        name = miss.lost.rpartition(".")[2]
        places = source.definitions_of(name)
        where = f"in {', '.join(places[:4])}" if places else "nowhere"
        yield f"{source.release} defines {name} {where}"


def _collisions(pairs: list[tuple[Edit, Splice]]) -> Iterator[tuple[Edit, Edit]]:
    ordered = sorted(pairs, key=lambda pair: (pair[1].start, pair[1].end))
    for index, (edit, splice) in enumerate(ordered):
        for other, later in ordered[index + 1 :]:
            if later.start > splice.end:
                break
            if clash(splice, later):
                yield edit, other


def _check_result(outcome: Outcome, path: str, text: str) -> None:
    """Every edit changes something; Python stays Python and uses no unknown name."""
    pristine, pairs = outcome.source.read(path), outcome.placed[path]
    edits = {id(edit): edit for edit, _ in pairs}.values()
    for edit in edits:
        if spliced(pristine, [splice for other, splice in pairs if other is edit]) == pristine:
            outcome.condemn(edit, "it changes nothing")
    if not path.endswith(".py"):
        return
    try:
        ast.parse(text)
        unknown = undefined(text) - undefined(pristine)
    except SyntaxError as error:
        for edit in edits:
            outcome.condemn(edit, f"the result is not Python: line {error.lineno}, {error.msg}")
        return
    for name in sorted(unknown):
        for edit in edits:
            ours = " ".join(edit.text(key) for key in (*OUR_TEXT, "hunk"))
            if re.search(rf"\b{name}\b", ours):
                outcome.condemn(edit, f"our lines use {name}, which nothing defines there")

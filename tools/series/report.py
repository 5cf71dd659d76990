# SPDX-License-Identifier: Apache-2.0
"""Verdicts and diffs, for people and for machines."""

import difflib
from typing import TextIO

from tools.series.judge import CONFLICT, DRIFTED, OBSOLETE, Outcome, Verdict
from tools.series.scope import definitions
from tools.series.syntax import parse

STATES = {0: "clean", 1: "conflict", 2: "drifted"}


def exit_code(outcome: Outcome) -> int:
    """0 clean, 1 conflict, 2 drifted."""
    return 1 if outcome.of(CONFLICT) else 2 if outcome.of(DRIFTED) else 0


def table(outcomes: list[Outcome]) -> str:
    """One row per edit, one column per release, as Markdown."""
    releases = [outcome.source.release for outcome in outcomes]
    lines = [f"| edit | {' | '.join(releases)} |", "|---" * (len(releases) + 1) + "|"]
    for row in zip(*(outcome.verdicts for outcome in outcomes), strict=True):
        edit = row[0].edit
        place = f"{edit.patch} {edit.number}: {edit.scope or edit.file}"
        lines.append(f"| {place} | {' | '.join(verdict.state for verdict in row)} |")
    return "\n".join(lines)


def blocks(outcome: Outcome, stream: TextIO) -> None:
    """Every conflict and drift with what is known about it."""
    for verdict in outcome.of(CONFLICT, DRIFTED):
        print(block(verdict, outcome.source.release), file=stream)


def needless(outcomes: list[Outcome]) -> str:
    """Why edits are obsolete, one line per edit and reason."""
    releases: dict[tuple[str, str], list[str]] = {}
    for outcome in outcomes:
        for verdict in outcome.of(OBSOLETE):
            key = (verdict.edit.name, "; ".join(verdict.reasons))
            releases.setdefault(key, []).append(outcome.source.release)
    return "".join(
        f"obsolete  {n}   vllm {' '.join(r)}: {why}\n" for (n, why), r in releases.items()
    )


def block(verdict: Verdict, release: str) -> str:
    edit = verdict.edit
    head = f"{verdict.state:9} {edit.name}   vllm {release}"
    return "\n  ".join([head, f"{edit.file}  {edit.scope}".rstrip(), *verdict.reasons])


def markdown(old: Outcome, new: Outcome) -> str:
    """The table, and for every edit that is not clean upstream's change of its symbol."""
    parts = [f"# The series at vLLM {new.source.release}", table([old, new])]
    for verdict in new.of(CONFLICT, DRIFTED):
        edit = verdict.edit
        before, after = (_symbol(side, edit.file, edit.scope) for side in (old, new))
        names = (f"{edit.file} {side.source.release}" for side in (old, new))
        change = _unified(before, after, *names)
        parts += [f"## {edit.name}", f"```\n{block(verdict, new.source.release)}\n```"]
        parts.append(f"```diff\n{change}```" if change else "Its symbol did not change.")
    return "\n\n".join(parts) + "\n"


def record(outcome: Outcome) -> dict[str, object]:
    """The same for a program."""
    edits = [
        {
            "patch": verdict.edit.patch,
            "edit": verdict.edit.number,
            "file": verdict.edit.file,
            "in": verdict.edit.scope,
            "state": verdict.state,
            "reasons": list(verdict.reasons),
        }
        for verdict in outcome.verdicts
    ]
    state = STATES[exit_code(outcome)]
    return {"release": outcome.source.release, "state": state, "edits": edits}


def diff(outcome: Outcome, patch: str) -> str:
    """What one patch alone does to upstream's files."""
    return "".join(
        _unified(outcome.source.read(path), text, f"a/{path}", f"b/{path}")
        for path, text in outcome.rendered([patch]).items()
    )


def _symbol(outcome: Outcome, path: str, symbol: str) -> str:
    """The text of a definition, or of the whole file; empty where there is none."""
    text = outcome.source.read(path) or ""
    if symbol:
        root = parse(text)
        found = definitions(root, symbol) if root else []
        return "\n".join(node.text() + "\n" for node in found)
    return text


def _unified(before: str, after: str, *names: str) -> str:
    rows = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), *names
    )
    marked = (
        row if row.endswith("\n") else f"{row}\n\\ No newline at end of file\n" for row in rows
    )
    return "".join(marked)

# SPDX-License-Identifier: Apache-2.0
"""The whole job, prompt and generation: Transformers, upstream's wheel, and ours with tdsf_k4v4.

Eight prompts of 1,024 tokens, each continued to 4,096, end of sequence ignored; same machine, same
weights, same token ids, each contestant with the settings that are fastest here. `--quick` goes to
1,280 tokens, three interleaved passes. Finished passes are kept: run it again after an interruption.
"""

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench import plot
from tools.bench.contestants import Bench, Contestant, describe, known
from tools.bench.progress import Progress
from tools.bench.state import State
from tools.cache import write_whole
from tools.errors import Problem

NAMES = ("transformers", "upstream", "ours")
START = 30.0  # seconds that a start takes, for the time left
CURVE = 32  # points of the curve of step times


@dataclass(frozen=True)
class Workload:
    """`count` prompts of `prompt` tokens, each continued to `total`, in so many passes."""

    count: int
    prompt: int
    total: int
    passes: int

    @property
    def new(self) -> int:
        return self.total - self.prompt


def figures(raw: dict[str, Any], work: Workload) -> dict[str, Any]:
    """What one pass says: rates in tokens/s, times in seconds, memory in bytes."""
    seconds, generated = raw["seconds"], work.count * work.new
    later = max(1, work.new - 1)
    tpot = [(last - first) / later for first, last in zip(raw["first"], raw["last"])]
    return {
        "seconds": seconds,
        "tokens_per_s": work.count * work.total / seconds,
        "generated_tokens_per_s": generated / seconds,
        "ttft_s": statistics.median(raw["first"]),
        "tpot_s": statistics.median(tpot),
        "peak_memory_bytes": raw["peak_memory_bytes"],
        "kv_bytes": raw["kv_bytes"],
        "curve": curve(raw["steps"], max(raw["first"]), work),
    }


def curve(steps: list, begin: float, work: Workload) -> list[tuple[int, float]]:
    """(context, seconds per step) where all sequences generate, in up to CURVE stretches."""
    steps = [(now, count) for now, count in steps if now >= begin]
    stride = max(1, len(steps) // CURVE)
    points = []
    for start in range(0, len(steps) - stride, stride):
        (then, before), (now, after) = steps[start], steps[start + stride]
        if after > before:
            context = work.prompt + (before + after) / (2 * work.count)
            points.append((round(context), (now - then) * work.count / (after - before)))
    return points


def measure(bench: Bench, work: Workload) -> dict[str, Any]:
    """The report: every pass of every contestant, passes interleaved."""
    contestants = known(*NAMES)
    settings = {one.name: bench.settings(one) for one in contestants}
    share = work.total / 4096  # trials predict a total of 4,096
    jobs = {}
    for one in contestants:
        chosen = settings[one.name]["chosen"]
        jobs[one.name] = bench.job(one, chosen, work.count, work.prompt, work.new)
    runs = [(one, number) for number in range(1, work.passes + 1) for one in contestants]
    open_runs = [
        (one.title, START + settings[one.name]["seconds"] * share)
        for one, number in runs
        if bench.state.get(bench.entry(one, jobs[one.name], number)) is None
    ]
    progress = Progress(open_runs)
    passes: dict[str, list] = {one.name: [] for one in contestants}
    details: dict[str, dict] = {}
    for one, number in runs:
        raw = _pass(bench, progress, one, jobs[one.name], number)
        passes[one.name].append(figures(raw, work))
        details[one.name] = {"version": raw["version"], "variant": raw["variant"]}
    progress.close()
    return report(bench, work, contestants, settings, passes, details)


def _pass(bench: Bench, progress: Progress, one: Contestant, job: dict, number: int) -> dict:
    if (kept := bench.state.get(bench.entry(one, job, number))) is not None:
        return kept
    progress.begin(f"{one.title}, pass {number}")
    found = bench.run(one, job, number, progress.update)
    progress.end()
    return found


def report(bench, work, contestants, settings, passes, details) -> dict[str, Any]:
    """What `--json` writes. Ratios are medians over passes of the end-to-end rates."""

    def ratio(other: str) -> float:
        pairs = zip(passes["ours"], passes[other])
        return statistics.median(a["tokens_per_s"] / b["tokens_per_s"] for a, b in pairs)

    rows = {}
    for one in contestants:
        found = passes[one.name]
        rows[one.name] = {
            "title": one.title,
            "settings": settings[one.name]["chosen"],
            "tried": settings[one.name]["tried"],
            **details[one.name],
            **{key: statistics.median(x[key] for x in found) for key in found[0] if key != "curve"},
            "passes": found,
        }
    return {
        "ratio_vs_transformers": ratio("transformers"),
        "ratio_vs_upstream": ratio("upstream"),
        "variant": details["ours"]["variant"],
        "workload": vars(work),
        **bench.state.key,
        "contestants": rows,
    }


def table(found: dict[str, Any]) -> str:
    """The report in Markdown."""
    work, machine = found["workload"], found["machine"]
    head = ["", "tokens/s", "generated/s", "TTFT s", "ms per step", "peak MB", "KV MB", "settings"]
    lines = [
        f"{work['count']} prompts of {work['prompt']:,} tokens to {work['total']:,}; "
        f"{work['passes']} pass{'es' * (work['passes'] > 1)}; {machine['processor']}, "
        f"{machine['cores']} cores, variant {found['variant']}.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
    ]
    for row in found["contestants"].values():
        cells = [
            row["title"],
            f"{row['tokens_per_s']:.1f}",
            f"{row['generated_tokens_per_s']:.1f}",
            f"{row['ttft_s']:.2f}",
            f"{row['tpot_s'] * 1e3:.1f}",
            f"{row['peak_memory_bytes'] / 1e6:,.0f}",
            f"{row['kv_bytes'] / 1e6:,.0f}",
            describe(row["settings"]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        f"End to end: **{found['ratio_vs_transformers']:.2f}×** Transformers, "
        f"**{found['ratio_vs_upstream']:.2f}×** upstream.",
    ]
    return "\n".join(lines) + "\n"


def options(parser: argparse.ArgumentParser) -> None:
    """What the benches of whole engines share."""
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--fresh", action="store_true", help="measure again what is kept")
    parser.add_argument(
        "--settings",
        type=parsed,
        metavar="JSON",
        help='no search: {"dtype": "float32", "eager": true} and the like; the rest by default',
    )


def parsed(text: str) -> dict[str, Any]:
    """`--settings`; argparse reports a ValueError."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(text)
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench headline", description=__doc__)
    options(parser)
    parser.add_argument("--quick", action="store_true", help="to 1,280 tokens, three passes")
    parser.add_argument("--plot", type=Path, help="draw the figures here (.svg, .png, .pdf)")
    parser.add_argument("--table", type=Path, help="write the table here")
    parser.add_argument("--count", type=int, default=8, help="prompts")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of each")
    parser.add_argument("--total", type=int, help="tokens of each in the end")
    parser.add_argument("--passes", type=int)
    given = parser.parse_args(arguments)
    work = Workload(
        given.count,
        given.prompt,
        given.total or (1280 if given.quick else 4096),
        given.passes or (3 if given.quick else 1),
    )
    if min(work.count, work.prompt, work.passes) < 1 or work.new < 2:
        raise Problem(
            f"nothing can be measured with {vars(work)}",
            "--count, --prompt and --passes are at least 1, --total is 2 more than --prompt",
            "correct them",
        )
    found = measure(Bench(State(given.fresh), given.settings), work)
    text = table(found)
    print(text, end="")
    if given.json:
        write_whole(given.json, json.dumps(found, indent=1) + "\n")
    if given.table:
        write_whole(given.table, text)
    if given.plot:
        plot.draw(found, given.plot)
    return 0

# SPDX-License-Identifier: Apache-2.0
"""Decode through the whole engine: upstream's wheel, our wheel uncompressed, ours with tdsf_k4v4.

Eight sequences around 4,096 tokens of context, each contestant with the settings that are fastest
here; medians of step times, two interleaved rounds. `--weights` instead measures what weights kept
as bf16 save: their resident memory, and the step at short context, in float32 on both sides.
Finished rounds are kept: run it again after an interruption.
"""

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import safetensors

from tools.bench import child, headline
from tools.bench.contestants import (
    Bench,
    Contestant,
    describe,
    environment,
    known,
    step_seconds,
)
from tools.bench.progress import Progress
from tools.bench.state import State, digest
from tools.cache import write_whole
from tools.errors import Problem

START = 60.0  # seconds of a start and the prompts, for the time left
NEW = 64  # tokens per sequence
SHORT = 64  # tokens of a prompt of --weights


def steps(
    bench: Bench,
    contestants: list[Contestant],
    settings: dict[str, dict],
    count: int,
    context: int,
    new: int,
    rounds: int,
) -> dict[str, dict[str, Any]]:
    """Per contestant: median seconds of a step of `count` sequences around `context` tokens."""
    jobs = {
        one.name: bench.job(one, settings[one.name], count, context - new // 2, new)
        for one in contestants
    }
    runs = [(one, number) for number in range(1, rounds + 1) for one in contestants]
    missing = [
        (one, number)
        for one, number in runs
        if bench.state.get(bench.entry(one, jobs[one.name], number)) is None
    ]
    progress = Progress([(one.title, START) for one, _ in missing])
    for one, number in missing:
        progress.begin(f"{one.title}, round {number}")
        bench.run(one, jobs[one.name], number, progress.update)
        progress.end()
    progress.close()
    found = {}
    for one in contestants:
        raw = [bench.run(one, jobs[one.name], number) for number in range(1, rounds + 1)]
        each = [statistics.median(step_seconds(x["steps"], count)) for x in raw]
        seconds = statistics.median(each)
        found[one.name] = {
            "title": one.title,
            "settings": settings[one.name],
            "step_ms": seconds * 1e3,
            "tokens_per_s": count / seconds,
            "rounds_ms": [x * 1e3 for x in each],
            "kv_bytes": raw[0]["kv_bytes"],
            "variant": raw[0]["variant"],
        }
    return found


def ratio(found: dict[str, dict], other: str) -> float:
    """How many times as fast ours is: the median over rounds."""
    pairs = zip(found[other]["rounds_ms"], found["ours"]["rounds_ms"])
    return statistics.median(theirs / ours for theirs, ours in pairs)


def deep(bench: Bench, count: int, context: int, new: int, rounds: int) -> dict[str, Any]:
    """The bench proper."""
    contestants = known("upstream", "uncompressed", "ours")
    settings = {one.name: bench.settings(one)["chosen"] for one in contestants}
    found = steps(bench, contestants, settings, count, context, new, rounds)
    return {
        "ratio_vs_upstream": ratio(found, "upstream"),
        "ratio_vs_uncompressed": ratio(found, "uncompressed"),
        "variant": found["ours"]["variant"],
        "workload": {"count": count, "context": context, "new": new, "rounds": rounds},
        **bench.state.key,
        "contestants": found,
    }


def weights(bench: Bench, count: int, new: int, rounds: int) -> dict[str, Any]:
    """`--weights`: bytes that loading leaves resident, and steps at short context, in float32."""
    contestants = known("upstream", "ours")
    settings = {one.name: bench.settings(one)["chosen"] | {"dtype": "float32"} for one in contestants}
    memory = {one.name: load(bench, one) for one in contestants}
    found = steps(bench, contestants, settings, count, SHORT + new // 2, new, rounds)
    ours, upstream = (memory[name]["resident_bytes"] for name in ("ours", "upstream"))
    for name, row in found.items():
        row |= memory[name]
    return {
        "weights_vs_float32": ours / (4 * parameters(bench.model)),
        "weights_vs_upstream": ours / upstream,
        "step_ratio_vs_upstream": ratio(found, "upstream"),
        "variant": found["ours"]["variant"],
        "workload": {"count": count, "prompt": SHORT, "new": new, "rounds": rounds},
        **bench.state.key,
        "contestants": found,
    }


def parameters(model: Path) -> int:
    """Numbers in a checkpoint; a head that shares the embedding's is not there twice."""
    with safetensors.safe_open(model / "model.safetensors", "pt") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())


def load(bench: Bench, one: Contestant) -> dict[str, int]:
    """Resident bytes of the weights; kept like a pass."""
    job = {**one.fixed, "model": str(bench.model), "dtype": "float32"}
    entry = f"{one.name} load {digest(job)}"
    if (found := bench.state.get(entry)) is None:
        found = child.run(one.name, one.python(), "load", job, environment({}))
        bench.state.put(entry, found)
    return found


def lines(found: dict[str, Any]) -> list[str]:
    """The report in words."""
    machine, work = found["machine"], found["workload"]
    told = ", ".join(f"{key} {value}" for key, value in work.items())
    text = [f"{machine['processor']}, {machine['cores']} cores, variant {found['variant']}; {told}"]
    for row in found["contestants"].values():
        line = f"{row['title']:24} {row['step_ms']:8.1f} ms per step {row['tokens_per_s']:8.1f} tokens/s"
        if "resident_bytes" in row:
            line += f"  weights {row['resident_bytes'] / 1e6:6.0f} MB"
        text.append(f"{line}  KV {row['kv_bytes'] / 1e6:5.0f} MB  {describe(row['settings'])}")
    for key in found:
        if "_vs_" in key:
            text.append(f"{key} {found[key]:.3f}")
    return text


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench decode", description=__doc__)
    headline.options(parser)
    parser.add_argument("--weights", action="store_true", help="memory of weights, short steps")
    parser.add_argument("--count", type=int, default=8, help="sequences")
    parser.add_argument("--context", type=int, default=4096, help="tokens, where not --weights")
    parser.add_argument("--new", type=int, default=NEW, help="tokens generated for each")
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args(arguments)
    if min(given.count, given.rounds) < 1 or given.new < 4 or given.context <= given.new // 2:
        raise Problem(
            "nothing can be measured like this",
            "--count and --rounds are at least 1, --new is 4 or more, --context more than half of it",
            "correct them",
        )
    bench = Bench(State(given.fresh), given.settings)
    if given.weights:
        found = weights(bench, given.count, given.new, given.rounds)
    else:
        found = deep(bench, given.count, given.context, given.new, given.rounds)
    print(*lines(found), sep="\n")
    if given.json:
        write_whole(given.json, json.dumps(found, indent=1) + "\n")
    return 0

# SPDX-License-Identifier: Apache-2.0
"""Who is compared, and with which settings each runs best on this machine.

Every contestant brings the settings that are worth trying here. A search changes one at a time and
keeps what is faster, by the time a trial predicts for eight prompts of 1,024 tokens that grow to
4,096. What it finds is kept with the finished passes.
"""

import os
import statistics
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.bench import child, prompts, pristine
from tools.bench.state import State, cpus, digest
from tools.models import catalog

BATCH, PROMPT, TOTAL = 8, 1024, 4096
TRIAL_PROMPT, TRIAL_NEW = 512, 24  # of an engine's trial
TRIAL_ROWS = 2  # prompts of the trial of `generate`, of BATCH
WARM_UP = 64
OPENMP = "libiomp5.so"


@dataclass(frozen=True)
class Contestant:
    """Something that generates.

    options: by setting, the values worth trying here; the first is the likely best.
    """

    name: str
    title: str
    module: str  # in tools/bench/subjects
    python: Callable[[], Path]
    options: dict[str, list[Any]]
    fixed: dict[str, Any] = field(default_factory=dict)


def dtypes() -> list[str]:
    """bf16 only where the processor multiplies it: elsewhere a prefill alone takes minutes."""
    from vllm.turboquant.cpu import has_fast_bf16

    return ["bfloat16", "float32"] if has_fast_bf16() else ["float32"]


def intel_openmp() -> Path | None:
    """The OpenMP library that upstream's manual recommends, where it is installed."""
    library = Path(sysconfig.get_path("data")) / "lib" / OPENMP
    return library if library.exists() else None


def known(*names: str) -> list[Contestant]:
    """Contestants by name: transformers, upstream, uncompressed, ours."""
    here = Path(sys.executable)
    engine = {
        "dtype": dtypes(),
        "eager": [False, True],
        "openmp": ["torch's"] + ["Intel's"] * bool(intel_openmp()),
    }
    batch = {"dtype": dtypes(), "cache": ["dynamic", "static"], "attention": ["sdpa", "eager"]}
    every = [
        Contestant("transformers", "Transformers `generate`", "generate", lambda: here, batch),
        Contestant(
            "upstream", "upstream's wheel", "engine", pristine.python, engine,
            {"kv_cache_dtype": "auto"},
        ),
        Contestant(
            "uncompressed", "our wheel, uncompressed", "engine", lambda: here, engine,
            {"kv_cache_dtype": "auto"},
        ),
        Contestant(
            "ours", "ours, tdsf_k4v4", "engine", lambda: here, engine,
            {"kv_cache_dtype": "tdsf_k4v4"},
        ),
    ]  # fmt: skip
    return [one for one in every if one.name in names]


def environment(settings: dict[str, Any]) -> dict[str, str]:
    """Of a measured process: every core computes, nothing is looked up elsewhere."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "LD_PRELOAD")}
    kept |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus())),
    }
    if settings.get("openmp") == "Intel's":
        kept["LD_PRELOAD"] = str(intel_openmp())
    return kept


class Bench:
    """Runs contestants on the default model; results come from the state where it has them."""

    def __init__(self, state: State, settings: dict[str, Any] | None = None) -> None:
        self.state = state
        self.given = settings
        self.model = catalog.make("smollm2")
        self.text = prompts.tokens(self.model)

    def job(self, one: Contestant, settings: dict, count: int, length: int, new: int) -> dict:
        """What the process is asked: `count` prompts of `length` tokens, `new` more for each."""
        return {
            **one.fixed,
            **settings,
            "model": str(self.model),
            "threads": len(cpus()),
            "prompts": prompts.cut(self.text, count, length),
            "warm_up": prompts.cut(self.text, count, min(length, WARM_UP), skip=7),
            "new": new,
        }

    def run(
        self,
        one: Contestant,
        job: dict,
        number: int,
        progress: Callable[[float], None] = lambda share: None,
    ) -> dict:
        """The figures of pass `number` of a job, measured now unless they are kept already."""
        entry = self.entry(one, job, number)
        if (found := self.state.get(entry)) is None:
            place = environment(job)
            found = child.run(one.name, one.python(), one.module, job, place, progress)
            self.state.put(entry, found)
        return found

    def entry(self, one: Contestant, job: dict, number: int) -> str:
        return f"{one.name} {digest(job)} pass {number}"

    def settings(self, one: Contestant) -> dict[str, Any]:
        """The best settings, and the seconds they predict; see above."""
        if self.given is not None:
            chosen = {key: self.given.get(key, values[0]) for key, values in one.options.items()}
            return {"chosen": chosen, "seconds": 0.0, "tried": []}
        entry = f"{one.name} settings {digest(one.options)}"
        if (found := self.state.get(entry)) is None:
            print(f"{one.title}: looking for the best settings", file=sys.stderr, flush=True)
            found = search(one.options, lambda settings: self._trial(one, settings))
            self.state.put(entry, found)
        return found

    def _trial(self, one: Contestant, settings: dict[str, Any]) -> float:
        """Seconds that the whole work would take, predicted from a small part of it."""
        new = TOTAL - PROMPT
        if one.module == "generate":
            job = self.job(one, settings, TRIAL_ROWS, PROMPT, new)
            job |= {"depth": (PROMPT + TOTAL) // 2, "batch": BATCH}
            found = self.run(one, job, 1)
            seconds = found["prefill_s"] + new * found["step_s"]
        else:
            job = self.job(one, settings, BATCH, TRIAL_PROMPT, TRIAL_NEW)
            found = self.run(one, job, 1)
            prefill = max(found["first"]) * PROMPT / TRIAL_PROMPT
            seconds = prefill + new * statistics.median(step_seconds(found["steps"], BATCH))
        print(f"  {describe(settings):40} {seconds:7.0f} s", file=sys.stderr, flush=True)
        return seconds


def search(options: dict[str, list], trial: Callable[[dict], float]) -> dict[str, Any]:
    """One setting after the other, the best value of each kept; what was tried, with its time."""
    best = {key: values[0] for key, values in options.items()}
    tried = [(best, trial(best))]
    for key, values in options.items():
        for value in values[1:]:
            settings = best | {key: value}
            tried.append((settings, trial(settings)))
        best = min(tried, key=lambda one: one[1])[0]
    return {"chosen": best, "seconds": min(seconds for _, seconds in tried), "tried": tried}


def describe(settings: dict[str, Any]) -> str:
    """Settings in words."""
    words = {"eager": {True: "eager", False: "compiled"}}
    suffix = {"cache": " cache", "attention": " attention", "openmp": " OpenMP"}
    return ", ".join(
        f"{words.get(key, {}).get(value, value)}{suffix.get(key, '')}"
        for key, value in settings.items()
    )


def step_seconds(steps: list[tuple[float, int]], batch: int) -> list[float]:
    """Of the steps in which every sequence of the batch got one token."""
    return [
        later - earlier
        for (earlier, before), (later, after) in zip(steps, steps[1:])
        if after - before == batch
    ]

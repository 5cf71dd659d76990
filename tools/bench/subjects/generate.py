# SPDX-License-Identifier: Apache-2.0
"""Transformers' `generate`, a static batch.

The job: model, dtype, attention, cache ("dynamic", "static"), threads, prompts (token ids, equally
long), new (tokens for each), warm_up. With `depth` it is a trial: the time of one step where
`depth` tokens are cached already, and of the prompts alone, nothing else.
"""

import statistics
import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.generation.streamers import BaseStreamer

from tools.bench.subjects.report import Report, peak_memory

WARM_UP_TOKENS = 4
TRIAL_STEPS = 8


class Clock(BaseStreamer):
    """Notes when each step's tokens come; the first call brings the prompts."""

    def __init__(self, report: Report | None, steps: int) -> None:
        self.start = time.perf_counter()
        self.times: list[float] = []
        self.report, self.expected, self.calls = report, steps, 0

    def put(self, value: torch.Tensor) -> None:
        self.calls += 1
        if self.calls > 1:
            self.times.append(time.perf_counter() - self.start)
            if self.report:
                self.report.share(len(self.times) / self.expected)

    def end(self) -> None:
        """Nothing is left to flush."""


def filled(cache, batch: int, depth: int, config, dtype: torch.dtype) -> None:
    """Give every layer of `cache` `depth` tokens of noise: a trial needs their number only."""
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        noise = torch.randn(batch, config.num_key_value_heads, depth, dim).to(dtype)
        cache.update(noise, noise.clone(), layer)


def run(report: Report) -> dict[str, Any]:
    job = report.job
    torch.set_num_threads(job["threads"])
    dtype = getattr(torch, job["dtype"])
    model = AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=dtype, attn_implementation=job["attention"]
    ).eval()

    def new_cache(longest: int):
        if job["cache"] == "static":
            return StaticCache(config=model.config, max_cache_len=longest)
        return DynamicCache(config=model.config)

    def generate(ids: torch.Tensor, tokens: int, cache, told: Report | None = None) -> Clock:
        clock = Clock(told, tokens)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=cache,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                eos_token_id=-1,  # never
                pad_token_id=0,
                streamer=clock,
            )
        if len(clock.times) != tokens or out.shape[1] != ids.shape[1] + tokens:
            raise RuntimeError(f"{len(clock.times)} tokens came, {tokens} were asked for")
        return clock

    prompts, new = torch.tensor(job["prompts"]), job["new"]
    warm_up = torch.tensor(job["warm_up"])
    generate(warm_up, WARM_UP_TOKENS, new_cache(warm_up.shape[1] + WARM_UP_TOKENS))
    longest = prompts.shape[1] + new
    if depth := job.get("depth"):
        prefill = generate(prompts, 1, new_cache(prompts.shape[1] + 1)).times[0]
        cache = new_cache(longest)
        batch = job["batch"]
        filled(cache, batch, depth, model.config, dtype)
        ids = prompts[:1].repeat(batch, -(-depth // prompts.shape[1]) + 1)[:, : depth + 1]
        times = generate(ids, TRIAL_STEPS, cache).times
        steps = [later - earlier for earlier, later in zip(times, times[1:])]
        return {"prefill_s": prefill * batch / len(prompts), "step_s": statistics.median(steps)}
    cache = new_cache(longest)
    clock = generate(prompts, new, cache, report)
    tensors = [x for layer in cache.layers for x in (layer.keys, layer.values)]
    return {
        "seconds": clock.times[-1],
        "steps": [(now, (i + 1) * len(prompts)) for i, now in enumerate(clock.times)],
        "first": [clock.times[0]] * len(prompts),
        "last": [clock.times[-1]] * len(prompts),
        "kv_bytes": sum(x.numel() * x.element_size() for x in tensors),
        "peak_memory_bytes": peak_memory(),
        "version": transformers.__version__,
        "variant": None,
    }


def main() -> None:
    report = Report()
    report.result(run(report))


if __name__ == "__main__":
    main()

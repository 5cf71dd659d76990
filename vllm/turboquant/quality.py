# SPDX-License-Identifier: Apache-2.0
"""What a KV cache costs on a text: it runs through the engine with uncompressed attention and again
with the cache, and the two next-token distributions are compared at every token.
"""

import contextlib
import functools
import math
from collections.abc import Collection
from dataclasses import dataclass

from vllm.turboquant import probe, worker
from vllm.turboquant.baselines import BASELINES
from vllm.turboquant.formats import FORMATS
from vllm.turboquant.requests import run, uncompressed
from vllm.turboquant.scales import Scales
from vllm.v1.engine.core import EngineCore

UNCOMPRESSED = "auto"


@dataclass(frozen=True)
class Measured:
    """One cache on one text."""

    format: str
    bits_per_element: float
    kl: float  # nats per token, to the uncompressed cache
    perplexity: float
    top1: float  # share of tokens whose most likely successor is the same
    layers: dict[str, float] | None = None  # KL of each layer's cache alone, where asked for
    scales: dict[str, Scales] | None = None  # of the first prompt, by layer, where asked for


def measure(
    core: EngineCore, name: str, prompts: list[list[int]], *, skipped: Collection[str] = ()
) -> Measured:
    """Measure the engine's own cache, or a baseline in its place, on prompts of token ids.

    skipped: layers that attend uncompressed keys and values, with the engine's own cache.
    """
    if name in FORMATS and skipped:
        cached = set(core.collective_rpc(worker.cached_layers)[0]) - set(skipped)
        attention = functools.partial(uncompressed, core, spared=cached)
    elif name in FORMATS:
        attention = contextlib.nullcontext
    else:
        attention = functools.partial(uncompressed, core, round_trip=BASELINES.get(name))
    totals = [x for prompt in prompts for x in against_uncompressed(core, prompt, [attention])]
    tokens = sum(x.tokens for x in totals)
    return Measured(
        format=name,
        bits_per_element=_bits(core, name, skipped),
        kl=sum(x.kl for x in totals) / tokens,
        perplexity=math.exp(sum(x.loss for x in totals) / sum(x.predicted for x in totals)),
        top1=sum(x.agreeing for x in totals) / tokens,
    )


def by_layer(core: EngineCore, prompt: list[int]) -> dict[str, float]:
    """KL in nats per token with the engine's cache in one layer and none elsewhere, by layer."""
    names = core.collective_rpc(worker.cached_layers)[0]
    alone = [functools.partial(uncompressed, core, spared=[name]) for name in names]
    totals = against_uncompressed(core, prompt, alone)
    return {name: sums.kl / sums.tokens for name, sums in zip(names, totals)}


def against_uncompressed(
    core: EngineCore, prompt: list[int], attentions: list
) -> list[probe.Sums]:
    """Uncompressed attention against what the request does inside each of `attentions`, which are
    called for the context to run it in."""
    core.collective_rpc(probe.watch)
    for attention in (functools.partial(uncompressed, core), *attentions):
        with attention():
            run(core, prompt)
    answers = core.collective_rpc(probe.compare, args=(prompt,))
    return next(answer for answer in answers if answer is not None)


def _bits(core: EngineCore, name: str, skipped: Collection[str]) -> float:
    model = core.vllm_config.model_config
    if name in BASELINES:
        return BASELINES[name].bits_per_element(model.get_head_size())
    plain = 8.0 * model.dtype.itemsize
    if name == UNCOMPRESSED:
        return plain
    layers = core.collective_rpc(probe.stored_bits)[0]
    bits = sum(n * plain if layer in skipped else b for layer, (b, n) in layers.items())
    return bits / sum(n for _, n in layers.values())

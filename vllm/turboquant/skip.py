# SPDX-License-Identifier: Apache-2.0
"""Which layers to leave uncompressed so that a cache loses no more than a target."""

from dataclasses import dataclass

from vllm.model_executor.models.utils import extract_layer_index
from vllm.turboquant.quality import measure
from vllm.v1.engine.core import EngineCore


@dataclass(frozen=True)
class Proposal:
    """Layers for upstream's --kv-cache-dtype-skip-layers, and what is left with them."""

    target: float  # nats per token
    layers: list[int]
    bits_per_element: float  # of all layers, the uncompressed ones counted as they are
    kl: float  # measured, nats per token


def propose(
    core: EngineCore, name: str, prompts: list[list[int]], layers: dict[str, float], target: float
) -> Proposal:
    """The layers that lose most, as many as the target takes; measured on `prompts`.

    layers: KL of each layer's cache alone, from `by_layer`. These add up nearly, which tells how
    many layers to leave out; what is then measured decides. target: positive.
    """
    worst = sorted(layers, key=lambda layer: layers[layer], reverse=True)
    count = 0
    while True:
        row = measure(core, name, prompts, skipped=worst[:count])
        if row.kl <= target or count == len(worst):
            chosen = sorted(map(extract_layer_index, worst[:count]))
            return Proposal(target, chosen, row.bits_per_element, row.kl)
        left = sum(layers[layer] for layer in worst[count:])
        goal = left * target / row.kl
        count += 1
        while count < len(worst) and sum(layers[layer] for layer in worst[count:]) > goal:
            count += 1

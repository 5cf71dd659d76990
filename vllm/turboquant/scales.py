# SPDX-License-Identifier: Apache-2.0
"""The scales that tokens got, beside those that the TDSF formula predicted for their positions."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from vllm.forward_context import get_forward_context
from vllm.turboquant.worker import layers_with_cache
from vllm.turboquant.tdsf import decode_scale, prior
from vllm.v1.engine.core import EngineCore


@dataclass(frozen=True)
class Scales:
    """One layer's, log2, [T] of the tokens at positions 1 ... T, mean over kv heads."""

    key: list[float]
    key_prior: list[float]
    value: list[float]
    value_prior: list[float]

    def explained(self) -> tuple[float, float]:
        """Which share of the variance over tokens the formula predicts, of keys and of values.

        Against the best constant: 0 is no better, 1 is every token's scale exactly.
        """
        return _explained(self.key, self.key_prior), _explained(self.value, self.value_prior)


def _explained(found: list[float], predicted: list[float]) -> float:
    x, p = torch.tensor(found), torch.tensor(predicted)
    return 1 - float((x - p).var(correction=0) / x.var(correction=0).clamp_min(1e-12))


class _Recording:
    """Stands in for a layer's `impl` and keeps the scale bytes that it writes."""

    def __init__(self, impl) -> None:
        self.impl = impl
        self.positions: list[torch.Tensor] = []
        self.codes: list[torch.Tensor] = []  # uint8 [2, T, H], of keys and of values

    def __getattr__(self, name: str):
        return getattr(self.impl, name)

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        """Store, then read the bytes back."""
        self.impl.do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        positions = get_forward_context().attn_metadata[layer.layer_name].positions
        tokens = kv_cache.shape[2]
        slots = slot_mapping[: len(positions)]
        block, offset = slots // tokens, slots % tokens
        at = self.impl.format.regions(key.shape[-1], tokens)
        regions = kv_cache.flatten(2)
        codes = [regions[block, :, start + offset] for start in (at.key_scales, at.value_scales)]
        self.positions.append(positions.clone())
        self.codes.append(torch.stack(codes))

    def scales(self) -> Scales:
        """All that was written since, tokens at position 0 left out."""
        positions, codes = torch.cat(self.positions), torch.cat(self.codes, 1)
        c = self.impl.constants
        lines = []
        for which in range(2):
            predicted = prior(c.tdsf[:, 3 * which : 3 * which + 3], positions)
            found = decode_scale(codes[which], predicted, float(c.scale_step[which]))
            lines += [x[positions > 0].log2().mean(-1).tolist() for x in (found, predicted)]
        return Scales(*lines)


def start(worker) -> None:
    """Record what every layer with a TDSF cache stores, until `stop`."""
    for _, layer in layers_with_cache(worker).values():
        layer.impl = _Recording(layer.impl)


def stop(worker) -> dict[str, Scales]:
    """Undo `start`; the scales by layer, of this rank's kv heads."""
    answer = {}
    for name, (_, layer) in layers_with_cache(worker).items():
        if layer.impl.positions:
            answer[name] = layer.impl.scales()
        layer.impl = layer.impl.impl
    return answer


@contextmanager
def recorded(core: EngineCore) -> Iterator[dict[str, Scales]]:
    """The scales of the requests run inside, by layer; filled at the end of the block."""
    found: dict[str, Scales] = {}
    core.collective_rpc(start)
    try:
        yield found
    finally:
        found |= core.collective_rpc(stop)[0]

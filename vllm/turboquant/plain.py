# SPDX-License-Identifier: Apache-2.0
"""Attention over uncompressed keys and values, in the place of a layer's cached attention.

Calibration and evaluation run one request at a time through the engine while every layer's `impl`
is one of these: nothing is stored in the cache, the sequence is kept here.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from vllm.turboquant.bias import Rope, waves, wave_table, worthwhile
from vllm.turboquant.fit import Moments
from vllm.turboquant.threads import on_one_thread

RoundTrip = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Keys and values [T, H, D] as another cache would give them back."""


class Gathered:
    """What a fit needs to know of one layer: moments, of keys without their bias.

    The keys that come first decide which part of the bias is worth taking out.
    """

    def __init__(self, moments: Moments, rope: Rope | None, key_bias: torch.Tensor | None) -> None:
        self.moments = moments
        self.rope = rope
        self.key_bias = key_bias  # [H, D], None: the layer has none
        self._waves = None
        self._chosen = rope is None or key_bias is None

    def add(self, query, key, value, positions) -> None:
        """Count a run of consecutive tokens of one sequence, see `Moments.add`."""
        positions = positions.cpu().long()
        key = key.detach().float().cpu()
        if not self._chosen:
            self.key_bias = worthwhile(self.rope, self.key_bias, key, positions)
            table = wave_table(self.rope, len(self.rope.cos_sin))
            self._waves = waves(self.rope, self.key_bias, table)
            self._chosen = True
        if self._waves is not None:
            key = key - self._waves.at(positions)
        self.moments.add(query, key, value, positions)


class PlainAttention:
    """Stands in for `impl` of one layer; whatever else is asked of it, `impl` answers."""

    def __init__(self, impl, gathered: Gathered | None = None, round_trip: RoundTrip | None = None):
        self.impl = impl
        self.gathered = gathered
        self.round_trip = round_trip
        self._keys = self._values = torch.empty(0)

    def __getattr__(self, name: str):
        return getattr(self.impl, name)

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        """Nothing is stored."""

    def forward(
        self,
        layer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of one request's rows, query [T, heads, head_dim], into output."""
        if attn_metadata is None:
            return output
        positions = attn_metadata.positions
        rows, start = len(positions), int(positions[0])
        if len(attn_metadata.seq_lens) != 1 or start not in (0, len(self._keys)):
            raise RuntimeError("Uncompressed attention runs whole requests, one at a time.")
        query, key, value = query[:rows], key[:rows], value[:rows]
        if self.gathered is not None:
            on_one_thread(self.gathered.add, query, key, value, positions)
        if start > 0:
            key, value = torch.cat([self._keys, key]), torch.cat([self._values, value])
        self._keys, self._values = key.clone(), value.clone()
        if self.round_trip is not None:
            key, value = self.round_trip(key, value)
        output[:rows] = attend(self.impl, query, key, value)
        return output


def attend(impl, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last rows of a sequence, in float32; [R, Hq, D].

    impl: gives scale, soft_cap (0: none), window_left (-1: none) and sinks, as `TdsfImpl` does.
    query: [R, Hq, D]; key, value: [T, H, D].
    """
    rows, heads, length = query.shape[0], query.shape[1], key.shape[0]
    distance = torch.arange(length - rows, length)[:, None] - torch.arange(length)
    seen = distance >= 0
    if impl.window_left >= 0:
        seen &= distance <= impl.window_left
    seen = seen.to(query.device)
    q = query.float().transpose(0, 1)
    group = heads // key.shape[1]
    k, v = (x.float().transpose(0, 1).repeat_interleave(group, 0) for x in (key, value))
    if impl.soft_cap or impl.sinks is not None:
        scores = q @ k.mT * impl.scale
        if impl.soft_cap:
            scores = impl.soft_cap * torch.tanh(scores / impl.soft_cap)
        scores = scores.masked_fill(~seen, -math.inf)
        if impl.sinks is not None:
            extra = impl.sinks.view(heads, 1, 1).expand(heads, rows, 1)
            scores = torch.cat([scores, extra], -1)
        mixed = scores.softmax(-1)[..., :length] @ v
    else:
        mixed = F.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=seen, scale=impl.scale
        )[0]
    return mixed.transpose(0, 1).to(query.dtype)

# SPDX-License-Identifier: Apache-2.0
"""The specification: encode, store, read and attend in plain torch, float64 where it matters.

Slow and obvious on purpose. Kernels are compared with this module and never with each other.
"""

import math
from dataclasses import dataclass

import torch

from vllm.turboquant import tdsf
from vllm.turboquant.codebook import unit_rms
from vllm.turboquant.constants import LEVEL_GROUP, LayerConstants
from vllm.turboquant.formats import Format
from vllm.turboquant.packing import pack_keys, pack_values, unpack_keys, unpack_values

FP16_MAX = 65504.0


@dataclass(frozen=True)
class Encoded:
    """T vectors of H heads as the cache keeps them."""

    codes: torch.Tensor  # uint8 [T, H, D]
    scales: torch.Tensor  # uint8 [T, H]
    exact: torch.Tensor  # fp16 [T, H, D], what the slot of a first token holds


def _levels(table: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """float64 [H, D, L]: the levels each coordinate may take."""
    if bits == 8:
        return torch.arange(-128, 128, dtype=torch.float64).expand(table.shape[0], dim, -1)
    return table.double().repeat_interleave(LEVEL_GROUP, dim=1)


def _nearest(x: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """int64 codes [T, H, D] of the levels nearest to x; a tie takes the upper level."""
    bounds = (levels[..., 1:] + levels[..., :-1]) / 2
    codes = torch.searchsorted(
        bounds.contiguous(), x.permute(1, 2, 0).contiguous(), right=True
    ).permute(2, 0, 1)
    return codes


def _take(levels: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """float64 [T, H, D]: the levels that codes [T, H, D] name."""
    return torch.gather(levels, 2, codes.permute(1, 2, 0).long()).permute(2, 0, 1)


def _ratio(numerator: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    return torch.where(denominator > 0, numerator / denominator.clamp_min(1e-300), 0.0)


CANDIDATES = (-0.25, 0.0, 0.25, 0.5)
"""Octaves from the scale of a Gaussian vector that are tried; the least error wins."""


def _round_in_turn(y, levels, feedback):
    """Codes of y [T, H, D], each coordinate compensating the errors of those before it.

    Returns int64 codes [T, H, D] and the squared error that is left, in the metric, [T, H].
    """
    y, codes = y.clone(), torch.empty(y.shape, dtype=torch.int64)
    left = torch.zeros(y.shape[:2], dtype=torch.float64)
    for d in range(y.shape[-1]):
        codes[..., d] = _nearest(y[..., d : d + 1], levels[:, d : d + 1])[..., 0]
        error = y[..., d] - _take(levels[:, d : d + 1], codes[..., d : d + 1])[..., 0]
        left += feedback[:, d, d] * error * error
        y[..., d + 1 :] -= error[..., None] * feedback[:, d, d + 1 :]
    return codes, left


def _encode(z, bits, table, metric, feedback, numbers, step, positions) -> Encoded:
    """Encode transformed vectors z, float64 [T, H, D]; the recipe of docs/format.md."""
    z = torch.where(torch.isfinite(z), z, 0.0)
    predicted = tdsf.prior(numbers, positions)
    levels = _levels(table, bits, z.shape[-1])
    if bits == 8:
        code = tdsf.scale_code(z.abs().amax(-1) / 127, predicted, step, up=True)
        scale = tdsf.decode_scale(code, predicted, step)
        codes = torch.round(z / scale[..., None]).clamp(-127, 127).long() + 128
    else:
        guess = z.square().mean(-1).sqrt() / unit_rms(bits)
        least = torch.full(guess.shape, math.inf, dtype=torch.float64)
        chosen, codes = torch.ones_like(guess), torch.zeros(z.shape, dtype=torch.int64)
        for octaves in CANDIDATES if step else (0.0,):
            code = tdsf.scale_code(guess * 2.0**octaves, predicted, step)
            scale = tdsf.decode_scale(code, predicted, step)
            tried, left = _round_in_turn(z / scale[..., None], levels, feedback.double())
            better = left * scale**2 < least
            least = torch.where(better, left * scale**2, least)
            chosen = torch.where(better, scale, chosen)
            codes = torch.where(better[..., None], tried, codes)
        # The scale that leaves the vector's product with itself, in the metric, unbiased.
        weighed = torch.einsum("hij,thj->thi", metric.double(), z)
        scale = _ratio((weighed * z).sum(-1), (weighed * _take(levels, codes)).sum(-1))
        sane = (scale > chosen / 2) & (scale < chosen * 2)
        code = tdsf.scale_code(torch.where(sane, scale, chosen), predicted, step)
    exact = z.clamp(-FP16_MAX, FP16_MAX).to(torch.float16)
    return Encoded(codes.to(torch.uint8), code, exact)


def encode_keys(fmt: Format, c: LayerConstants, key, positions) -> Encoded:
    """Keys [T, H, D] (any float dtype, after RoPE) at sequence positions [T]."""
    key = key.double() - c.key_center.double()
    if c.waves is not None:
        key = key - c.waves.at(positions)
    z = torch.einsum("hij,thj->thi", c.key_in.double(), key)
    fixed = (c.key_levels, c.key_metric, c.key_feedback, c.tdsf[:, :3], float(c.scale_step[0]))
    return _encode(z, fmt.key_bits, *fixed, positions)


def encode_values(fmt: Format, c: LayerConstants, value, positions) -> Encoded:
    """Values [T, H, D] at sequence positions [T]."""
    z = torch.einsum("hij,thj->thi", c.value_in.double(), value.double())
    fixed = (
        *(c.value_levels, c.value_metric, c.value_feedback),
        *(c.tdsf[:, 3:], float(c.scale_step[1])),
    )
    return _encode(z, fmt.value_bits, *fixed, positions)


def store(fmt, c, key, value, cache, slot_mapping, positions) -> None:
    """Write keys and values [T, H, D] into cache, uint8 [B, H, N, C], in place.

    slot_mapping: int64 [T], block * N + offset; negative: the token is not stored.
    positions: int64 [T], in the sequence.
    """
    _, heads, tokens, _ = cache.shape
    dim = key.shape[-1]
    at = fmt.regions(dim, tokens)
    keys, values = encode_keys(fmt, c, key, positions), encode_values(fmt, c, value, positions)
    for i, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        block, offset = divmod(slot, tokens)
        for h in range(heads):
            region = cache[block, h].view(-1)
            for part, bits, start, end, scales, pack, unpack in (
                (keys, fmt.key_bits, at.keys, at.values, at.key_scales, pack_keys, unpack_keys),
                (
                    *(values, fmt.value_bits, at.values, at.key_scales, at.value_scales),
                    *(pack_values, unpack_values),
                ),
            ):
                codes = unpack(region[start:end], tokens, dim, bits)
                codes[offset] = part.codes[i, h]
                region[start:end] = pack(codes, bits)
                region[scales + offset] = part.scales[i, h]
            if positions[i] == 0:
                exact = torch.cat([keys.exact[i, h], values.exact[i, h]])
                region[: 4 * dim] = exact.view(torch.uint8)


def read(fmt, c, cache, blocks, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The cached sequence in transformed coordinates: z of keys and of values.

    blocks: the sequence's block ids, in order. Returns two float64 [length, H, D].
    """
    _, heads, tokens, _ = cache.shape
    dim = c.key_center.shape[1]
    at = fmt.regions(dim, tokens)
    parts: list[list[torch.Tensor]] = [[], []]
    for index, block in enumerate(list(blocks)[: -(-length // tokens)]):
        positions = torch.arange(index * tokens, (index + 1) * tokens)
        for which, (bits, start, end, scales, unpack, table) in enumerate(
            (
                (fmt.key_bits, at.keys, at.values, at.key_scales, unpack_keys, c.key_levels),
                (
                    *(fmt.value_bits, at.values, at.key_scales, at.value_scales),
                    *(unpack_values, c.value_levels),
                ),
            )
        ):
            regions = [cache[block, h].view(-1) for h in range(heads)]
            codes = torch.stack([unpack(r[start:end], tokens, dim, bits) for r in regions], 1)
            codes_scale = torch.stack([r[scales : scales + tokens] for r in regions], 1)
            numbers = c.tdsf[:, 3 * which : 3 * which + 3]
            scale = tdsf.decode_scale(
                codes_scale, tdsf.prior(numbers, positions), float(c.scale_step[which])
            )
            z = _take(_levels(table, bits, dim), codes) * scale[..., None]
            if index == 0:
                slot = torch.stack([r[: 4 * dim].view(torch.float16) for r in regions])
                z[0] = slot[:, which * dim : (which + 1) * dim].double()
            parts[which].append(z)
    return torch.cat(parts[0])[:length], torch.cat(parts[1])[:length]


def attend(
    fmt,
    c,
    query,
    cache,
    block_table,
    query_start_loc,
    seq_lens,
    *,
    scale: float,
    softcap: float = 0.0,
    window_left: int = -1,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Exact attention of query [T, Hq, D] over the dequantised cache; float64 [T, Hq, D].

    block_table: int [R, M]; query_start_loc: int [R + 1]; seq_lens: int [R], the tokens cached
    for each request once this step's are stored. The last query row of a request sits at position
    seq_len - 1. window_left: how many earlier tokens a row may see, -1 for all. softcap: scores
    become softcap * tanh(score / softcap), 0 for none. sinks: one logit per query head that joins
    the softmax's denominator.
    """
    heads, dim = c.key_center.shape
    group = query.shape[1] // heads
    out = torch.zeros(query.shape, dtype=torch.float64)
    for r, length in enumerate(seq_lens.tolist()):
        first, last = int(query_start_loc[r]), int(query_start_loc[r + 1])
        if first == last:
            continue
        keys, values = read(fmt, c, cache, block_table[r].tolist(), length)
        rows = last - first
        q = query[first:last].double().view(rows, heads, group, dim)
        turned = torch.einsum("hij,rhgj->rhgi", c.query_in.double(), q)
        scores = torch.einsum("rhgi,thi->rhgt", turned, keys)
        scores += torch.einsum("rhgi,hi->rhg", q, c.key_center.double())[..., None]
        if c.waves is not None:
            scores += torch.einsum("rhgi,thi->rhgt", q, c.waves.at(torch.arange(length)))
        scores *= scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        row = torch.arange(length - rows, length)[:, None]
        token = torch.arange(length)[None, :]
        hidden = token > row
        if window_left >= 0:
            hidden |= token < row - window_left
        scores.masked_fill_(hidden[:, None, None, :], -math.inf)
        if sinks is not None:
            extra = sinks.double().view(1, heads, group, 1).expand(rows, -1, -1, -1)
            weights = torch.cat([scores, extra], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        mixed = torch.einsum("rhgt,thi->rhgi", weights, values)
        result = torch.einsum("hij,rhgj->rhgi", c.value_out.double(), mixed)
        out[first:last] = result.reshape(rows, -1, dim)
    return out

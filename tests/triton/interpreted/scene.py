# SPDX-License-Identifier: Apache-2.0
"""Small reproducible situations for the Triton kernels, on CPU tensors."""

from dataclasses import replace

import torch

from vllm.turboquant import reference
from vllm.turboquant.constants import LayerConstants, uncalibrated
from vllm.turboquant.fit import error_metric, feedback
from vllm.turboquant.formats import FORMATS, Format
from vllm.turboquant.packing import pack_keys, pack_values
from vllm.v1.attention.ops.triton_tdsf_attend import attend
from vllm.v1.attention.ops.triton_tdsf_constants import DeviceConstants

CPU = torch.device("cpu")


def calibrated(fmt: Format, heads: int, dim: int, g: torch.Generator) -> LayerConstants:
    """Constants as a profile may bring them: nothing an identity, no table shared."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    base = uncalibrated(fmt, heads, dim)
    stretch = [(0.3 * normal(heads, 1, dim)).exp() for _ in range(2)]
    mixed = torch.eye(dim) + 0.3 * dim**-0.5 * normal(heads, dim, dim)
    metric = error_metric(torch.eye(dim).double(), (mixed @ mixed.mT).double())

    def tables(levels: torch.Tensor) -> torch.Tensor:
        shift = torch.randint(-6, 7, levels.shape, generator=g)
        return (levels.int() + shift).clamp(-127, 127).sort(-1).values.to(torch.int8)

    numbers = torch.tensor([0.02, 0.05, 0.03, 0.01, 0.2, 0.02]).expand(heads, 6)
    return replace(
        base,
        key_center=normal(heads, dim),
        key_in=base.key_in * stretch[0],
        query_in=base.key_in / stretch[0],
        value_in=base.value_in * stretch[1],
        value_out=(base.value_in / stretch[1]).mT,
        key_metric=metric.float(),
        key_feedback=feedback(metric).float(),
        value_metric=metric.float(),
        value_feedback=feedback(metric).float(),
        tdsf=(numbers * (0.2 * normal(heads, 6)).exp()).contiguous(),
        key_levels=tables(base.key_levels),
        value_levels=tables(base.value_levels),
        scale_step=torch.tensor([1 / 32, 1 / 16]),
    )


def empty_cache(fmt: Format, heads: int, dim: int, block: int, blocks: int, g) -> torch.Tensor:
    """A cache full of random bytes."""
    shape = (blocks, heads, block, fmt.content_bytes(dim, block))
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=g)


def fill(fmt: Format, cache: torch.Tensor, dim: int, g: torch.Generator) -> None:
    """Valid random codes, moderate scales and finite exact slots, without encoding anything."""
    blocks, heads, block, _ = cache.shape
    at = fmt.regions(dim, block)
    for region in cache.view(blocks * heads, -1):
        for bits, start, end, pack in (
            (fmt.key_bits, at.keys, at.values, pack_keys),
            (fmt.value_bits, at.values, at.key_scales, pack_values),
        ):
            codes = torch.randint(0, 2**bits, (block, dim), generator=g).to(torch.uint8)
            region[start:end] = pack(codes, bits)
        region[at.key_scales : at.end] = torch.randint(108, 149, (2 * block,), generator=g).byte()
        slot = torch.randn(2 * dim, generator=g).half()
        region[: 4 * dim] = slot.view(torch.uint8)


def attention_error(
    name: str,
    *,
    dim: int,
    group: int,
    rows: tuple[int, ...],
    lengths: tuple[int, ...],
    heads: int = 1,
    block: int = 32,
    splits: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    sinks: bool = False,
    seed: int = 0,
    **options,
) -> float:
    """Relative error of the kernels against exact attention over the same cache."""
    g = torch.Generator().manual_seed(seed)
    fmt = FORMATS[name]
    constants = calibrated(fmt, heads, dim, g)
    needed = [-(-length // block) for length in lengths]
    cache = empty_cache(fmt, heads, dim, block, sum(needed) + 1, g)
    fill(fmt, cache, dim, g)
    order = torch.randperm(len(cache), generator=g).int()
    table = torch.full((len(lengths), max(needed)), -1, dtype=torch.int32)
    for r, count in enumerate(needed):
        table[r, :count] = order[sum(needed[:r]) :][:count]
    query = torch.randn(sum(rows), heads * group, dim, generator=g).to(dtype)
    starts = torch.tensor([0, *rows]).cumsum(0).int()
    sizes = torch.tensor(lengths, dtype=torch.int32)
    if sinks:
        options["sinks"] = torch.randn(heads * group, generator=g)
    batch = (query, cache, table, starts, sizes)
    want = reference.attend(fmt, constants, *batch, scale=dim**-0.5, **options)
    out = torch.full_like(query, 7.0, dtype=torch.float32)
    attend(
        DeviceConstants(fmt, constants, CPU),
        *(*batch, out),
        longest_query=max(rows),
        scale=dim**-0.5,
        splits=splits,
        **options,
    )
    return float((out - want).norm() / want.norm())

# SPDX-License-Identifier: Apache-2.0
"""The Triton store kernel against the reference, byte by byte."""

import math

import pytest
import torch

from tests.triton.interpreted.scene import CPU, calibrated, empty_cache
from vllm.turboquant import reference
from vllm.turboquant.constants import uncalibrated
from vllm.turboquant.formats import FORMATS
from vllm.turboquant.packing import unpack_keys, unpack_values
from vllm.v1.attention.ops.triton_tdsf_constants import DeviceConstants
from vllm.v1.attention.ops.triton_tdsf_store import store

BLOCK = 32
TOKENS = 11
START = 27  # across a block's border, and across bytes that tokens share
ORDER = [2, 0]


def stored(name, dim, profile, heads=1, dtype=torch.float32, spoil=None):
    """Caches of the reference and of the kernel, both over the same random bytes."""
    g = torch.Generator().manual_seed(dim)
    fmt = FORMATS[name]
    c = calibrated(fmt, heads, dim, g) if profile else uncalibrated(fmt, heads, dim)
    key, value = torch.randn(2, TOKENS, heads, dim, generator=g).to(dtype)
    if spoil is not None:
        key[4, 0, 3] = value[4, 0, 3] = spoil
    before = empty_cache(fmt, heads, dim, BLOCK, 3, g)
    positions = torch.arange(START, START + TOKENS)
    positions[0] = 0  # one sequence's first token among others
    slots = torch.arange(START, START + TOKENS)
    slots = torch.tensor(ORDER)[slots // BLOCK] * BLOCK + slots % BLOCK
    slots[7] = -1  # padding
    want, got = before.clone(), before.clone()
    reference.store(fmt, c, key, value, want, slots, positions)
    store(DeviceConstants(fmt, c, CPU), key, value, got, slots, positions)
    return fmt, before, want, got, slots


def sections(fmt, cache, dim):
    """Codes [B, H, N, D] of keys and values, scales [B, H, 2 N], the slot, and the rest."""
    blocks, heads = cache.shape[:2]
    at = fmt.regions(dim, BLOCK)
    regions = cache.view(blocks * heads, -1)

    def codes(unpack, start, end, bits):
        parts = [unpack(r[start:end], BLOCK, dim, bits) for r in regions]
        return torch.stack(parts).view(blocks, heads, BLOCK, dim)

    keys = codes(unpack_keys, at.keys, at.values, fmt.key_bits)
    values = codes(unpack_values, at.values, at.key_scales, fmt.value_bits)
    return keys, values, regions[:, at.key_scales : at.end], regions[:, : at.keys], regions[:, at.end :]


@pytest.mark.parametrize(
    "name,dim,profile",
    [
        ("tdsf_k8v8", 64, True),
        ("tdsf_k8v8", 112, False),
        ("tdsf_k4v4", 64, True),
        ("tdsf_k4v4", 80, False),
        ("tdsf_k3v3", 64, False),
        ("tdsf_k3v3", 80, True),
        ("tdsf_k4v4", 128, True),
        ("tdsf_k4v3", 192, False),
        ("tdsf_k3v3", 256, True),
    ],
)
def test_bytes_are_those_of_the_reference(name, dim, profile):
    """Codes may differ at decision boundaries alone: in no more than one vector."""
    fmt, before, want, got, slots = stored(name, dim, profile)
    kept, wanted, found = (sections(fmt, x, dim) for x in (before, want, got))
    written = torch.zeros(3 * BLOCK, dtype=torch.bool)
    written[slots[slots >= 0]] = True
    written = written.view(3, 1, BLOCK)
    for was, should, now in zip(kept[:2], wanted[:2], found[:2]):
        assert torch.equal(was[~written], now[~written])
        assert (should != now).any(-1).sum() <= 1
        assert (should != was).any(-1).sum() >= TOKENS - 2  # the test could fail
    assert (wanted[2].int() - found[2].int()).abs().max() <= 1
    assert (wanted[2] != found[2]).sum() <= 1
    exact_want, exact_got = (x[3].contiguous().view(torch.float16) for x in (wanted, found))
    block = ORDER[0]
    assert torch.allclose(exact_want[block].float(), exact_got[block].float(), rtol=2e-3, atol=1e-5)
    others = [b for b in range(3) if b != block]
    assert torch.equal(kept[3][others], found[3][others])
    assert torch.equal(kept[4], found[4])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_activation_dtypes_and_heads(dtype):
    fmt, _, want, got, _ = stored("tdsf_k8v8", 64, True, heads=2, dtype=dtype)
    for should, now in zip(sections(fmt, want, 64)[:2], sections(fmt, got, 64)[:2]):
        assert (should != now).any(-1).sum() <= 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_vector_stays_alone(bad):
    fmt, _, want, got, _ = stored("tdsf_k4v4", 64, False, spoil=bad)
    for should, now in zip(sections(fmt, want, 64)[:3], sections(fmt, got, 64)[:3]):
        assert (should != now).sum() <= 1

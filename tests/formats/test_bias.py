# SPDX-License-Identifier: Apache-2.0
"""The key bias: taken out exactly, for every kind of rotation, and only where it is worth it."""

from dataclasses import replace

import pytest
import torch

from tests.formats.test_reference import plain_attention
from vllm.turboquant import kernels, reference
from vllm.turboquant.bias import Rope, wave_table, waves, worthwhile
from vllm.turboquant.constants import uncalibrated
from vllm.turboquant.formats import FORMATS

HEADS, DIM, TOKENS = 2, 64, 100


def rope(rotary=DIM, neox=True, stretch=1.0, dtype=torch.float32) -> Rope:
    """Angles of the usual form; `stretch` scales cos and sin, as YaRN's attention factor does."""
    angle = torch.arange(128)[:, None] / 1e4 ** (torch.arange(0, rotary, 2) / rotary)
    return Rope((stretch * torch.cat([angle.cos(), angle.sin()], -1)).to(dtype), neox)


def turned(r: Rope, x: torch.Tensor) -> torch.Tensor:
    """x [T, H, D] turned by its row's position, as complex numbers."""
    rotary = r.cos_sin.shape[1]
    cos, sin = r.cos_sin[: len(x)].double().chunk(2, -1)
    head, rest = x[..., :rotary].double(), x[..., rotary:].double()
    if r.neox:
        pairs = torch.complex(*head.chunk(2, -1))
    else:
        pairs = torch.complex(head[..., 0::2], head[..., 1::2])
    pairs = pairs * torch.complex(cos, sin)[:, None]
    if r.neox:
        head = torch.cat([pairs.real, pairs.imag], -1)
    else:
        head = torch.stack([pairs.real, pairs.imag], -1).flatten(-2)
    return torch.cat([head, rest], -1)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


ROPES = {
    "plain": rope(),
    "interleaved": rope(neox=False),
    "partial": rope(rotary=32),
    "scaled, in bfloat16": rope(stretch=1.2, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("kind", ROPES)
def test_waves_are_the_turned_bias(kind):
    r, bias = ROPES[kind], normal(HEADS, DIM)
    rotary = r.cos_sin.shape[1]
    bias[:, rotary:] = 0
    bias[:, r.pairs()[:, 3]] = 0  # a pair that no head holds takes no wave
    found = waves(r, bias, wave_table(r, TOKENS))
    assert len(found.rows) == rotary - 2
    want = turned(r, bias.expand(TOKENS, -1, -1))
    assert torch.allclose(found.at(torch.arange(TOKENS)), want, atol=1e-5)
    one = found.heads(1, 1).at(torch.arange(TOKENS))
    assert torch.allclose(one, want[:, 1:], atol=1e-5)


def test_no_bias_takes_no_waves():
    assert waves(rope(), torch.zeros(HEADS, DIM), wave_table(rope(), TOKENS)) is None


def test_only_what_outweighs_the_rest_is_taken_out():
    r, bias = rope(), 0.1 * normal(HEADS, DIM)
    x, y = r.pairs()
    large = [2, 9, 31]
    bias[:, x[large]] = 20.0
    key = turned(r, normal(TOKENS, HEADS, DIM, seed=1) + bias).float()
    kept = worthwhile(r, bias, key, torch.arange(TOKENS))
    want = torch.zeros_like(bias)
    for part in (x[large], y[large]):
        want[:, part] = bias[:, part]
    assert torch.equal(kept, want)
    # A norm between bias and rotation, or positions of another kind: nothing fits, nothing goes.
    key = torch.nn.functional.normalize(key, dim=-1)
    assert not worthwhile(r, bias, key, torch.arange(TOKENS)).any()


@pytest.mark.parametrize("name", ["tdsf_k8v8", "tdsf_k4v4", "tdsf_k3v3"])
@pytest.mark.parametrize("options", [{}, {"softcap": 8.0}, {"window_left": 20}], ids=str)
def test_a_huge_bias_costs_nothing(name, options):
    """Attention with it is as near to exact attention as without it, kernel and reference."""
    fmt, r = FORMATS[name], rope()
    bias = 60 * normal(HEADS, DIM, seed=4)
    plain = uncalibrated(fmt, HEADS, DIM)
    biased = replace(plain, key_bias=bias, waves=waves(r, bias, wave_table(r, 128)))
    query, key, value = (normal(TOKENS, n, DIM, seed=i) for i, n in enumerate((4, HEADS, HEADS)))
    query = query / 30  # scores of the bias stay within what a softmax tells apart
    errors = []
    for c in (plain, biased):
        k = key if c is plain else (key + turned(r, bias.expand(TOKENS, -1, -1))).float()
        cache = torch.zeros(4, HEADS, 32, fmt.content_bytes(DIM, 32), dtype=torch.uint8)
        at = torch.arange(TOKENS)
        kernels.store(fmt, c, k, value, cache, at, at)
        want = plain_attention(query, k, value, DIM**-0.5, **options)
        table, starts = torch.arange(4, dtype=torch.int32)[None], torch.tensor([0, TOKENS]).int()
        batch = (fmt, c, query, cache, table, starts, torch.tensor([TOKENS]).int())
        out = torch.empty_like(query)
        kernels.attend(*batch, out, scale=DIM**-0.5, **options)
        exact = reference.attend(*batch, scale=DIM**-0.5, **options)
        assert (out - exact).norm() < 0.04 * exact.norm()
        errors.append(float((exact - want).norm() / want.norm()))
    assert errors[1] < 1.5 * errors[0] + 1e-4


def test_a_position_beyond_the_table_is_refused():
    fmt, r = FORMATS["tdsf_k4v4"], rope()
    bias = torch.ones(HEADS, DIM)
    c = replace(uncalibrated(fmt, HEADS, DIM), key_bias=bias)
    c = replace(c, waves=waves(r, bias, wave_table(r, 32)))
    cache = torch.zeros(2, HEADS, 32, fmt.content_bytes(DIM, 32), dtype=torch.uint8)
    key = normal(1, HEADS, DIM)
    with pytest.raises(Exception, match="position 32 of token 0; the key bias is known for 32"):
        kernels.store(fmt, c, key, key, cache, torch.tensor([5]), torch.tensor([32]))
    assert not cache.any()
    query, out = normal(1, 4, DIM), torch.empty(1, 4, DIM)
    table, starts = torch.tensor([[0, 1]]).int(), torch.tensor([0, 1]).int()
    with pytest.raises(Exception, match="33 tokens, the key bias is known for 32"):
        kernels.attend(fmt, c, query, cache, table, starts, torch.tensor([33]).int(), out, scale=1.0)

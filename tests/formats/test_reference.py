# SPDX-License-Identifier: Apache-2.0
"""The torch reference against plain attention: the specification is itself held to something."""

import math
from dataclasses import replace

import pytest
import torch

from vllm.turboquant import reference
from vllm.turboquant.constants import uncalibrated
from vllm.turboquant.formats import FORMATS

# Relative error of Gaussian vectors: Lloyd-Max at 4 and 3 bits, absmax at 8.
ERROR = {8: 0.01, 4: 0.11, 3: 0.20}


def plain_attention(q, k, v, scale, softcap=0.0, window_left=-1, sinks=None):
    """float64 attention of the last rows of one sequence; q [R, Hq, D], k and v [T, H, D]."""
    rows, length, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("rhd,thd->hrt", q.double(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(length - rows, length)[:, None] - torch.arange(length)[None, :]
    hidden = distance < 0
    if window_left >= 0:
        hidden |= distance > window_left
    weights = scores.masked_fill(hidden, -math.inf).exp()
    total = weights.sum(-1)
    if sinks is not None:
        total = total + sinks.double().exp()[:, None]
    return torch.einsum("hrt,thd->rhd", weights / total[..., None], v)


def cached(fmt, c, k, v, block_size=32, order=None):
    """A cache that holds the sequence in blocks of any order, and its block table."""
    blocks = -(-k.shape[0] // block_size)
    order = order or list(range(blocks))
    heads, dim = k.shape[1:]
    size = fmt.content_bytes(dim, block_size)
    cache = torch.full((max(order) + 1, heads, block_size, size), 0xA5, dtype=torch.uint8)
    positions = torch.arange(k.shape[0])
    slots = torch.tensor(order)[positions // block_size] * block_size + positions % block_size
    reference.store(fmt, c, k, v, cache, slots, positions)
    return cache, torch.tensor([order])


def draw(tokens, heads, dim, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(tokens, heads, dim, generator=g) for _ in range(2))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("head_dim", [64, 80, 112])
def test_vectors_come_back(name, head_dim):
    fmt, c = FORMATS[name], uncalibrated(FORMATS[name], 2, head_dim)
    k, v = draw(70, 2, head_dim)
    cache, table = cached(fmt, c, k, v, order=[2, 0, 1])
    zk, zv = reference.read(fmt, c, cache, table[0].tolist(), 70)
    for z, back, x, bits in (
        (zk, c.query_in.transpose(1, 2), k, fmt.key_bits),
        (zv, c.value_out, v, fmt.value_bits),
    ):
        got = torch.einsum("hij,thj->thi", back.double(), z)
        assert (got[1:] - x[1:]).norm() / x[1:].norm() < ERROR[bits]
        assert (got[0] - x[0]).norm() / x[0].norm() < 1e-3  # the first token is kept exact


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"softcap": 3.0},
        {"window_left": 20},
        {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    ],
    ids=["plain", "softcap", "window", "sinks"],
)
def test_attention_over_eight_bits_is_attention(options):
    fmt, c = FORMATS["tdsf_k8v8"], uncalibrated(FORMATS["tdsf_k8v8"], 2, 64)
    k, v = draw(100, 2, 64)
    q = 2 * next(draw(7, 4, 64, seed=1))
    cache, table = cached(fmt, c, k, v)
    lens = torch.tensor([100])
    got = reference.attend(
        fmt, c, q, cache, table, torch.tensor([0, 7]), lens, scale=0.125, **options
    )
    want = plain_attention(q, k, v, 0.125, **options)
    assert (got - want).norm() / want.norm() < 0.015


def test_a_calibrated_transform_changes_no_result_of_its_own():
    """Centre, balance and basis cancel: only the quantisation error may differ."""
    fmt = FORMATS["tdsf_k8v8"]
    base = uncalibrated(fmt, 2, 64)
    g = torch.Generator().manual_seed(3)
    mix = torch.eye(64) + 0.3 * torch.randn(2, 64, 64, generator=g) / 8
    c = replace(
        base,
        key_center=torch.randn(2, 64, generator=g),
        key_in=mix,
        query_in=torch.linalg.inv(mix).mT,
        value_in=mix,
        value_out=torch.linalg.inv(mix),
    )
    k, v = draw(64, 2, 64)
    q = next(draw(3, 4, 64, seed=1))
    cache, table = cached(fmt, c, k, v)
    got = reference.attend(
        fmt, c, q, cache, table, torch.tensor([0, 3]), torch.tensor([64]), scale=0.125
    )
    want = plain_attention(q, k, v, 0.125)
    assert (got - want).norm() / want.norm() < 0.02


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", FORMATS)
def test_a_broken_vector_stays_alone(name, bad):
    fmt, c = FORMATS[name], uncalibrated(FORMATS[name], 2, 64)
    k, v = draw(40, 2, 64)
    clean, _ = cached(fmt, c, k, v)
    k[5, 1, 7] = v[5, 1, 7] = bad
    dirty, table = cached(fmt, c, k, v)
    for which, want in zip(
        reference.read(fmt, c, dirty, table[0].tolist(), 40),
        reference.read(fmt, c, clean, table[0].tolist(), 40),
    ):
        assert which.isfinite().all()
        which[5, 1] = want[5, 1] = 0
        assert torch.equal(which, want)


def test_constants_of_the_wrong_shape_are_named():
    good = uncalibrated(FORMATS["tdsf_k4v4"], 2, 64)
    with pytest.raises(ValueError, match="value_out has shape"):
        replace(good, value_out=torch.zeros(2, 64, 32))

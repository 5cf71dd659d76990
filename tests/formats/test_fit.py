# SPDX-License-Identifier: Apache-2.0
"""Fitting one layer's constants from moments."""

import math
from types import SimpleNamespace

import pytest
import torch

from tests.formats.test_reference import plain_attention
from vllm.turboquant import fit, kernels, reference
from vllm.turboquant.constants import LayerConstants, uncalibrated
from vllm.turboquant.formats import FORMATS
from vllm.turboquant.plain import attend
from vllm.turboquant.tdsf import prior

HEADS, DIM, GROUP = 2, 64, 3


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def scene(tokens=400, seed=0):
    """Queries, keys and values as attention has them: correlated, off centre, uneven."""
    mix = random(3, HEADS, DIM, DIM, seed=100) * torch.logspace(0, -1.5, DIM)
    q = torch.einsum("thgd,hde->thge", random(tokens, HEADS, GROUP, DIM, seed=seed), mix[0])
    k = torch.einsum("thd,hde->the", random(tokens, HEADS, DIM, seed=seed + 1), mix[1])
    v = torch.einsum("thd,hde->the", random(tokens, HEADS, DIM, seed=seed + 2), mix[2])
    return q.flatten(1, 2), k + 3 * random(HEADS, DIM, seed=101), v


def moments(q, k, v, positions=None):
    m = fit.Moments.zeros(HEADS, DIM, len(k))
    m.add(q, k, v, torch.arange(len(k)) if positions is None else positions)
    return m


def weight_metric():
    return fit.output_metric(random(80, HEADS * GROUP * DIM, seed=5), HEADS, DIM)


def test_moments_do_not_depend_on_the_pieces():
    q, k, v = scene()
    whole = moments(q, k, v)
    pieces = fit.Moments.zeros(HEADS, DIM, len(k))
    for part in torch.arange(len(k)).split(37):
        pieces.add(q[part], k[part], v[part], part)
    for name, x in vars(whole).items():
        assert torch.allclose(x, getattr(pieces, name), rtol=1e-12), name


def test_the_exact_first_token_and_broken_tokens_are_left_out():
    q, k, v = scene(50)
    want = moments(q[1:], k[1:], v[1:], torch.arange(1, 50))
    k[0] = 1e6
    got = moments(q, k, v)
    assert torch.equal(got.key_products, want.key_products)
    v[7, 1, 3] = math.nan
    got = moments(q, k, v)
    assert int(got.tokens.sum()) == 48
    assert got.value_products.isfinite().all()


def test_feedback_accounts_for_every_error():
    """The error's weight e' T e is the weighted sum of what each rounding left."""
    x = random(HEADS, 200, DIM).double()
    metric = x.mT @ x
    f = fit.feedback(metric)
    error = random(HEADS, DIM, seed=1).double()
    unit = torch.triu(f, 1) + torch.eye(DIM)
    left = torch.linalg.solve(unit.mT, error[..., None])[..., 0]
    want = torch.einsum("hi,hij,hj->h", error, metric, error)
    assert torch.allclose((left**2 * f.diagonal(dim1=1, dim2=2)).sum(-1), want)


def test_the_prior_finds_the_curve_it_was_made_from():
    position = torch.tensor([1, 2.5, 5.5, 11.5, 23.5, 47.5, 95, 190, 380]).double()
    true = torch.tensor([[0.5, 0.05, 0.2], [-0.1, 0.01, 0.3], [0, 0, 0.7]]).double()
    scale = prior(true, position).T
    found = fit.fit_prior(position, scale, torch.ones(9).double())
    assert ((prior(found, position).T / scale - 1).abs() < 0.02).all()


def test_a_prior_is_positive_wherever_it_is_read():
    """A steep rise must not extrapolate below zero, at 0 or far beyond the text."""
    position = torch.tensor([1.0, 3, 6, 12]).double()
    scale = torch.tensor([[1e-3, 0.2, 0.9, 1.0], [1.0, 0.1, 1e-2, 1e-4]]).double()
    found = fit.fit_prior(position, scale, torch.ones(4).double())
    assert (prior(found, torch.tensor([0, 1, 100, 10**6])) > 0).all()


@pytest.mark.parametrize("name", ["tdsf_k8v8", "tdsf_k4v4", "tdsf_k3v3"])
def test_fitted_constants_lose_less_than_uncalibrated_ones(name):
    """On fresh vectors of the same kind: errors of scores, and of the block's output."""
    fmt, metric = FORMATS[name], weight_metric()
    fitted = LayerConstants(**fit.fit_layer(fmt, moments(*scene()), metric))
    plain = uncalibrated(fmt, HEADS, DIM)
    q, k, v = scene(60, seed=50)
    positions = torch.arange(1, 61)
    weights = torch.einsum("thgd,thge->hde", *(2 * [q.double().unflatten(1, (HEADS, -1))]))

    def losses(c):
        keys = reference.encode_keys(fmt, c, k, positions)
        values = reference.encode_values(fmt, c, v, positions)
        zk = read(keys, c.key_levels, fmt.key_bits, c.tdsf[:, :3], c.scale_step[0])
        zv = read(values, c.value_levels, fmt.value_bits, c.tdsf[:, 3:], c.scale_step[1])
        ek = torch.einsum("hji,thj->thi", c.query_in.double(), zk) + c.key_center - k
        ev = torch.einsum("hij,thj->thi", c.value_out.double(), zv) - v
        return [
            float(torch.einsum("thi,hij,thj->", e.double(), m, e.double()))
            for e, m in ((ek, weights), (ev, metric))
        ]

    def read(encoded, table, bits, numbers, step):
        levels = reference._take(reference._levels(table, bits, DIM), encoded.codes)
        scale = reference.tdsf.decode_scale(encoded.scales, prior(numbers, positions), float(step))
        return levels * scale[..., None]

    for ours, theirs in zip(losses(fitted), losses(plain)):
        assert ours < 0.5 * theirs


def test_transforms_undo_each_other_and_what_was_never_seen_stays_finite():
    silent = moments(*(0 * x for x in scene(30)))
    nothing = torch.zeros(HEADS, DIM, DIM)
    for m, metric in ((moments(*scene(30)), weight_metric()), (silent, nothing)):
        c = fit.fit_layer(FORMATS["tdsf_k4v3"], m, metric)
        assert all(x.isfinite().all() for x in c.values())
        for a, b in ((c["key_in"], c["query_in"].mT), (c["value_in"], c["value_out"])):
            assert torch.allclose(a @ b, torch.eye(DIM).expand(HEADS, -1, -1), atol=1e-3)


def test_a_text_of_first_tokens_only_is_refused():
    with pytest.raises(ValueError, match="longer text"):
        fit.fit_layer(FORMATS["tdsf_k4v4"], moments(*scene(1)), weight_metric())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window_left": 10},
        {"softcap": 3.0},
        {"sinks": random(6, seed=9)},
        {"softcap": 2.0, "sinks": random(6, seed=9), "window_left": 5},
    ],
    ids=["plain", "window", "softcap", "sinks", "all"],
)
def test_attention_while_calibrating_is_attention(options):
    q, k, v = scene(40)
    layer = SimpleNamespace(
        scale=0.02,
        soft_cap=options.get("softcap", 0.0),
        window_left=options.get("window_left", -1),
        sinks=options.get("sinks"),
    )
    got = attend(layer, q[-7:], k, v)
    want = plain_attention(q[-7:], k, v, 0.02, **options)
    assert (got - want).norm() < 1e-5 * want.norm()


@pytest.mark.parametrize("name", ["tdsf_k8v8", "tdsf_k4v4", "tdsf_k3v3"])
def test_strict_tdsf_takes_its_scales_from_the_formula_alone(name):
    """No scale byte tells anything, kernel and reference agree, and vectors still come back."""
    fmt, metric = FORMATS[name], weight_metric()
    c = LayerConstants(**fit.fit_layer(fmt, moments(*scene()), metric, strict=True))
    assert not c.scale_step.any()
    _, k, v = scene(64, seed=50)
    at, caches = torch.arange(64), []
    for store in (kernels.store, reference.store):
        cache = torch.zeros(2, HEADS, 32, fmt.content_bytes(DIM, 32), dtype=torch.uint8)
        store(fmt, c, k, v, cache, at, at)
        caches.append(cache)
    ours, want = [reference.read(fmt, c, cache, [0, 1], 64) for cache in caches]
    # The stored bytes may be anything.
    sections = fmt.regions(DIM, 32)
    noisy = caches[0].clone()
    noisy.flatten(2)[..., sections.key_scales : sections.end] = 7
    for x, y, z in zip(ours, want, reference.read(fmt, c, noisy, [0, 1], 64)):
        assert torch.equal(x, z)
        assert ((x - y).abs().amax(-1) < 1e-2).double().mean() > 0.9
    back = torch.einsum("hji,thj->thi", c.query_in.double(), ours[0]) + c.key_center
    error = (back - k)[1:].norm() / (k - c.key_center)[1:].norm()
    assert error < {8: 0.05, 4: 0.5, 3: 0.7}[fmt.key_bits]

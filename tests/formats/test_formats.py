# SPDX-License-Identifier: Apache-2.0
"""Sizes, codes and tables of the formats."""

import math

import pytest
import torch

from vllm.turboquant import codebook, packing, tdsf
from vllm.turboquant.formats import FORMATS, HEAD_DIMS, code_bytes, is_tdsf
from vllm.turboquant.rotation import rotation

BITS_AT_64 = {
    "tdsf_k8v8": 8.25,
    "tdsf_k8v4": 6.25,
    "tdsf_k4v4": 4.25,
    "tdsf_k4v3": 3.75,
    "tdsf_k3v3": 3.25,
}


@pytest.mark.parametrize("name", FORMATS)
def test_bits_per_element_count_everything(name):
    assert FORMATS[name].bits_per_element(64) == BITS_AT_64[name]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("block_size", [32, 64, 128, 160, 1024])
def test_sections_fit_their_page(name, head_dim, block_size):
    fmt = FORMATS[name]
    at = fmt.regions(head_dim, block_size)
    assert 4 * head_dim == at.keys < at.values < at.key_scales < at.value_scales < at.end
    room = block_size * fmt.content_bytes(head_dim, block_size)
    assert at.end <= room
    # What a page holds beyond its sections is at most the slot's share of its tokens.
    assert room - at.end <= block_size * -(-4 * head_dim // min(block_size, 128))


@pytest.mark.parametrize("name", FORMATS)
def test_content_size_asked_for_one_token_is_that_of_large_blocks(name):
    """vLLM sizes hybrid pages from a block of 1 token; the real page must agree."""
    for head_dim in HEAD_DIMS:
        for block_size in (128, 256, 544, 1568):
            size = FORMATS[name].content_bytes(head_dim, block_size)
            assert size == FORMATS[name].content_bytes(head_dim, 1)


def test_only_our_names_are_tdsf():
    assert is_tdsf("tdsf_k4v4")
    assert not any(map(is_tdsf, ("auto", "fp8", "turboquant_k8v4", "tdsf_k5v5", None)))


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("block_size", [32, 96, 128])
def test_packing_is_a_bijection(bits, head_dim, block_size):
    codes = torch.randint(0, 2**bits, (block_size, head_dim), dtype=torch.uint8)
    for pack, unpack in (
        (packing.pack_keys, packing.unpack_keys),
        (packing.pack_values, packing.unpack_values),
    ):
        data = pack(codes, bits)
        assert data.numel() == block_size * code_bytes(bits, head_dim)
        assert torch.equal(unpack(data, block_size, head_dim, bits), codes)


def test_documented_places_of_codes():
    """docs/format.md: where token t, coordinate d of a 4-bit block lies."""
    codes = torch.zeros(32, 64, dtype=torch.uint8)
    t, d = 21, 38
    codes[t, d] = 0xF
    keys = packing.pack_keys(codes, 4)
    at = ((t // 16 * 8 + d // 8) * 16 + t % 16) * 4 + d % 4
    assert keys[at] == 0xF0 if d // 4 % 2 else keys[at] == 0x0F
    values = packing.pack_values(codes, 4)
    at = ((t // 8 * 4 + d // 16) * 16 + d % 16) * 4 + t % 4
    assert values[at] == 0xF0 if t // 4 % 2 else values[at] == 0x0F
    assert keys.count_nonzero() == values.count_nonzero() == 1


@pytest.mark.parametrize("bits,error", [(3, 0.03454), (4, 0.009497)])
def test_levels_reach_the_published_distortion(bits, error):
    """Max (1960), table I: mean square error of the optimum quantiser of N(0, 1)."""
    levels = torch.tensor(codebook.normal_levels(bits), dtype=torch.float64)
    x = torch.distributions.Normal(0, 1).icdf(
        (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    )
    nearest = levels[torch.argmin((x[:, None] - levels[None, :]).abs(), dim=1)]
    assert (x - nearest).square().mean().item() == pytest.approx(error, rel=0.01)
    table = codebook.int8_levels(bits)
    assert table[-1] == codebook.LEVEL_MAX and torch.equal(table, -table.flip(0))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rotation_is_orthonormal_and_fixed(head_dim):
    turn = rotation(head_dim)
    assert torch.allclose(turn @ turn.T, torch.eye(head_dim, dtype=torch.float64), atol=1e-12)
    assert torch.equal(turn, rotation.__wrapped__(head_dim))
    assert not torch.equal(turn, rotation(head_dim, seed=1))
    # It spreads a single large coordinate over all of them.
    assert turn.abs().max() <= math.sqrt(2 * 8 / head_dim)


def test_prior_follows_the_formula():
    numbers = torch.tensor([[2.0, 0.1, 0.5], [0.0, 0.0, 3.0]])
    scale = tdsf.prior(numbers, torch.tensor([0, 10]))
    assert scale[0].tolist() == pytest.approx([2.5, 3.0])
    assert scale[1].tolist() == pytest.approx([2.0 * math.exp(-1.0) + 0.5, 3.0])


@pytest.mark.parametrize("step", [1 / 64, 1 / 8])
def test_scale_codes_round_trip_within_half_a_step(step):
    predicted = torch.full((1000,), 0.3, dtype=torch.float64)
    span = 127 * step
    scale = predicted * torch.exp2(torch.linspace(-span, span, 1000, dtype=torch.float64))
    back = tdsf.decode_scale(tdsf.scale_code(scale, predicted, step), predicted, step)
    assert torch.log2(back / scale).abs().max() <= step / 2 + 1e-9
    above = tdsf.decode_scale(tdsf.scale_code(scale, predicted, step, up=True), predicted, step)
    assert (above >= scale * (1 - 1e-6)).all()

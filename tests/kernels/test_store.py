# SPDX-License-Identifier: Apache-2.0
"""Encoding by the kernels against the reference, byte by byte."""

import pytest
import torch

from tests.kernels.scene import make_scene
from vllm.turboquant import kernels, reference
from vllm.turboquant.formats import FORMATS
from vllm.turboquant.packing import unpack_keys, unpack_values


def stored(scene, which: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [T, H, D] and scale bytes [T, H] of the scene's tokens, as the cache holds them."""
    _, heads, tokens, _ = scene.cache.shape
    dim = scene.key.shape[-1]
    at = scene.fmt.regions(dim, tokens)
    bits, start, end, scale, unpack = {
        "key": (scene.fmt.key_bits, at.keys, at.values, at.key_scales, unpack_keys),
        "value": (scene.fmt.value_bits, at.values, at.key_scales, at.value_scales, unpack_values),
    }[which]
    codes, scales = [], []
    for block in range(scene.cache.shape[0]):
        regions = [scene.cache[block, h].view(-1) for h in range(heads)]
        codes.append(torch.stack([unpack(r[start:end], tokens, dim, bits) for r in regions], 1))
        scales.append(torch.stack([r[scale : scale + tokens] for r in regions], 1))
    return torch.cat(codes)[scene.slots], torch.cat(scales)[scene.slots]


def both_sides(scene):
    """(reference's, kernels') codes and scales of keys, then of values."""
    for which, encode, x in (
        ("key", reference.encode_keys, scene.key),
        ("value", reference.encode_values, scene.value),
    ):
        want = encode(scene.fmt, scene.constants, x, scene.positions)
        yield (want.codes.int(), want.scales.int()), [x.int() for x in stored(scene, which)]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("dim", "dtype"), [(80, torch.float32), (112, torch.float16), (256, torch.bfloat16)]
)
def test_bytes_equal_the_reference(name, dim, dtype):
    """Except where a coordinate or a scale lies within rounding of a decision boundary."""
    scene = make_scene(name, dim=dim, lengths=(40, 60), dtype=dtype, profile=False)
    for (codes, scales), (got_codes, got_scales) in both_sides(scene):
        off = (scales - got_scales).abs()
        assert off.max() <= 1 and (off > 0).float().mean() < 0.01
        apart = (codes != got_codes).any(-1)
        assert apart.float().mean() < 0.03


@pytest.mark.parametrize("name", FORMATS)
def test_errors_are_passed_on_as_in_the_reference(name):
    """One coordinate at a boundary sends the rest of its vector another way; most have none."""
    scene = make_scene(name, dim=64, lengths=(40, 160))
    for (codes, scales), (got_codes, got_scales) in both_sides(scene):
        same = (codes == got_codes).all(-1) & (scales == got_scales)
        assert same.float().mean() > 0.9


def test_first_token_is_exact():
    scene = make_scene("tdsf_k4v4", dim=64, lengths=(40, 70))
    for r, first in ((0, 0), (1, 40)):
        region = scene.cache[scene.block_table[r, 0]].flatten(1)
        slot = region[:, : 4 * 64].contiguous().view(torch.float16)
        keys = reference.encode_keys(scene.fmt, scene.constants, scene.key, scene.positions)
        values = reference.encode_values(scene.fmt, scene.constants, scene.value, scene.positions)
        want = torch.cat([keys.exact[first], values.exact[first]], -1)
        torch.testing.assert_close(slot.float(), want.float(), rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("name", FORMATS)
def test_token_by_token_equals_all_at_once(name):
    scene = make_scene(name, lengths=(70,))
    whole = scene.cache.clone()
    scene.cache.fill_(0x5A)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(1))
    for t in order.tolist():
        kernels.store(
            *(scene.fmt, scene.constants, scene.key[t : t + 1], scene.value[t : t + 1]),
            *(scene.cache, scene.slots[t : t + 1], scene.positions[t : t + 1]),
        )
    again = scene.cache.clone()
    scene.cache.copy_(whole)
    want = [stored(scene, which) for which in ("key", "value")]
    scene.cache.copy_(again)
    got = [stored(scene, which) for which in ("key", "value")]
    for (a, b), (c, d) in zip(want, got):
        assert torch.equal(a, c) and torch.equal(b, d)


def test_skipped_tokens_write_nothing():
    scene = make_scene("tdsf_k3v3", lengths=(40,))
    before = scene.cache.clone()
    scene.slots.fill_(-1)
    scene.key.mul_(2.0)
    scene.store()
    assert torch.equal(scene.cache, before)


def test_zero_vectors():
    scene = make_scene("tdsf_k4v4", lengths=(40,), profile=False)
    scene.key.zero_()
    scene.value.zero_()
    scene.store()
    out = scene.attend([(0, 0, 40)])
    assert out.abs().max() < 1e-3

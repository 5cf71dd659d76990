# SPDX-License-Identifier: Apache-2.0
"""What must not reach a row: stale bytes, other rows' NaN and Inf, blocks outside the cache."""

import math

import pytest
import torch

from tests.kernels.scene import make_scene
from vllm.turboquant import kernels
from vllm.turboquant.formats import FORMATS

BAD = pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])


@pytest.mark.parametrize("name", FORMATS)
def test_stale_bytes_never_matter(name):
    """Bytes of later tokens, of unused blocks and of their slots may be anything."""
    scene = make_scene(name, lengths=(40, 600))
    want = scene.attend([(0, 30, 31), (1, 100, 200)])
    used = make_scene(name, lengths=(40, 600))
    used.cache.random_(generator=torch.Generator().manual_seed(9))
    keep = torch.cat([torch.arange(31), 40 + torch.arange(200)])
    for x in ("key", "value", "slots", "positions"):
        setattr(used, x, getattr(used, x)[keep])
    used.store()
    first = sum(scene.lengths[:1])
    query = torch.cat([scene.query[30:31], scene.query[first + 100 : first + 200]])
    out = torch.empty(query.shape)
    kernels.attend(
        *used.arguments([(0, 30, 31), (1, 100, 200)], query), out, **used.options
    )
    assert torch.equal(out, want)


@BAD
def test_a_bad_query_spoils_its_own_row_and_head_only(bad):
    scene = make_scene("tdsf_k4v4", lengths=(40, 600))
    want = scene.attend(scene.everything())
    scene.query[100, 1, 5] = bad
    got = scene.attend(scene.everything())
    assert got[100, 1].isnan().all()
    got[100, 1] = want[100, 1]
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", FORMATS)
@BAD
def test_a_bad_token_counts_as_zero(name, bad):
    """Not finite coordinates are stored as zeros; every row that sees the token stays finite."""
    scene = make_scene(name, lengths=(40, 600))
    want = scene.attend([(0, 0, 40), (1, 0, 50)])
    for position in (0, 50):  # the exact first token, and a quantised one
        scene.key[40 + position, 0, 3] = bad
        scene.value[40 + position, 1, 7] = bad
    scene.store()
    got = scene.attend([(0, 0, 40), (1, 0, 600)])
    assert got.isfinite().all()
    assert torch.equal(got[:40], want[:40])


def test_blocks_outside_the_cache_are_refused():
    scene = make_scene("tdsf_k4v4", lengths=(70,))
    for wrong in (-1, scene.cache.shape[0]):
        scene.block_table[0, 1] = wrong
        with pytest.raises(ValueError, match=f"names block {wrong} of a cache of"):
            scene.attend([(0, 69, 70)])
    scene.attend([(0, 31, 32)])  # does not reach the wrong block


def test_slots_outside_the_cache_are_refused():
    scene = make_scene("tdsf_k4v4", lengths=(70,))
    before = scene.cache.clone()
    scene.slots[3] = scene.cache.shape[0] * scene.cache.shape[2]
    with pytest.raises(ValueError, match="lies outside a cache of"):
        scene.store()
    assert torch.equal(scene.cache, before)


def test_shapes_are_checked():
    scene = make_scene("tdsf_k4v4", lengths=(70,))
    scene.cache = scene.cache[:, :, :, :-8].contiguous()
    with pytest.raises(ValueError, match="too small for the format"):
        scene.store()

# SPDX-License-Identifier: Apache-2.0
"""A query row's bits depend on its query, its position and its sequence, and on nothing else."""

import pytest
import torch

from tests.kernels.scene import make_scene
from vllm.turboquant.formats import FORMATS

LENGTHS = (1, 31, 700, 1100)


@pytest.fixture(params=[2, 1, 5], ids=lambda n: f"{n}threads", scope="module")
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=FORMATS)
def scene(request):
    options = {"tdsf_k8v4": {"window_left": 300}, "tdsf_k4v3": {"softcap": 9.0, "with_sinks": True}}
    return make_scene(request.param, lengths=LENGTHS, group=7, **options.get(request.param, {}))


@pytest.fixture(scope="module")
def whole(scene):
    """Every row of every sequence, each sequence one prefill, all in one batch."""
    return dict(enumerate(scene.attend(scene.everything()).split(list(LENGTHS))))


def assert_same(whole, scene, chunks):
    parts = scene.attend(chunks).split([stop - start for _, start, stop in chunks])
    for (r, start, stop), part in zip(chunks, parts):
        assert torch.equal(part, whole[r][start:stop])


def test_each_sequence_alone(threads, scene, whole):
    for chunk in scene.everything():
        assert_same(whole, scene, [chunk])


def test_single_rows_and_batches_of_them(threads, scene, whole):
    rows = [(3, p, p + 1) for p in (0, 31, 32, 511, 512, 513, 1023, 1024, 1099)]
    for row in rows:
        assert_same(whole, scene, [row])
    assert_same(whole, scene, [(0, 0, 1), (3, 1023, 1024), (1, 30, 31), (2, 699, 700)])


def test_any_chunking(threads, scene, whole):
    for cuts in ([0, 1, 5, 600, 1100], [0, 512, 1024, 1100], [0, 333, 777, 1100]):
        for start, stop in zip(cuts, cuts[1:]):
            assert_same(whole, scene, [(3, start, stop)])


def test_mixed_prefill_and_decode(threads, scene, whole):
    assert_same(whole, scene, [(2, 699, 700), (3, 400, 900), (0, 0, 1), (1, 7, 31)])


@pytest.mark.parametrize("name", FORMATS)
def test_block_size_does_not_matter(name):
    """The unit of the arithmetic is a group of 32 tokens, not a block."""
    first, *others = (
        make_scene(name, lengths=(700,), block_size=size).attend([(0, 0, 700)])
        for size in (32, 96, 128, 1024)
    )
    assert all(torch.equal(first, other) for other in others)

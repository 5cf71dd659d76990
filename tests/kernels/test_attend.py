# SPDX-License-Identifier: Apache-2.0
"""Attention by the kernels against exact attention over the same cache."""

import pytest
import torch

from tests.kernels.scene import drawn_scene, make_scene
from vllm.turboquant import kernels, reference
from vllm.turboquant.formats import FORMATS

# Relative error of the integer arithmetic: one digit of query or weights costs about 1 %.
TOLERANCE = {"tdsf_k8v8": 0.003, "tdsf_k8v4": 0.015}
ONE_DIGIT = 0.025


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def expected(scene, chunks) -> torch.Tensor:
    query = torch.cat([scene.rows(*chunk) for chunk in chunks])
    return reference.attend(*scene.arguments(chunks, query), **scene.options)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "options",
    [{}, {"window_left": 70}, {"softcap": 10.0}, {"with_sinks": True}],
    ids=["plain", "window", "softcap", "sinks"],
)
def test_matches_the_reference(name, options):
    scene = make_scene(name, lengths=(1, 33, 640), **options)
    chunks = [(2, 0, 640), (0, 0, 1), (1, 32, 33)]
    error = relative_error(scene.attend(chunks), expected(scene, chunks))
    assert error < TOLERANCE.get(name, ONE_DIGIT)


@pytest.mark.parametrize("seed", range(24))
def test_random_scenes(seed):
    scene = drawn_scene(seed)
    chunks = [(r, max(0, n - (1, 5, 90)[(seed + r) % 3]), n) for r, n in enumerate(scene.lengths)]
    error = relative_error(scene.attend(chunks), expected(scene, chunks))
    assert error < TOLERANCE.get(scene.fmt.name, 0.03)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_output_dtype(dtype):
    scene = make_scene("tdsf_k8v8", lengths=(200,), dtype=dtype)
    wide = scene.attend([(0, 0, 200)])
    narrow = scene.attend([(0, 0, 200)], out_dtype=dtype)
    assert torch.equal(wide.to(dtype), narrow)


@pytest.mark.parametrize("sharpness", [0.1, 1.0, 4.0])
def test_peaks_and_flat_tails(sharpness):
    """A few keys that match the query, thousands that do not: neither part may be lost."""
    scene = make_scene("tdsf_k4v4", heads=1, group=4, lengths=(3000,), profile=False)
    scene.value += 1.0  # a common part that every token of the tail adds to
    scene.key[::500] = sharpness * scene.query[-1:, :1] * 0.7
    scene.store()
    chunks = [(0, 2999, 3000)]
    assert relative_error(scene.attend(chunks), expected(scene, chunks)) < ONE_DIGIT


def test_long_sequence():
    scene = make_scene("tdsf_k3v3", heads=1, group=2, dim=32, lengths=(20_000,), block_size=128)
    chunks = [(0, 19_999, 20_000)]
    assert relative_error(scene.attend(chunks), expected(scene, chunks)) < 0.03


def test_rows_past_the_last_request_stay():
    scene = make_scene("tdsf_k4v4", lengths=(50,))
    query = scene.rows(0, 0, 50)
    out = torch.full(query.shape, 7.0)
    fmt, c, _, cache, table, _, lengths = scene.arguments([(0, 0, 50)], query)
    starts = torch.tensor([0, 20], dtype=torch.int32)
    kernels.attend(fmt, c, query, cache, table, starts, lengths, out, **scene.options)
    assert (out[:20] != 7.0).all() and (out[20:] == 7.0).all()


def test_variant_is_named():
    assert kernels.isa() in kernels.variants()
    assert kernels.variants()[-1] == "portable"

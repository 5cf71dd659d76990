# SPDX-License-Identifier: Apache-2.0
"""The Triton attention kernels against exact attention over the same cache."""

import pytest
import torch

from tests.triton.interpreted.scene import attention_error
from vllm.turboquant.formats import FORMATS

# fp16 queries, weights and levels, fp32 sums: a few parts in 10,000.
TOLERANCE = 1e-3
BATCH = dict(rows=(1, 3, 40), lengths=(1, 70, 40))  # a first token, speculation, a whole prompt


@pytest.mark.parametrize("name", FORMATS)
def test_every_format(name):
    assert attention_error(name, dim=64, group=3, heads=2, **BATCH) < TOLERANCE


@pytest.mark.parametrize(
    "name,dim,group,block",
    [
        ("tdsf_k3v3", 80, 1, 96),
        ("tdsf_k4v4", 96, 6, 32),
        ("tdsf_k4v3", 112, 7, 64),
        ("tdsf_k8v4", 128, 16, 128),
        ("tdsf_k4v4", 160, 5, 32),
        ("tdsf_k3v3", 192, 4, 32),
        ("tdsf_k8v8", 224, 2, 32),
        ("tdsf_k4v4", 256, 6, 544),
    ],
)
def test_head_dims_groups_and_block_sizes(name, dim, group, block):
    error = attention_error(name, dim=dim, group=group, block=block, rows=(2, 1), lengths=(100, 33))
    assert error < TOLERANCE


@pytest.mark.parametrize(
    "options",
    [{"window_left": 20}, {"window_left": 0}, {"softcap": 5.0}, {"sinks": True}],
    ids=str,
)
@pytest.mark.parametrize("name", ["tdsf_k4v4", "tdsf_k3v3"])
def test_windows_caps_and_sinks(name, options):
    assert attention_error(name, dim=64, group=2, **BATCH, **options) < TOLERANCE


@pytest.mark.parametrize("splits", [1, 4])
def test_splits_of_a_long_sequence(splits):
    """More than one split has tokens: 256 each at least."""
    error = attention_error("tdsf_k4v4", dim=64, group=4, rows=(2,), lengths=(700,), splits=splits)
    assert error < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_activation_dtypes(dtype):
    assert attention_error("tdsf_k4v4", dim=64, group=2, dtype=dtype, **BATCH) < TOLERANCE


def test_requests_without_rows_are_passed_over():
    """Padding of a captured graph: requests of no rows behind the real ones."""
    error = attention_error("tdsf_k4v4", dim=64, group=4, rows=(1, 1, 0, 0), lengths=(9, 40, 1, 1))
    assert error < TOLERANCE

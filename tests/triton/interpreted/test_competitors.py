# SPDX-License-Identifier: Apache-2.0
"""What `tools.bench gpu` times ours against computes the same thing."""

import pytest
import torch
import torch.nn.functional as F
import triton
from torch.nn.attention.bias import causal_lower_right

from tools.bench.gpu import Shape, upstream_unified
from vllm import triton_utils


@pytest.mark.parametrize("rows", [1, 3])
def test_upstreams_unified_attention_is_called_right(rows, monkeypatch):
    """One row goes through its split over the sequence, several do not."""
    # Without a GPU upstream puts a placeholder in Triton's place.
    monkeypatch.setattr(triton_utils, "triton", triton)
    monkeypatch.setattr(triton_utils, "tl", triton.language)
    shape = Shape(query_heads=6, kv_heads=2, dim=80, batch=2, rows=rows, length=48)
    g = torch.Generator().manual_seed(0)
    query = torch.randn(shape.batch * rows, shape.query_heads, shape.dim, generator=g)
    key, value = torch.randn(2, shape.batch, shape.length, shape.kv_heads, shape.dim, generator=g)
    found = upstream_unified(shape, query, key, value)().clone()
    want = F.scaled_dot_product_attention(
        query.view(shape.batch, rows, -1, shape.dim).transpose(1, 2),
        *(side.transpose(1, 2) for side in (key, value)),
        attn_mask=causal_lower_right(rows, shape.length),
        enable_gqa=True,
    )
    assert torch.allclose(found, want.transpose(1, 2).reshape(found.shape), atol=1e-4)

# SPDX-License-Identifier: Apache-2.0
"""Upstream's own TurboQuant, vllm-project/vllm#46460: a prefix hit in a batch with a longer prompt."""

import pytest
import torch

from vllm.v1.attention.backends import turboquant_attn
from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionImpl, TurboQuantMetadata

HEADS, DIM = 2, 32


@pytest.fixture
def attended(monkeypatch):
    """Runs `_prefill_attention`, with what needs a GPU recorded: [(kind, first token, tokens)]."""
    calls = []

    def raw(self, q, **rest):  # flash attention over the chunk's own keys and values
        calls.append(("raw", int(q[0, 0, 0]), len(q)))
        return q

    def cached(self, layer, q, k, v, cache, table, cached_len, *rest):
        calls.append(("cached", int(q[0, 0, 0]), len(q)))
        return q

    monkeypatch.setattr(turboquant_attn, "_HAS_FLASH_ATTN", True)
    monkeypatch.setattr(turboquant_attn, "_CONTINUATION_DECODE_THRESHOLD", 0)
    monkeypatch.setattr(TurboQuantAttentionImpl, "_flash_attn_varlen", raw)
    monkeypatch.setattr(TurboQuantAttentionImpl, "_continuation_prefill", cached)

    def run(queries: list[int], lengths: list[int], host_copies: bool):
        starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
        lens = torch.tensor(lengths, dtype=torch.int32)
        rows = torch.arange(sum(queries), dtype=torch.float32)
        rows = rows[:, None, None].expand(-1, HEADS, DIM).contiguous()
        metadata = TurboQuantMetadata(
            seq_lens=lens,
            slot_mapping=torch.arange(sum(queries)),
            block_table=torch.zeros(len(queries), 8, dtype=torch.int32),
            query_start_loc=starts,
            num_actual_tokens=sum(queries),
            max_query_len=max(queries),
            max_seq_len=max(lengths),
            is_prefill=True,
            query_start_loc_cpu=starts if host_copies else None,
            seq_lens_cpu=lens if host_copies else None,
        )
        impl = TurboQuantAttentionImpl.__new__(TurboQuantAttentionImpl)
        impl.scale = 1.0
        output = impl._prefill_attention(
            rows, rows, rows, torch.empty(0), metadata, torch.empty(0), torch.empty(0)
        )
        assert torch.equal(output, rows)  # every row was attended, at its place
        return calls

    return run


@pytest.mark.parametrize("host_copies", [True, False])
def test_a_cached_prefix_is_attended_beside_a_longer_new_prompt(attended, host_copies):
    """A new prompt of 100 tokens, and 20 more tokens of a sequence of 70 whose first 50 are cached:
    the longest query is as long as the longest sequence, which upstream takes for "nothing cached"."""
    assert attended([100, 20], [100, 70], host_copies) == [("raw", 0, 100), ("cached", 100, 20)]


@pytest.mark.parametrize("host_copies", [True, False])
def test_new_prompts_alone_still_go_in_one_call(attended, host_copies):
    assert attended([100, 20], [100, 20], host_copies) == [("raw", 0, 120)]

# SPDX-License-Identifier: Apache-2.0
"""The CPU backend as vLLM meets it: selection, page sizes, metadata, refusals."""

import pytest
import torch

from vllm.turboquant.cpu import attention_backend
from vllm.turboquant.formats import FORMATS
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.tdsf_cpu import TdsfImpl, TdsfMetadataBuilder
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec


def demands(**changes) -> AttentionSelectorConfig:
    plain = dict(
        head_size=64, dtype=torch.float32, kv_cache_dtype="tdsf_k4v4", block_size=128
    )
    return AttentionSelectorConfig(**(plain | changes))


@pytest.mark.parametrize("name", FORMATS)
def test_the_cache_dtype_selects_its_backend(name):
    backend = resolve_obj_by_qualname(attention_backend(demands(kv_cache_dtype=name)))
    assert backend.format is FORMATS[name]
    assert AttentionBackendEnum[backend.get_name()].get_class() is backend


@pytest.mark.parametrize("name", ["auto", "fp8", "turboquant_4bit_nc", None])
def test_other_cache_dtypes_are_left_to_upstream(name):
    assert attention_backend(demands(kv_cache_dtype=name)) is None


@pytest.mark.parametrize(
    "change,named",
    [
        (dict(use_mla=True), "MLA"),
        (dict(use_sparse=True), "sparse"),
        (dict(use_mm_prefix=True), "multimodal"),
        (dict(attn_type=AttentionType.ENCODER_ONLY), "encoder_only"),
        (dict(attn_type=AttentionType.ENCODER_DECODER), "encoder_decoder"),
        (dict(head_size=72), "head_size"),
        (dict(block_size=48), "block_size"),
        (dict(use_non_causal=True), "non-causal"),
        (dict(use_kv_connector=True), "connector"),
        (dict(use_pcp=True), "PCP"),
        (dict(use_dcp=True), "DCP"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(change, named):
    with pytest.raises(ValueError) as refusal:
        attention_backend(demands(**change))
    assert named.lower() in str(refusal.value).lower()
    assert "--kv-cache-dtype auto" in str(refusal.value)


@pytest.mark.parametrize("change", [dict(has_sink=True), dict(has_sliding_window=True)])
def test_sinks_and_windows_are_served(change):
    assert attention_backend(demands(**change))


def layer(**changes) -> TdsfImpl:
    plain = dict(
        num_heads=4,
        head_size=64,
        scale=0.125,
        num_kv_heads=2,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="tdsf_k4v4",
    )
    return TdsfImpl(**(plain | changes))


@pytest.mark.parametrize(
    "change,named",
    [
        (dict(alibi_slopes=[0.5] * 4), "ALiBi"),
        (dict(attn_type=AttentionType.ENCODER), "encoder attention"),
        (dict(kv_sharing_target_layer_name="model.layers.0"), "shared between layers"),
    ],
)
def test_a_layer_that_needs_more_is_refused_by_name(change, named):
    with pytest.raises(ValueError, match=named):
        layer(**change)


def test_a_window_of_w_tokens_sees_the_row_and_w_minus_1_before_it():
    assert layer(sliding_window=16).window_left == 15
    assert layer().window_left == -1


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("head_dim,kv_heads", [(64, 3), (128, 8), (256, 4)])
def test_pages_are_as_small_as_the_format_says(name, head_dim, kv_heads):
    plain = FullAttentionSpec(
        block_size=128, num_kv_heads=kv_heads, head_size=head_dim, dtype=torch.uint8
    )
    backend = resolve_obj_by_qualname(attention_backend(demands(kv_cache_dtype=name)))
    page = backend.customize_spec(plain).page_size_bytes
    assert page == kv_heads * 128 * FORMATS[name].content_bytes(head_dim, 128)
    stored = 8 * page / (2 * kv_heads * 128 * head_dim)
    assert stored == FORMATS[name].bits_per_element(head_dim)


def test_keys_and_values_of_two_sizes_are_refused():
    spec = FullAttentionSpec(
        block_size=128, num_kv_heads=2, head_size=64, head_size_v=32, dtype=torch.uint8
    )
    backend = resolve_obj_by_qualname(attention_backend(demands()))
    with pytest.raises(ValueError, match="64 and 32"):
        backend.customize_spec(spec)


def test_positions_follow_from_the_batch():
    """A decode, a whole prompt, and the second chunk of a prompt in one step."""
    batch = CommonAttentionMetadata(
        query_start_loc=torch.tensor([0, 1, 4, 6], dtype=torch.int32),
        query_start_loc_cpu=torch.tensor([0, 1, 4, 6], dtype=torch.int32),
        seq_lens=torch.tensor([10, 3, 130], dtype=torch.int32),
        num_reqs=3,
        num_actual_tokens=6,
        max_query_len=3,
        max_seq_len=130,
        block_table_tensor=torch.zeros(3, 2, dtype=torch.int32),
        slot_mapping=torch.zeros(6, dtype=torch.int64),
    )
    builder = object.__new__(TdsfMetadataBuilder)  # build() needs nothing of the engine
    assert builder.build(0, batch).positions.tolist() == [9, 0, 1, 2, 128, 129]

# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend on CPU tensors: selection, metadata, storing and attending through a layer."""

from types import SimpleNamespace

import pytest
import torch

from tests.triton.interpreted.scene import CPU, calibrated
from vllm.turboquant import reference
from vllm.turboquant.constants import uncalibrated
from vllm.turboquant.cuda import attention_backend
from vllm.turboquant.formats import FORMATS
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends import tdsf_triton
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.tdsf_triton import TdsfTritonBuilder, TdsfTritonImpl
from vllm.v1.attention.ops.triton_tdsf_attend import tile_rows
from vllm.v1.attention.ops.triton_tdsf_constants import DeviceConstants
from vllm.v1.attention.selector import AttentionSelectorConfig

AMPERE = SimpleNamespace(major=8, minor=0)
HEADS, GROUP, DIM, BLOCK = 2, 3, 64, 32
FORMAT = FORMATS["tdsf_k8v8"]


def demands(**changes) -> AttentionSelectorConfig:
    plain = dict(head_size=64, dtype=torch.bfloat16, kv_cache_dtype="tdsf_k4v4", block_size=128)
    return AttentionSelectorConfig(**(plain | changes))


@pytest.mark.parametrize("name", FORMATS)
def test_the_cache_dtype_selects_its_backend(name):
    backend = resolve_obj_by_qualname(attention_backend(demands(kv_cache_dtype=name), AMPERE))
    assert backend.format is FORMATS[name]
    assert AttentionBackendEnum[backend.get_name()].get_class() is backend
    assert backend.get_impl_cls() is TdsfTritonImpl
    assert backend.get_preferred_block_size(16) == 128
    builder = backend.get_builder_cls()
    assert builder._cudagraph_support is AttentionCGSupport.UNIFORM_BATCH


@pytest.mark.parametrize("name", ["auto", "fp8", "turboquant_4bit_nc", None])
def test_other_cache_dtypes_are_left_to_upstream(name):
    assert attention_backend(demands(kv_cache_dtype=name), AMPERE) is None


@pytest.mark.parametrize(
    "change,named",
    [
        (dict(use_mla=True), "MLA"),
        (dict(use_mm_prefix=True), "multimodal"),
        (dict(attn_type=AttentionType.ENCODER_ONLY), "encoder_only"),
        (dict(head_size=72), "head_size"),
        (dict(block_size=48), "block_size"),
        (dict(use_non_causal=True), "non-causal"),
        (dict(use_kv_connector=True), "connector"),
        (dict(use_dcp=True), "DCP"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(change, named):
    with pytest.raises(ValueError) as refusal:
        attention_backend(demands(**change), AMPERE)
    assert named.lower() in str(refusal.value).lower()
    assert "--kv-cache-dtype auto" in str(refusal.value)


def test_old_devices_and_other_backends_are_refused():
    with pytest.raises(ValueError, match="compute capability"):
        attention_backend(demands(), SimpleNamespace(major=7, minor=5))
    with pytest.raises(ValueError, match="--attention-backend FLASH_ATTN"):
        attention_backend(demands(), AMPERE, AttentionBackendEnum.FLASH_ATTN)


def builder() -> TdsfTritonBuilder:
    made = object.__new__(TdsfTritonBuilder)  # build() needs nothing of the engine
    made._prepare(256, heads=HEADS, group=GROUP, dim=DIM, fmt=FORMAT, device=CPU)
    return made


def batch(starts: list[int], lengths: list[int], table: torch.Tensor, tokens: int):
    at = torch.tensor(starts, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=at,
        query_start_loc_cpu=at,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        num_reqs=len(lengths),
        num_actual_tokens=tokens,
        max_query_len=int((at[1:] - at[:-1]).max()),
        max_seq_len=max(lengths),
        block_table_tensor=table,
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
    )


def test_positions_follow_from_the_batch():
    """A decode, a whole prompt, a second chunk, and the padding of a captured graph."""
    table = torch.zeros(4, 2, dtype=torch.int32)
    made = builder()
    metadata = made.build(0, batch([0, 1, 4, 6, 6], [10, 3, 130, 0], table, 8))
    assert metadata.positions.tolist()[:6] == [9, 0, 1, 2, 128, 129]
    assert metadata.positions.shape == (8,) and (metadata.positions >= 0).all()
    assert metadata.longest_query == 3
    again = made.build(0, batch([0, 1, 2, 2, 2], [7, 8, 0, 0], table, 4))
    assert again.positions.data_ptr() == metadata.positions.data_ptr()  # graphs read from there
    assert again.positions.tolist()[:2] == [6, 7]


def test_batch_invariance_means_one_tile_and_no_splits(monkeypatch):
    table = torch.zeros(1, 2, dtype=torch.int32)
    made = builder()
    made.processors = 132
    one = batch([0, 1], [40], table, 1)
    assert made.build(0, one).splits > 1
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    decode, prefill = made.build(0, one), made.build(0, batch([0, 40], [40], table, 40))
    assert decode.splits == prefill.splits == 1
    shorter, longer = decode.longest_query, prefill.longest_query
    assert tile_rows(GROUP, shorter, DIM, FORMAT) == tile_rows(GROUP, longer, DIM, FORMAT)


def test_a_layer_stores_and_attends(monkeypatch):
    """A prompt in two chunks and a decode through the backend's own entry points, before and
    after calibration replaced the constants."""
    g = torch.Generator().manual_seed(0)
    impl = TdsfTritonImpl(
        num_heads=HEADS * GROUP,
        head_size=DIM,
        scale=DIM**-0.5,
        num_kv_heads=HEADS,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="tdsf_k8v8",
    )
    first = uncalibrated(impl.format, HEADS, DIM)
    impl.on_device = DeviceConstants(impl.format, first, CPU)
    second = calibrated(impl.format, HEADS, DIM, g)
    address = impl.on_device.query_in.data_ptr()
    content = impl.format.content_bytes(DIM, BLOCK)
    table = torch.tensor([[2, 0]], dtype=torch.int32)
    layer = SimpleNamespace(layer_name="layer")
    made, calls = builder(), {}
    monkeypatch.setattr(
        *(tdsf_triton, "get_forward_context"),
        lambda: SimpleNamespace(attn_metadata={"layer": calls["metadata"]}),
    )
    for constants in (first, second):
        impl.constants = constants
        assert impl.on_device.query_in.data_ptr() == address
        cache = torch.randint(0, 256, (3, HEADS, BLOCK, content), dtype=torch.uint8, generator=g)
        for start, stop in ((0, 30), (30, 36), (36, 37)):
            rows = stop - start
            key, value = torch.randn(2, rows, HEADS, DIM, generator=g)
            query = torch.randn(rows, HEADS * GROUP, DIM, generator=g)
            metadata = calls["metadata"] = made.build(0, batch([0, rows], [stop], table, rows))
            at = torch.arange(start, stop)
            slots = table[0].long()[at // BLOCK] * BLOCK + at % BLOCK
            impl.do_kv_cache_update(layer, key, value, cache, slots)
            out = torch.full_like(query, 7.0)
            impl.forward(layer, query, key, value, cache, metadata, out)
            want = reference.attend(
                *(impl.format, constants, query, cache, table),
                *(metadata.query_start_loc, metadata.seq_lens),
                scale=impl.scale,
            )
            assert float((out - want).norm() / want.norm()) < 1e-3


def test_a_step_without_a_cache_changes_nothing():
    impl = object.__new__(TdsfTritonImpl)
    out = torch.full((3, 2, 4), 7.0)
    assert (impl.forward(None, out, out, out, out, None, out) == 7.0).all()


def test_constants_of_another_shape_are_refused():
    made = DeviceConstants(FORMATS["tdsf_k4v4"], uncalibrated(FORMATS["tdsf_k4v4"], 2, 64), CPU)
    with pytest.raises(ValueError, match=r"\(2, 64\)"):
        made.fill(uncalibrated(FORMATS["tdsf_k4v4"], 2, 128))

# SPDX-License-Identifier: Apache-2.0
"""CPU attention over the TDSF cache.

Every query row, in prefill and in decode, attends the stored codes through the same kernel, also
for the tokens of its own chunk. A row's result therefore depends on its sequence alone, never on
how the scheduler cut or batched the work.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.turboquant.constants import LayerConstants, uncalibrated
from vllm.turboquant.formats import BLOCK_MULTIPLE, FORMATS, HEAD_DIMS, Format
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout


@dataclass
class TdsfMetadata:
    """One step's batch of R requests with T query rows in all."""

    query_start_loc: torch.Tensor  # int32 [R + 1]
    seq_lens: torch.Tensor  # int32 [R], this step's tokens included
    block_table: torch.Tensor  # int32 [R, max blocks]
    positions: torch.Tensor  # int64 [T], position of each row in its sequence


def causal(batch: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """The batch itself; NotImplementedError where a row may see tokens after its own."""
    if batch.causal is not True:
        raise NotImplementedError("The TDSF cache serves causal attention only.")
    return batch


class TdsfMetadataBuilder(AttentionMetadataBuilder[TdsfMetadata]):
    """Builds a step's metadata and gives each layer its constants once."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        for layer in layers.values():
            layer.impl.constants = uncalibrated(
                layer.impl.format, layer.num_kv_heads, layer.head_size
            )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TdsfMetadata:
        batch = causal(common_attn_metadata)
        starts = batch.query_start_loc
        rows = starts[1:] - starts[:-1]
        # Row j of request r sits at seq_len - rows + j.
        offset = torch.repeat_interleave(batch.seq_lens - rows - starts[:-1], rows)
        positions = offset + torch.arange(batch.num_actual_tokens)
        return TdsfMetadata(starts, batch.seq_lens, batch.block_table_tensor, positions.long())


class TdsfImpl(AttentionImpl):
    """Stores and attends for one layer. The builder sets `constants` before the first step."""

    constants: LayerConstants
    serves_key_bias: ClassVar[bool] = True
    serves_strict: ClassVar[bool] = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        refused = {
            "ALiBi slopes": alibi_slopes is not None,
            f"{AttentionType(attn_type).value} attention": attn_type != AttentionType.DECODER,
            "a KV cache shared between layers": kv_sharing_target_layer_name is not None,
        }
        for feature, present in refused.items():
            if present:
                raise ValueError(
                    f"--kv-cache-dtype {kv_cache_dtype} does not support {feature}, "
                    "which this model uses. Serve it with --kv-cache-dtype auto."
                )
        self.num_heads = num_heads
        self.head_size = head_size
        self.num_kv_heads = num_kv_heads
        self.scale = float(scale)
        self.format: Format = FORMATS[kv_cache_dtype]
        self.soft_cap = float(logits_soft_cap or 0.0)
        # A window of W tokens holds the row itself and the W - 1 before it.
        self.window_left = -1 if sliding_window is None else sliding_window - 1
        self.sinks = None if sinks is None else sinks.float()

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Encode keys and values [T, kv_heads, head_dim] into kv_cache [B, kv_heads, N, C]."""
        from vllm.turboquant import kernels  # the native library, which only CPU hosts load

        metadata = get_forward_context().attn_metadata[layer.layer_name]
        rows = metadata.positions.shape[0]
        kernels.store(
            self.format,
            self.constants,
            key[:rows],
            value[:rows],
            kv_cache,
            slot_mapping[:rows],
            metadata.positions,
        )

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TdsfMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend query [T, heads, head_dim] into output, same shape; keys are already stored."""
        if attn_metadata is None:  # the warm-up run has no cache yet
            return output
        from vllm.turboquant import kernels

        rows = attn_metadata.positions.shape[0]
        kernels.attend(
            self.format,
            self.constants,
            query[:rows],
            kv_cache,
            attn_metadata.block_table,
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            output[:rows],
            scale=self.scale,
            softcap=self.soft_cap,
            window_left=self.window_left,
            sinks=self.sinks,
        )
        return output


class TdsfCpuBackend(AttentionBackend):
    """What the formats share; one subclass per format tells vLLM the size of its pages."""

    format: ClassVar[Format]
    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.float32,
        torch.bfloat16,
        torch.float16,
    ]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(FORMATS)

    @classmethod
    def get_name(cls) -> str:
        return f"{cls.format.name}_cpu".upper()

    @staticmethod
    def get_impl_cls() -> type[TdsfImpl]:
        return TdsfImpl

    @staticmethod
    def get_builder_cls() -> type[TdsfMetadataBuilder]:
        return TdsfMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(HEAD_DIMS)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int | MultipleOf]:
        return [MultipleOf(BLOCK_MULTIPLE)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        if spec.head_size != spec.head_size_v:
            raise ValueError(
                f"--kv-cache-dtype {cls.format.name} needs keys and values of one head_dim; "
                f"this model has {spec.head_size} and {spec.head_size_v}."
            )
        size = cls.format.content_bytes(spec.head_size, spec.block_size)
        return replace(spec, state_content_bytes=size)


class TdsfK8V8Backend(TdsfCpuBackend):
    format = FORMATS["tdsf_k8v8"]


class TdsfK8V4Backend(TdsfCpuBackend):
    format = FORMATS["tdsf_k8v4"]


class TdsfK4V4Backend(TdsfCpuBackend):
    format = FORMATS["tdsf_k4v4"]


class TdsfK4V3Backend(TdsfCpuBackend):
    format = FORMATS["tdsf_k4v3"]


class TdsfK3V3Backend(TdsfCpuBackend):
    format = FORMATS["tdsf_k3v3"]

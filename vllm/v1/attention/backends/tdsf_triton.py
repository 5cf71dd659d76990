# SPDX-License-Identifier: Apache-2.0
"""CUDA attention over the TDSF cache, by Triton kernels: the CPU backend's formats, profiles and
semantics, the same bytes in the pages.

Prefill, decode and speculative decode run one kernel over the stored codes. No step waits for the
device, and launches depend on the shape of the batch alone, so uniform batches run as CUDA graphs.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm import envs
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.turboquant.constants import LayerConstants, uncalibrated
from vllm.turboquant.formats import BLOCK_MULTIPLE, FORMATS, Format
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionLayer,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.tdsf_cpu import (
    TdsfCpuBackend,
    TdsfImpl,
    TdsfMetadata,
    causal,
)
from vllm.v1.attention.ops.triton_tdsf_attend import (
    MOST_ROWS,
    attend,
    splits_for,
    tile_rows,
)
from vllm.v1.attention.ops.triton_tdsf_constants import DeviceConstants
from vllm.v1.attention.ops.triton_tdsf_store import store
from vllm.v1.kv_cache_interface import AttentionSpec

PREFERRED_BLOCK = 128
"""Tokens of a block where the user names none: the exact first token then costs least."""


@dataclass
class TdsfTritonMetadata(TdsfMetadata):
    """One step's batch; T counts the padding of a captured graph."""

    longest_query: int  # query rows of any request, at most
    splits: int  # parts that a sequence is cut into


class TdsfTritonBuilder(AttentionMetadataBuilder[TdsfTritonMetadata]):
    """Builds a step's metadata on the device and gives each layer its constants once.

    Uniform batches only: were mixed batches replayed as full graphs as well, the prompts that
    calibration runs would not meet its uncompressed attention.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = list(get_layers_from_vllm_config(vllm_config, Attention, layer_names).values())
        for layer in layers:
            impl = layer.impl
            constants = uncalibrated(impl.format, layer.num_kv_heads, layer.head_size)
            impl.on_device = DeviceConstants(impl.format, constants, device)
        # Decodes come first and are cut as such; with speculation their rows are more than one.
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self._prepare(
            most_tokens=max(
                vllm_config.scheduler_config.max_num_batched_tokens,
                vllm_config.compilation_config.max_cudagraph_capture_size or 0,
            ),
            heads=kv_cache_spec.num_kv_heads,
            group=max(layer.num_heads // layer.num_kv_heads for layer in layers),
            dim=layers[0].head_size,
            fmt=layers[0].impl.format,
            device=device,
        )

    def _prepare(
        self,
        most_tokens: int,
        heads: int,
        group: int,
        dim: int,
        fmt: Format,
        device: torch.device,
    ) -> None:
        self.heads, self.group, self.dim, self.format = heads, group, dim, fmt
        self.processors = (
            torch.cuda.get_device_properties(device).multi_processor_count
            if torch.device(device).type == "cuda"
            else 1
        )
        # A captured graph reads the positions of later steps from here.
        self.positions = torch.zeros(most_tokens, dtype=torch.int64, device=device)
        self.rows = torch.arange(most_tokens, dtype=torch.int32, device=device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TdsfTritonMetadata:
        batch = causal(common_attn_metadata)
        tokens, starts, lengths = batch.num_actual_tokens, batch.query_start_loc, batch.seq_lens
        # Row t of request r sits at seq_len - (starts[r + 1] - t); padding rows anywhere.
        request = torch.searchsorted(starts[1:], self.rows[:tokens], right=True, out_int32=True)
        request.clamp_(max=len(lengths) - 1)
        positions = self.positions[:tokens]
        positions.copy_(lengths[request] - starts[1:][request] + self.rows[:tokens])
        positions.clamp_(min=0)
        longest, splits = batch.max_query_len, 1
        if envs.VLLM_BATCH_INVARIANT:
            longest = max(longest, MOST_ROWS)  # one tile for every batch, too
        else:
            rows = tile_rows(self.group, longest, self.dim, self.format)
            tiles = max(tokens // (rows // self.group), batch.num_reqs)
            splits = splits_for(tiles, self.heads, self.processors)
        return TdsfTritonMetadata(
            *(starts, lengths, batch.block_table_tensor, positions, longest, splits)
        )


class TdsfTritonImpl(TdsfImpl):
    """Stores and attends for one layer, whose constants live on the device."""

    on_device: DeviceConstants
    serves_key_bias: ClassVar[bool] = False
    serves_strict: ClassVar[bool] = False

    @property
    def constants(self) -> DeviceConstants:
        return self.on_device

    @constants.setter
    def constants(self, constants: LayerConstants) -> None:
        """Replace the layer's constants in place: captured graphs keep their addresses."""
        self.on_device.fill(constants)

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Encode keys and values [T, kv_heads, head_dim] into kv_cache [B, kv_heads, N, C]."""
        positions = get_forward_context().attn_metadata[layer.layer_name].positions
        rows = len(positions)
        store(
            *(self.on_device, key[:rows], value[:rows], kv_cache, slot_mapping[:rows], positions)
        )

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TdsfTritonMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend query [T, heads, head_dim] into output, same shape; keys are already stored."""
        if attn_metadata is None:  # the warm-up run has no cache yet
            return output
        if self.sinks is not None and self.sinks.device != query.device:
            self.sinks = self.sinks.to(query.device)
        rows = len(attn_metadata.positions)
        attend(
            self.on_device,
            query[:rows],
            kv_cache,
            attn_metadata.block_table,
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            output[:rows],
            longest_query=attn_metadata.longest_query,
            scale=self.scale,
            splits=attn_metadata.splits,
            softcap=self.soft_cap,
            window_left=self.window_left,
            sinks=self.sinks,
        )
        return output


class TdsfTritonBackend(TdsfCpuBackend):
    """What the formats share on CUDA."""

    @classmethod
    def get_name(cls) -> str:
        return f"{cls.format.name}_triton".upper()

    @staticmethod
    def get_impl_cls() -> type[TdsfTritonImpl]:
        return TdsfTritonImpl

    @staticmethod
    def get_builder_cls() -> type[TdsfTritonBuilder]:
        return TdsfTritonBuilder

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return PREFERRED_BLOCK if default_block_size % BLOCK_MULTIPLE else default_block_size

    @classmethod
    def supports_compute_capability(cls, capability) -> bool:
        return capability.major >= 8


class TdsfK8V8Backend(TdsfTritonBackend):
    format = FORMATS["tdsf_k8v8"]


class TdsfK8V4Backend(TdsfTritonBackend):
    format = FORMATS["tdsf_k8v4"]


class TdsfK4V4Backend(TdsfTritonBackend):
    format = FORMATS["tdsf_k4v4"]


class TdsfK4V3Backend(TdsfTritonBackend):
    format = FORMATS["tdsf_k4v3"]


class TdsfK3V3Backend(TdsfTritonBackend):
    format = FORMATS["tdsf_k3v3"]

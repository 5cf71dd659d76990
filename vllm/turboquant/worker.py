# SPDX-License-Identifier: Apache-2.0
"""What calibration asks of every worker. The engine calls these with the worker as first argument
(`collective_rpc`); each rank sees its own kv heads.
"""

from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.turboquant.bias import Rope, wave_table, waves
from vllm.turboquant.constants import LayerConstants
from vllm.turboquant.fit import Moments, fit_layer, output_metric
from vllm.turboquant.formats import Format
from vllm.turboquant.plain import Gathered, PlainAttention, RoundTrip
from vllm.turboquant.threads import on_one_thread
from vllm.turboquant.uncompiled import uncompiled


@dataclass(frozen=True)
class Fitted:
    """One rank's share of a fit."""

    rank: int  # in its tensor parallel group
    layers: dict[str, LayerConstants]  # this rank's kv heads
    unweighted: list[str]  # layers whose output projection was not found


def layers_with_cache(worker) -> dict[str, tuple[str, Attention]]:
    """Path in the model and attention layer by layer name, for layers with a TDSF cache.

    Draft and MTP models are not part of it.
    """
    return {
        module.layer_name: (path, module)
        for path, module in worker.model_runner.get_model().named_modules()
        if isinstance(module, Attention)
        and isinstance(getattr(module.impl, "format", None), Format)
    }


def cached_layers(worker) -> list[str]:
    """Names of the layers that have a TDSF cache, in the model's order."""
    return list(layers_with_cache(worker))


def attend_plainly(
    worker,
    longest: int = 0,
    round_trip: RoundTrip | None = None,
    spared: Collection[str] = (),
) -> None:
    """Layers attend uncompressed keys and values from now on, in steps that are not compiled, until
    `attend_cached`.

    longest: gather moments for a fit, of sequences of up to so many tokens; 0: none.
    round_trip: what another cache would make of keys and values.
    spared: layers that go on using their cache.
    """
    _replay_graphs(worker, False)
    worker.tdsf_plain_steps = ExitStack()
    worker.tdsf_plain_steps.enter_context(
        uncompiled(worker.model_runner.get_model(), worker.vllm_config)
    )
    for name, (path, layer) in layers_with_cache(worker).items():
        gathered = None
        if longest:
            block = _block(worker, path)
            moments = Moments.zeros(layer.num_kv_heads, layer.head_size, longest)
            rope = _rope(worker, block, layer) if layer.impl.serves_key_bias else None
            gathered = Gathered(moments, rope, _key_bias(block, layer) if rope else None)
        if name not in spared:
            layer.impl = PlainAttention(layer.impl, gathered, round_trip)


def attend_cached(worker) -> None:
    """Undo `attend_plainly`."""
    _replay_graphs(worker, True)
    worker.tdsf_plain_steps.close()
    for _, layer in layers_with_cache(worker).values():
        if isinstance(layer.impl, PlainAttention):
            layer.impl = layer.impl.impl


def _replay_graphs(worker, wanted: bool) -> None:
    """Whether steps may replay captured CUDA graphs, where there are any; they hold the layers'
    cached attention."""
    dispatcher = getattr(worker.model_runner, "cudagraph_dispatcher", None)
    if dispatcher is not None and any(dispatcher.cudagraph_keys.values()):
        dispatcher.keys_initialized = wanted


def fit(worker, strict: bool = False) -> Fitted:
    """Constants from what the layers gathered since `attend_plainly`; strict: see `tdsf`."""
    layers, unweighted = {}, []
    for name, (path, layer) in layers_with_cache(worker).items():
        weight = _output_weight(_block(worker, path), layer)
        if weight is None:
            unweighted.append(name)
        layers[name] = on_one_thread(_fit_layer, layer, weight, strict)
    return Fitted(get_tensor_model_parallel_rank(), layers, unweighted)


def _fit_layer(layer: Attention, weight: torch.Tensor | None, strict: bool) -> LayerConstants:
    heads, dim = layer.num_kv_heads, layer.head_size
    if weight is None:
        metric = torch.eye(dim, dtype=torch.float64).expand(heads, -1, -1)
    else:
        metric = output_metric(weight, heads, dim)
    found = layer.impl.gathered
    return LayerConstants(
        **fit_layer(
            layer.impl.format, found.moments, metric, key_bias=found.key_bias, strict=strict
        )
    )


def install(worker, layers: dict[str, LayerConstants]) -> list[str]:
    """Give layers their constants, all kv heads of the model; this rank takes its own.

    Returns the layers that have a TDSF cache and no constants here. Raises ValueError, before
    anything is changed, where the constants do not fit the model.
    """
    ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
    chosen, missing, tables = [], [], {}
    for name, (path, layer) in layers_with_cache(worker).items():
        if name not in layers:
            missing.append(name)
            continue
        heads, dim = layers[name].key_center.shape
        if dim != layer.head_size or max(heads // ranks, 1) != layer.num_kv_heads:
            raise ValueError(
                f"The TDSF profile has {heads} kv heads of dimension {dim} for {name}; the model "
                f"has {layer.num_kv_heads} of dimension {layer.head_size} on each of {ranks} ranks."
            )
        # With more ranks than heads, consecutive ranks share one.
        first = rank * heads // ranks
        constants = layers[name].heads(first, layer.num_kv_heads)
        if not layer.impl.serves_strict and (constants.scale_step == 0).any():
            raise ValueError("Strict TDSF is served on CPUs only.")
        if layers[name].key_bias.any():
            rope = _rope(worker, _block(worker, path), layer)
            if rope is None or not layer.impl.serves_key_bias:
                raise ValueError(
                    f"The TDSF profile takes a key bias out of {name}. That takes a CPU, and keys "
                    "that RoPE turns by token positions. Fit the model again, here."
                )
            # Layers that share a rotation share the table.
            longest = worker.model_runner.max_model_len
            key = rope.cos_sin.data_ptr()
            table = tables.setdefault(key, None)
            if table is None:
                table = tables[key] = wave_table(rope, longest)
            constants = replace(constants, waves=waves(rope, constants.key_bias, table))
        chosen.append((layer.impl, constants))
    for impl, constants in chosen:
        impl.constants = constants
    return missing


def _block(worker, path: str) -> torch.nn.Module:
    """The attention block that the layer at `path` is part of."""
    return worker.model_runner.get_model().get_submodule(path.rpartition(".")[0])


def _key_bias(block: torch.nn.Module, layer: Attention) -> torch.Tensor | None:
    """Bias of the block's key projection: float32 [H, D] of this rank's kv heads, None: none."""
    for linear in block.modules():
        if isinstance(linear, QKVParallelLinear) and linear.bias is not None:
            start = layer.num_heads * layer.head_size
            bias = linear.bias.detach().float().cpu()[start:]
            return bias[: layer.num_kv_heads * layer.head_size].view(-1, layer.head_size).clone()
    return None


def _rope(worker, block: torch.nn.Module, layer: Attention) -> Rope | None:
    """How the block turns its keys; None where not by the token's index in the sequence."""
    for module in block.modules():
        # A subclass that scales angles keeps this method; one whose positions are something else
        # (image coordinates, chunks) has its own.
        if (
            isinstance(module, RotaryEmbedding)
            and type(module).forward_native is RotaryEmbedding.forward_native
            and module.head_size == layer.head_size
            and not worker.model_config.uses_mrope
        ):
            return Rope(module.cos_sin_cache, module.is_neox_style)
    return None


def _output_weight(block: torch.nn.Module, layer: Attention) -> torch.Tensor | None:
    """Weight of the block's output projection, [hidden, Hq * D] of this rank's query heads.

    None where the block has no such projection of its own, or several. The weight is read by
    multiplying the unit matrix, since packed and quantised layers keep none to look at.
    """
    width = layer.num_heads * layer.head_size
    found = [
        module
        for module in block.modules()
        if isinstance(module, RowParallelLinear) and module.input_size_per_partition == width
    ]
    if len(found) != 1:
        return None
    (linear,) = found
    weight = next(linear.parameters(), torch.empty(0))
    unit = torch.eye(width, dtype=layer.dtype, device=weight.device)
    with torch.inference_mode():
        return linear.quant_method.apply(linear, unit, None).mT

# SPDX-License-Identifier: Apache-2.0
"""What our patches ask on CPU hosts: attention backend, dtype, processes, idle cores, warm-up."""

import multiprocessing
import os
import sys

import torch

from vllm.turboquant.formats import is_tdsf
from vllm.turboquant.selection import backend_path

_SMALL_HOST = 4
"""Up to this many CPUs every one computes; above, upstream's reserved core stays idle."""

_WARM_UP_TOKENS = 256
"""Enough that compiled loops are seen to be worth sharing between threads."""


def attention_backend(config) -> str | None:
    """Path of our backend class where `--kv-cache-dtype` names a TDSF format, else None.

    config: upstream's AttentionSelectorConfig, the layer's demands.
    Raises ValueError naming every demand the backend does not meet.
    """
    if not is_tdsf(config.kv_cache_dtype):
        return None
    from vllm.v1.attention.backends import tdsf_cpu

    return backend_path(tdsf_cpu, config, "CPU")


def has_fast_bf16() -> bool:
    """Whether this host multiplies bf16 matrices in hardware (AVX-512 BF16, AMX, Arm BF16)."""
    if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return True
    return bool(torch.cpu.get_capabilities().get("bf16", False))


def resolve_dtype(hf_config, dtype: torch.dtype) -> torch.dtype:
    """The dtype that `--dtype auto` should mean on this host.

    bf16 and fp16 without hardware support are so slow that a prefill of 8 x 1,024 tokens passes
    the executor's 300 s limit and ends the engine. float32 is exact for such checkpoints and
    several times faster. Of the models with linear attention, those around whose bf16 operator
    our series converts (Qwen3-Next, Qwen3.5, Qwen3.6) do so too; others keep their dtype.
    """
    from vllm.logger import init_logger
    from vllm.platforms import current_platform

    if dtype == torch.float32 or not current_platform.is_cpu() or has_fast_bf16():
        return dtype
    text = hf_config.get_text_config()
    linear = "linear_attention" in (getattr(text, "layer_types", None) or ())
    if linear and not text.model_type.startswith(("qwen3_next", "qwen3_5")):
        return dtype
    init_logger(__name__).info_once(
        "This CPU has no %s arithmetic in hardware: --dtype auto chooses float32, which is exact "
        "and faster here. Pass --dtype %s to keep it.",
        *(2 * (str(dtype).removeprefix("torch."),)),
    )
    return torch.float32


def engine_context(context, config):
    """How the process of the engine is made: `context`, or by fork where that is safe.

    A fork saves the import of all of vLLM. Workers must not be forked, since OpenMP reads its
    settings when it is loaded.
    """
    from vllm.platforms import current_platform
    from vllm.utils.system_utils import is_in_ray_actor

    if not current_platform.is_cpu() or sys.platform != "linux":
        return context
    if config.parallel_config.numa_bind or is_in_ray_actor():
        return context
    return multiprocessing.get_context("fork")


def compute_alone() -> None:
    """Called first in the engine's process: no parallel regions, whose threads a fork loses."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        torch.set_num_threads(1)


def reserved_cores(upstream_default: int) -> int:
    """How many cores the workers leave idle for the scheduler process."""
    return 0 if len(os.sched_getaffinity(0)) <= _SMALL_HOST else upstream_default


def warm_up(runner) -> None:
    """Compile the model of a CPU model runner by running it once.

    How much memory --max-num-batched-tokens tokens take decides nothing where the size of the
    cache is given; then a few do.
    """
    most = runner.max_num_tokens
    if runner.cache_config.kv_cache_memory_bytes is not None:
        runner.max_num_tokens = min(most, _WARM_UP_TOKENS)
    try:
        runner.profile_run()
    finally:
        runner.max_num_tokens = most

# SPDX-License-Identifier: Apache-2.0
"""What our patches decide about CPU hosts."""

import multiprocessing
import types

import pytest
import torch
from transformers import PretrainedConfig, Qwen3_5TextConfig

from vllm.turboquant import cpu
from vllm.utils import ompmultiprocessing

LLAMA = PretrainedConfig()
HYBRID = PretrainedConfig(layer_types=["linear_attention", "full_attention"])
QWEN_HYBRID = Qwen3_5TextConfig()


@pytest.mark.parametrize(
    "fast,config,dtype,wanted",
    [
        (False, LLAMA, torch.bfloat16, torch.float32),
        (False, LLAMA, torch.float16, torch.float32),
        (False, LLAMA, torch.float32, torch.float32),
        (False, HYBRID, torch.bfloat16, torch.bfloat16),
        (False, QWEN_HYBRID, torch.bfloat16, torch.float32),
        (True, QWEN_HYBRID, torch.bfloat16, torch.bfloat16),
        (True, LLAMA, torch.bfloat16, torch.bfloat16),
        (True, LLAMA, torch.float16, torch.float16),
    ],
)
def test_auto_dtype(monkeypatch, fast, config, dtype, wanted):
    monkeypatch.setattr(cpu, "has_fast_bf16", lambda: fast)
    assert cpu.resolve_dtype(config, dtype) is wanted


def test_the_patched_engine_asks(monkeypatch, tmp_path):
    """`--dtype auto` and `--dtype bfloat16` through upstream's own resolution."""
    from transformers import LlamaConfig

    from vllm.config.model import _get_and_verify_dtype

    monkeypatch.setattr(cpu, "has_fast_bf16", lambda: False)
    config = LlamaConfig(dtype="bfloat16")

    def resolve(dtype):
        return _get_and_verify_dtype(str(tmp_path), config, dtype, is_pooling_model=False)

    assert resolve("auto") is torch.float32
    assert resolve("bfloat16") is torch.bfloat16


@pytest.mark.parametrize("cpus,reserved", [(1, 0), (2, 0), (4, 0), (8, 1)])
def test_small_hosts_reserve_no_core(monkeypatch, cpus, reserved):
    monkeypatch.setattr(cpu.os, "sched_getaffinity", lambda _: set(range(cpus)))
    assert cpu.reserved_cores(1) == reserved


def test_the_patched_engine_binds_every_core_of_a_small_host(monkeypatch):
    parallel = types.SimpleNamespace(
        local_world_size=1, data_parallel_rank_local=0, _api_process_count=1
    )
    config = types.SimpleNamespace(parallel_config=parallel, kv_transfer_config=None)
    cores = [
        types.SimpleNamespace(id=i, physical_core=i, numa_node=0) for i in range(2)
    ]
    resources = ompmultiprocessing.cr_utils
    monkeypatch.setattr(resources, "get_visible_memory_node", lambda: [0])
    monkeypatch.setattr(resources, "get_allowed_cpu_list", lambda: cores)
    monkeypatch.setattr(cpu.os, "sched_getaffinity", lambda _: {0, 1})
    manager = ompmultiprocessing.OMPProcessManager(config)
    assert manager.cpu_lists == [[0, 1]]
    assert manager.reserved_cpu_list == []


@pytest.mark.parametrize(
    "bind,in_ray,method",
    [(False, False, "fork"), (True, False, "spawn"), (False, True, "spawn")],
)
def test_the_process_of_the_engine_is_forked_where_that_is_safe(monkeypatch, bind, in_ray, method):
    monkeypatch.setattr("vllm.utils.system_utils.is_in_ray_actor", lambda: in_ray)
    config = types.SimpleNamespace(parallel_config=types.SimpleNamespace(numa_bind=bind))
    context = multiprocessing.get_context("spawn")
    assert cpu.engine_context(context, config).get_start_method() == method


@pytest.mark.parametrize("given,tokens", [(None, 2048), (1 << 30, 256)])
def test_a_cache_of_given_size_asks_for_a_short_warm_up(given, tokens):
    """Through upstream's own start, on a runner that only counts."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    class Runner:
        max_num_tokens = 2048
        cache_config = types.SimpleNamespace(kv_cache_memory_bytes=given)
        vllm_config = types.SimpleNamespace(
            compilation_config=types.SimpleNamespace(mode=1, inductor_compile_config={})
        )
        ran = []

        def profile_run(self):
            self.ran.append(self.max_num_tokens)

    runner = Runner()
    CPUModelRunner.warming_up_model(runner)
    assert runner.ran[-1] == tokens and runner.max_num_tokens == 2048

# SPDX-License-Identifier: Apache-2.0
"""Calibration with tensor parallelism and with LoRA, on a tiny model with random weights."""

import functools
import shutil
from pathlib import Path

import pytest
import torch

from tests.engine import default_model
from vllm.engine.arg_utils import EngineArgs
from vllm.turboquant import profile, registry, worker
from vllm.turboquant.calibrate import _join
from vllm.turboquant.constants import PER_HEAD, LayerConstants, uncalibrated
from vllm.turboquant.engine import engine_core
from vllm.turboquant.formats import FORMATS
from vllm.turboquant.identity import identify

FMT = FORMATS["tdsf_k4v4"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(default_model()) / name, folder / name)
    return str(folder)


def start(model: str, mode: str, **options):
    args = EngineArgs(
        model=model,
        kv_cache_dtype=FMT.name,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        kv_cache_memory_bytes=1 << 26,
        **options,
    )
    return engine_core(args, mode)


def fitted(model: str, cache: Path, **options) -> profile.Profile:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_TQ_CACHE", str(cache))
        with start(model, "auto", **options):
            return profile.read(registry.cached_path(identify(Path(model)), FMT))


@pytest.fixture(scope="module")
def alone(tiny, tmp_path_factory):
    cache = tmp_path_factory.mktemp("alone")
    return cache, fitted(tiny, cache)


def test_two_ranks_fit_what_one_fits(tiny, alone, tmp_path, monkeypatch):
    """Within rounding; bases may turn where they may, what they make of a vector's length may not."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    one, two = alone[1], fitted(tiny, tmp_path, tensor_parallel_size=2)
    assert list(one.layers) == list(two.layers)
    for name, a in one.layers.items():
        b = two.layers[name]
        assert a.key_center.shape == (2, 32) == b.key_center.shape
        for x, y in (
            (a.key_center, b.key_center),
            (a.tdsf, b.tdsf),
            (a.key_in.mT @ a.key_in, b.key_in.mT @ b.key_in),
            (a.value_in.mT @ a.value_in, b.value_in.mT @ b.value_in),
        ):
            assert (x - y).norm() < 1e-3 * x.norm()
    assert two.quality["kl"] == pytest.approx(one.quality["kl"], rel=0.2)


def test_heads_that_ranks_share_are_taken_once():
    def share(mark: float) -> LayerConstants:
        c = uncalibrated(FMT, 1, 32)
        values = {name: getattr(c, name) for name in PER_HEAD} | {"scale_step": c.scale_step}
        return LayerConstants(**values | {"key_center": torch.full((1, 32), mark)})

    class Config:
        @staticmethod
        def get_total_num_kv_heads() -> int:
            return 2

    parts = [worker.Fitted(rank, {"a": share(rank // 2)}, []) for rank in (3, 0, 2, 1)]
    joined = _join(parts, "a", Config)
    assert joined.key_center[:, 0].tolist() == [0.0, 1.0]


def constants(worker_, layers: list[str]) -> list[torch.Tensor]:
    from vllm.turboquant.worker import layers_with_cache

    return [layers_with_cache(worker_)[name][1].impl.constants.key_in for name in layers]


def test_an_engine_with_lora_has_the_profile_of_its_base_model(tiny, alone, monkeypatch):
    cache, own = alone
    monkeypatch.setenv("VLLM_TQ_CACHE", str(cache))
    with start(tiny, "require", enable_lora=True, max_lora_rank=8) as core:
        found = core.collective_rpc(functools.partial(constants, layers=list(own.layers)))[0]
    for got, c in zip(found, own.layers.values()):
        assert torch.equal(got, c.key_in)

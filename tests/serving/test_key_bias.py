# SPDX-License-Identifier: Apache-2.0
"""A key bias as Qwen2 has it, planted in the default model, which has none.

In the lowest RoPE frequencies the model goes on working, and its answers are judged. In the others
the bias changes what the model says, so the scores of its attention are judged instead.
"""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine import default_model
from tools.bench.quality import evaluation_text
from vllm.engine.arg_utils import EngineArgs
from vllm.turboquant import fit, kernels, reference
from vllm.turboquant.bias import Rope, wave_table, waves
from vllm.turboquant.calibrate import BUILT_IN_TEXT, calibrate
from vllm.turboquant.constants import LayerConstants, uncalibrated
from vllm.turboquant.engine import engine_core
from vllm.turboquant.evaluate import sample
from vllm.turboquant.formats import FORMATS
from vllm.turboquant.plain import Gathered
from vllm.turboquant.quality import measure

FMT = FORMATS["tdsf_k4v4"]
LAYERS, HEADS, DIM, THETA = 30, 3, 64, 100_000.0
LENGTH = 512


def planted(pairs: range, norm: float) -> torch.Tensor:
    """float32 [H, D] of this norm per head, in these pairs of coordinates."""
    g = torch.Generator().manual_seed(1)
    bias = torch.zeros(HEADS, 2, DIM // 2)
    bias[..., pairs] = torch.randn(HEADS, 2, len(pairs), generator=g)
    return bias.flatten(1) * (norm / bias.flatten(1).norm(dim=1, keepdim=True))


def biased_model(folder, norm: float) -> str:
    """The default model as a Qwen2 model whose keys have a bias in their lowest frequency."""
    for file in Path(default_model()).iterdir():
        if file.suffix == ".safetensors":
            tensors = load_file(file)
            for layer in range(LAYERS):
                attention = f"model.layers.{layer}.self_attn"
                for name, size in (("q", 9 * DIM), ("k", HEADS * DIM), ("v", HEADS * DIM)):
                    tensors[f"{attention}.{name}_proj.bias"] = torch.zeros(size).bfloat16()
                bias = planted(range(DIM // 2 - 1, DIM // 2), norm).flatten().bfloat16()
                tensors[f"{attention}.k_proj.bias"] = bias
            save_file(tensors, folder / file.name, {"format": "pt"})
        elif file.name == "config.json":
            config = json.loads(file.read_text())
            config |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
            config |= {"use_sliding_window": False}
            (folder / file.name).write_text(json.dumps(config))
        elif file.is_file():
            (folder / file.name).symlink_to(file)
    return str(folder)


def losses(model: str) -> dict[str, float]:
    """KL of the plain format and of the calibrated one; perplexity of the model itself."""
    args = EngineArgs(
        model=model,
        kv_cache_dtype=FMT.name,
        enforce_eager=True,
        dtype="float32",
        max_model_len=1024,
        kv_cache_memory_bytes=1 << 28,
    )
    with engine_core(args, "later") as core:
        prompts = sample(core, evaluation_text()[:20_000], 1, LENGTH)
        own = measure(core, "auto", prompts).perplexity
        plain = measure(core, FMT.name, prompts).kl
        calibrate(core, BUILT_IN_TEXT.read_text(encoding="utf-8"))
        return {"perplexity": own, "plain": plain, "ours": measure(core, FMT.name, prompts).kl}


@pytest.fixture(scope="module")
def unbiased(tmp_path_factory):
    return losses(biased_model(tmp_path_factory.mktemp("model"), 0.0001))


@pytest.mark.parametrize("norm", [100.0, pytest.param(600.0, marks=pytest.mark.long)])
def test_a_bias_in_low_frequencies_costs_nothing(unbiased, tmp_path, norm):
    found = losses(biased_model(tmp_path, norm))
    print(f"key bias of norm {norm:g}: {found}; without: {unbiased}")
    assert found["ours"] < 1.3 * unbiased["ours"]
    assert found["plain"] > 20 * found["ours"]
    if norm == 100.0:
        assert found["perplexity"] == pytest.approx(unbiased["perplexity"], rel=0.1)


@pytest.fixture(scope="module")
def projected():
    """Queries [T, 9, D] and keys [T, 3, D] before RoPE of some layers, on two texts."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(default_model(), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(default_model())
    kept: dict[tuple[int, str], list[torch.Tensor]] = {}
    chosen = (0, 12, 27)
    for index in chosen:
        attention = model.model.layers[index].self_attn
        for name in ("q_proj", "k_proj"):
            place = kept.setdefault((index, name), [])
            getattr(attention, name).register_forward_hook(
                lambda _, __, output, place=place: place.append(output[0])
            )
    model.model.layers = model.model.layers[: max(chosen) + 1]
    texts = BUILT_IN_TEXT.read_text(encoding="utf-8"), evaluation_text()[20_000:40_000]
    with torch.no_grad():
        for text in texts:
            model.model(torch.tensor([tokenizer.encode(text)[:LENGTH]]), use_cache=False)
    return [
        [
            (q.unflatten(1, (-1, DIM)), k.unflatten(1, (-1, DIM)))
            for q, k in zip(kept[i, "q_proj"], kept[i, "k_proj"])
        ]
        for i in chosen
    ]


def rope() -> Rope:
    angle = torch.arange(LENGTH)[:, None] / THETA ** (torch.arange(0, DIM, 2) / DIM)
    return Rope(torch.cat([angle.cos(), angle.sin()], -1), neox=True)


def turned(x: torch.Tensor) -> torch.Tensor:
    """x [T, H, D], turned by position."""
    cos, sin = rope().cos_sin.chunk(2, -1)
    first, second = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def score_error(texts, bias: torch.Tensor, calibrated: bool) -> float:
    """RMS error of one layer's scores on the second text, fitted on the first."""
    (q0, k0), (q, k) = [(turned(q), turned(k + bias)) for q, k in texts]
    at = torch.arange(LENGTH)
    c = uncalibrated(FMT, HEADS, DIM)
    if calibrated:
        found = Gathered(fit.Moments.zeros(HEADS, DIM, LENGTH), rope(), bias)
        found.add(q0, k0, k0, at)
        metric = torch.eye(DIM).double().expand(HEADS, -1, -1)
        fitted = fit.fit_layer(FMT, found.moments, metric, key_bias=found.key_bias)
        c = LayerConstants(**fitted)
        c = dataclasses.replace(c, waves=waves(rope(), c.key_bias, wave_table(rope(), LENGTH)))
    size = FMT.content_bytes(DIM, LENGTH)
    cache = torch.zeros(1, HEADS, LENGTH, size, dtype=torch.uint8)
    kernels.store(FMT, c, k, torch.zeros_like(k), cache, at, at)
    z, _ = reference.read(FMT, c, cache, [0], LENGTH)
    back = torch.einsum("hji,thj->thi", c.query_in.double(), z) + c.key_center
    if c.waves is not None:
        back = back + c.waves.at(at)
    error = torch.einsum("rhgd,thd->hgrt", q.double().unflatten(1, (HEADS, -1)), back - k)
    seen = torch.ones(LENGTH, LENGTH).tril().bool()
    return float(error[..., seen].square().mean().sqrt()) * DIM**-0.5


@pytest.mark.parametrize("norm", [100.0, pytest.param(600.0, marks=pytest.mark.long)])
@pytest.mark.parametrize("pairs", [range(12, 16), range(32)], ids=["middle", "all"])
def test_scores_are_as_exact_with_a_bias_in_other_frequencies(projected, pairs, norm):
    bias = planted(pairs, norm)
    for texts in projected:
        without = score_error(texts, torch.zeros(HEADS, DIM), True)
        ours = score_error(texts, bias, True)
        plain = score_error(texts, bias, False)
        print(f"RMS error of scores: {without:.3f} without bias, {ours:.3f} with, plain {plain:.3f}")
        assert ours < 1.2 * without
        assert plain > 3 * ours

# SPDX-License-Identifier: Apache-2.0
"""The tiny Qwen models: the same from the same seed, of their families' shapes, with a tokenizer."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from tools.models import catalog, qwen_shapes, seeded

FAMILIES = ("tiny-qwen2", "tiny-qwen3", "tiny-qwen3-moe", "tiny-qwen3.5")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request):
    return catalog.make(request.param)


def test_the_configuration_is_read_as_written(folder):
    written = json.loads((folder / "config.json").read_text())
    written = written.get("text_config", written)
    read = AutoConfig.from_pretrained(folder).get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads", "hidden_size", "layer_types"):
        assert name not in written or getattr(read, name) == written[name]
    assert read.rope_parameters.items() >= written["rope_parameters"].items()


def test_weights_are_bf16_numbers_that_nothing_left_at_zero(folder):
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        assert weight.dtype == torch.bfloat16, name
        assert weight.isfinite().all() and weight.float().std() > 0, name


@pytest.mark.parametrize("text", ["plain words", "1 + 1 = 2\n\t", "你好，世界", "naïve 😀 \x00"])
def test_text_is_its_bytes(folder, text):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_marks_are_one_token_each(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert len(tokenizer.encode(text)) == len("user\nHi\nassistant\n") + 3


def test_the_seed_decides_every_weight(tmp_path):
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for path, seed in zip(folders, (1, 1, 2)):
        path.mkdir()
        seeded.seeded(qwen_shapes.QWEN3, seed)(None, path)
    first, again, other = (load_file(path / "model.safetensors") for path in folders)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_qwen2_keys_are_biased_in_their_slowest_pairs():
    """The bias on which low-bit caches of Qwen2.5 collapse: ggml-org/llama.cpp#21385."""
    weights = load_file(catalog.make("tiny-qwen2") / "model.safetensors")
    bias = weights["model.layers.0.self_attn.k_proj.bias"].float().view(2, 2, 32)
    slow, fast = bias[:, :, -seeded.SLOW_PAIRS :], bias[:, :, : -seeded.SLOW_PAIRS]
    assert slow.norm(dim=(1, 2)) == pytest.approx([seeded.KEY_BIAS_NORM] * 2, rel=0.01)
    assert fast.abs().max() < 1


def test_the_hybrid_has_three_gated_delta_nets_to_one_attention():
    weights = load_file(catalog.make("tiny-qwen3.5") / "model.safetensors")
    kinds = [
        "attention" if any(f"layers.{i}.self_attn" in name for name in weights) else "delta net"
        for i in range(8)
    ]
    assert kinds == (["delta net"] * 3 + ["attention"]) * 2

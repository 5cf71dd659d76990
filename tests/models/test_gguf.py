# SPDX-License-Identifier: Apache-2.0
"""GGUF -> Hugging Face folder, on a llama small enough to write here."""

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.models import from_gguf, gguf_tokenizer

HIDDEN, HEADS, KV_HEADS, DIM, FFN = 64, 4, 2, 16, 96
BYTES = "".join(gguf_tokenizer.pre_tokenizers.ByteLevel.alphabet())
TOKENS = ["<|start|>", "<|end|>", *sorted(BYTES), "he", "ll", "hell", "hello", "Ġ1", "12"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ 1", "1 2"]


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """The row order in which llama.cpp keeps q and k: halves of a head apart -> pairs."""
    result = np.empty_like(rows)
    dim = rows.shape[0] // heads
    for head in range(heads):
        for j in range(dim // 2):
            result[head * dim + 2 * j] = rows[head * dim + j]
            result[head * dim + 2 * j + 1] = rows[head * dim + dim // 2 + j]
    return result


@pytest.fixture(scope="module")
def weights():
    rng = np.random.default_rng(0)
    shapes = {
        "model.embed_tokens": (len(TOKENS), HIDDEN),
        "model.layers.0.input_layernorm": (HIDDEN,),
        "model.layers.0.self_attn.q_proj": (HEADS * DIM, HIDDEN),
        "model.layers.0.self_attn.k_proj": (KV_HEADS * DIM, HIDDEN),
        "model.layers.0.self_attn.v_proj": (KV_HEADS * DIM, HIDDEN),
        "model.layers.0.self_attn.o_proj": (HIDDEN, HEADS * DIM),
        "model.layers.0.post_attention_layernorm": (HIDDEN,),
        "model.layers.0.mlp.gate_proj": (FFN, HIDDEN),
        "model.layers.0.mlp.up_proj": (FFN, HIDDEN),
        "model.layers.0.mlp.down_proj": (HIDDEN, FFN),
        "model.norm": (HIDDEN,),
    }
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write(path, weights, pre="smollm", architecture="llama"):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(1)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}")
    names = {ours: theirs for theirs, ours in from_gguf.TOP.items()}
    names |= {f"model.layers.0.{ours}": f"blk.0.{t}" for t, ours in from_gguf.PER_LAYER.items()}
    for name, value in weights.items():
        if "q_proj" in name or "k_proj" in name:
            value = interleave(value, HEADS if "q_proj" in name else KV_HEADS)
        if "down_proj" in name:
            quantised = gguf.quants.quantize(value, gguf.GGMLQuantizationType.Q4_1)
            writer.add_tensor(
                f"{names[name]}.weight", quantised, raw_dtype=gguf.GGMLQuantizationType.Q4_1
            )
        else:
            writer.add_tensor(f"{names[name]}.weight", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def folder(weights, tmp_path_factory):
    root = tmp_path_factory.mktemp("gguf")
    from_gguf.convert(write(root / "tiny.gguf", weights), root)
    return root


def test_weights_are_the_originals_rounded_once(weights, folder):
    converted = load_file(folder / "model.safetensors")
    assert converted.keys() == {f"{name}.weight" for name in weights}
    for name, value in weights.items():
        found = converted[f"{name}.weight"]
        assert found.dtype == torch.bfloat16
        if "down_proj" in name:  # 4 bits: within half a step of a block of 32
            blocks = torch.from_numpy(value).view(HIDDEN, -1, 32)
            step = (blocks.amax(-1) - blocks.amin(-1)) / 15
            error = (found.float().view_as(blocks) - blocks).abs().amax(-1)
            assert (error <= 0.55 * step + 0.02).all()
        else:
            assert torch.equal(found, torch.from_numpy(value).bfloat16()), name


def test_transformers_loads_every_weight_and_runs(folder):
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.config.head_dim == DIM and model.config.rms_norm_eps == 1e-5
    assert model.config.rope_parameters["rope_theta"] == 10000.0
    assert model(torch.tensor([[2, 3, 4]])).logits.shape == (1, 3, len(TOKENS))


def test_the_tokenizer_merges_splits_digits_and_knows_control_tokens(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("<|start|>hello 12")["input_ids"])
    # "Ġ 1" and "1 2" never merge: each digit stands alone before merging starts
    assert tokens == ["<|start|>", "hello", "Ġ", "1", "2"]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|start|>", "<|end|>")
    assert tokenizer.apply_chat_template([{"content": "hello"}], tokenize=False) == (
        "<|start|>hello<|end|>"
    )


def test_generation_stops_at_the_end_token(folder):
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 1


def test_what_is_not_understood_is_refused(weights, tmp_path):
    with pytest.raises(ValueError, match="no rule for the tokenizer 'gpt2' .* 'other'"):
        from_gguf.convert(write(tmp_path / "a.gguf", weights, pre="other"), tmp_path)
    with pytest.raises(ValueError, match="is qwen2, not llama"):
        from_gguf.convert(write(tmp_path / "b.gguf", weights, architecture="qwen2"), tmp_path)

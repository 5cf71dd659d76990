# SPDX-License-Identifier: Apache-2.0
"""A llama model in GGUF becomes a Hugging Face folder with bfloat16 weights.

The blocks are dequantised in float32 and rounded to bfloat16 once. llama.cpp stores
the rows of q_proj and k_proj with each head's two rotary halves interleaved; they are
put back here.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file

from tools.models import gguf_tokenizer

TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(source: Path, folder: Path) -> None:
    """Write config, weights, tokenizer and generation settings of `source` to `folder`."""
    reader = GGUFReader(source)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    if metadata["general.architecture"] != "llama":
        raise ValueError(f"{source.name} is {metadata['general.architecture']}, not llama")
    weights = dict(_weights(reader, metadata))
    config = _config(metadata) | {"tie_word_embeddings": "lm_head.weight" not in weights}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    _write_json(folder / "generation_config.json", {key: config[key] for key in special})
    gguf_tokenizer.save(metadata, folder)


def unpermute(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's row order: [heads * dim, in], pairs side by side -> halves apart."""
    dim = rows.shape[0] // heads
    return rows.view(heads, dim // 2, 2, -1).transpose(1, 2).reshape(rows.shape)


def _weights(reader: GGUFReader, metadata: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    heads = {
        "attn_q": metadata["llama.attention.head_count"],
        "attn_k": metadata["llama.attention.head_count_kv"],
    }
    for tensor in reader.tensors:
        stem, suffix = tensor.name.rsplit(".", 1)
        value = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if stem.startswith("blk."):
            _, layer, part = stem.split(".")
            if part in heads:
                value = unpermute(value, heads[part])
            name = f"model.layers.{layer}.{PER_LAYER[part]}"
        else:
            name = TOP[stem]
        yield f"{name}.{suffix}", value.to(torch.bfloat16).contiguous()


def _config(metadata: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata["llama.rope.dimension_count"],
        "max_position_embeddings": metadata["llama.context_length"],
        # float32 in the file: nine digits give back what its author wrote
        "rms_norm_eps": float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": metadata["llama.rope.freq_base"],
        "vocab_size": metadata["llama.vocab_size"],
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "dtype": "bfloat16",
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")

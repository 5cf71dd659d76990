# SPDX-License-Identifier: Apache-2.0
"""A model of the Qwen3 architecture, built by hand, whose tokens ask for a distance.

One layer. The token at position i with distance d attends position i - d and nothing else, and the
model's next token is the one that stands there. Keys hold their position only, as RoPE turns it, so
an answer shows an error of a single position, at whatever distance.

Text tokens ask for short distances, `short_distance`; a question token asks for the distance it was
made with. The tokenizer is that of qwen3-recall.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from tools.models.recall import tokenizer

HEAD_DIM = 64
QUERY_HEADS = 2
ASK, HERE, CODE = slice(0, 64), 64, slice(128, 192)  # what the hidden coordinates hold
HIDDEN = 192
SHARPNESS = 256.0
"""Score of the token asked for; its neighbours score at least 0.09 of it less."""


def short_distance(token: int) -> int:
    """What a text token asks for: 1 to 61 tokens back."""
    return token % 61 + 1


def question(index: int) -> int:
    """Id of the token made for the distance of this index."""
    return len(tokenizer.TOKENS) + index


def build(folder: Path, distances: list[int], rope: dict[str, Any], longest: int) -> None:
    """Write the model to `folder`. distances: of the question tokens; rope: `rope_parameters`;
    longest: tokens of a sequence."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": len(tokenizer.TOKENS) + len(distances),
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": QUERY_HEADS,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": rope,
        "max_position_embeddings": longest,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    frequency = Qwen3RotaryEmbedding(Qwen3Config(**config)).inv_freq.double()
    save_file(_weights(distances, frequency), folder / "model.safetensors", {"format": "pt"})
    tokenizer.save(folder, longest)


def _weights(distances: list[int], frequency: torch.Tensor) -> dict[str, torch.Tensor]:
    text = len(tokenizer.TOKENS)
    asked = torch.tensor([*map(short_distance, range(text)), *distances])
    generator = torch.Generator().manual_seed(0)
    code = torch.randint(2, (len(asked), HEAD_DIM), generator=generator) * 2.0 - 1
    # The fast pairs weigh more: they tell neighbours apart.
    share = torch.tensor([6.0, 4.0, 3.0, 2.0] + [1.0] * 28, dtype=torch.float64).sqrt()
    angle = asked[:, None] * frequency
    embedding = torch.zeros(len(asked), HIDDEN, dtype=torch.float64)
    embedding[:, ASK] = torch.cat([share * angle.cos(), -share * angle.sin()], dim=1)
    embedding[:, HERE] = 1.0
    embedding[:, CODE] = code.double()

    def read(place: slice) -> torch.Tensor:
        rows = torch.zeros(HEAD_DIM, HIDDEN)
        rows[:, place] = torch.eye(HEAD_DIM)
        return rows

    key = torch.zeros(HEAD_DIM, HIDDEN)
    key[: len(share), HERE] = share.float()
    head = torch.zeros(len(asked), HIDDEN)
    head[:, CODE] = 0.4 * code
    gain = torch.full((HEAD_DIM,), (SHARPNESS / HEAD_DIM**0.5) ** 0.5)
    layer = {
        "input_layernorm": torch.ones(HIDDEN),
        "post_attention_layernorm": torch.ones(HIDDEN),
        "self_attn.q_norm": gain,
        "self_attn.k_norm": gain,
        "self_attn.q_proj": read(ASK).repeat(QUERY_HEADS, 1),
        "self_attn.k_proj": key,
        "self_attn.v_proj": read(CODE),
        "self_attn.o_proj": 4.0 / QUERY_HEADS * read(CODE).T.repeat(1, QUERY_HEADS),
        "mlp.gate_proj": torch.zeros(64, HIDDEN),
        "mlp.up_proj": torch.zeros(64, HIDDEN),
        "mlp.down_proj": torch.zeros(HIDDEN, 64),
    }
    weights = {f"model.layers.0.{name}.weight": x for name, x in layer.items()}
    weights |= {
        "model.embed_tokens.weight": embedding.float(),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": head,
    }
    # safetensors takes no two views of one memory.
    return {
        name: x.clone(memory_format=torch.contiguous_format) for name, x in weights.items()
    }

# SPDX-License-Identifier: Apache-2.0
"""qwen3-recall: a small trained model of the Qwen3 architecture that finds pairs in long contexts.

Its weights are in this repository, made by `train`; this is the recipe of its folder.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from tools.models.recall import tokenizer

WEIGHTS = Path(__file__).with_name("model.safetensors")

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": len(tokenizer.TOKENS),
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "eos_token_id": len(tokenizer.TOKENS) - 1,
    "pad_token_id": len(tokenizer.TOKENS) - 1,
    "dtype": "bfloat16",
}


def make(_package: Path | None, folder: Path) -> None:
    """Write config, weights and tokenizer to `folder`."""
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    shutil.copyfile(WEIGHTS, folder / "model.safetensors")
    tokenizer.save(folder, CONFIG["max_position_embeddings"])

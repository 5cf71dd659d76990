# SPDX-License-Identifier: Apache-2.0
"""The Qwen families as configurations of a size for tests.

What makes a family is kept: head_dim, the ratio of query to kv heads, biases, norms, rotary
parameters, the pattern of layers. Width, depth and vocabulary are small. The published model
that a shape follows is named beside it.
"""

from typing import Any

from tools.models.byte_tokenizer import MARK_ID

_COMMON = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": MARK_ID["<|endoftext|>"],
    "eos_token_id": MARK_ID["<|im_end|>"],
    "pad_token_id": MARK_ID["<|endoftext|>"],
    "dtype": "bfloat16",
}

QWEN2: dict[str, Any] = _COMMON | {  # Qwen2.5-0.5B: biases of q, k and v, 7 query heads per kv head
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,  # the family has no head_dim of its own: width / heads
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "use_sliding_window": False,
}

QWEN3: dict[str, Any] = _COMMON | {  # Qwen3-0.6B: norms of q and k, no bias
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attention_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}

QWEN3_MOE: dict[str, Any] = QWEN3 | {  # Qwen3-30B-A3B: 8 query heads per kv head, routed experts
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_attention_heads": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}

_QWEN35_TEXT: dict[str, Any] = _COMMON | {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "attention_bias": False,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
}

# Qwen3.6-27B: three gated delta nets to one gated attention, head_dim 256 of which 64 are rotated,
# 6 query heads per kv head, 3 value heads per key head; published with a vision tower.
QWEN35: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": _QWEN35_TEXT,
    "vision_config": {
        "model_type": "qwen3_5_vision",
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 128,
        "num_position_embeddings": 64,
    },
    "image_token_id": MARK_ID["<|image_pad|>"],
    "video_token_id": MARK_ID["<|video_pad|>"],
    "vision_start_token_id": MARK_ID["<|vision_start|>"],
    "vision_end_token_id": MARK_ID["<|vision_end|>"],
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}

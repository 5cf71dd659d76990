# SPDX-License-Identifier: Apache-2.0
"""Pages of a hybrid of the size of Qwen3.6-27B: how many tokens lie in one, and what is padding.

One page holds the recurrent state of a delta net (3.2 MB there) or a block of tokens, whichever
layer it serves. A block has as many tokens as fill the state's page, so a compressed cache shows
in the tokens of a block, and the state must not be padded to a multiple of itself.
"""

import json

import pytest

from tools.models import qwen_shapes
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.cpu import CpuPlatform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.attention.backends import cpu_attn, tdsf_cpu

STATE = 48 * 128 * 128 * 4 + (2 * 16 * 128 + 48 * 128) * 3 * 2  # float32 state, bf16 convolution
BACKENDS = {
    "auto": cpu_attn.CPUAttentionBackend,
    "tdsf_k8v8": tdsf_cpu.TdsfK8V8Backend,
    "tdsf_k4v4": tdsf_cpu.TdsfK4V4Backend,
    "tdsf_k3v3": tdsf_cpu.TdsfK3V3Backend,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A configuration without weights."""
    text = qwen_shapes.QWEN35["text_config"] | {
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
        "max_position_embeddings": 262144,
    }
    path = tmp_path_factory.mktemp("shape")
    (path / "config.json").write_text(json.dumps(qwen_shapes.QWEN35 | {"text_config": text}))
    return path


@pytest.mark.parametrize(
    "kv,tokens", [("auto", 896), ("tdsf_k8v8", 1536), ("tdsf_k4v4", 3072), ("tdsf_k3v3", 4096)]
)
def test_a_state_fills_its_page(folder, kv, tokens):
    config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        kv_cache_dtype=kv,
        enable_prefix_caching=True,
    ).create_engine_config(UsageContext.ENGINE_CONTEXT)
    CpuPlatform._align_hybrid_block_size(config, BACKENDS[kv])
    cache = config.cache_config
    page = cache.mamba_page_size_padded or STATE
    assert cache.block_size == tokens
    assert STATE <= page < 1.15 * STATE

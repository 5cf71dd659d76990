# SPDX-License-Identifier: Apache-2.0
"""What the running server's cache holds, and how to ask it something."""

import json
import re
import runpy
from typing import Any

from tools.pins import ROOT

# The file alone: importing the package takes seconds, of the cores on which the server starts.
FORMATS = runpy.run_path(str(ROOT / "vllm" / "turboquant" / "formats.py"))["FORMATS"]

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def summary(name: str, kv: str, port: int, config: dict[str, Any], log: str) -> str:
    """The lines shown once the server answers.

    config: the model's config.json; log: what the engine wrote while it started, from
    which the cache's size, block size and the engine's dtype are read.
    """
    question = {"role": "user", "content": "What is the capital of Japan?"}
    request = {"model": name, "messages": [question]}
    return "\n".join(
        [
            "",
            f"  model   {name}",
            f"  cache   {cache(kv, config, log)}",
            f"  API     http://127.0.0.1:{port}/v1   metrics at /metrics   stop with Ctrl-C",
            "",
            f"  curl -s http://127.0.0.1:{port}/v1/chat/completions \\",
            "    -H 'Content-Type: application/json' \\",
            f"    -d '{json.dumps(request)}'",
            "",
        ]
    )


def cache(kv: str, config: dict[str, Any], log: str) -> str:
    """Bits per element and tokens that fit, against the same memory uncompressed."""
    found = re.search(r"KV cache size: ([\d,]+) tokens", log)
    if found is None:
        return f"{kv}; the engine named no size"
    tokens = int(found[1].replace(",", ""))
    text = config.get("text_config", config)
    heads, hidden = text.get("num_attention_heads"), text.get("hidden_size")
    head_dim = text.get("head_dim") or (hidden // heads if heads and hidden else None)
    dtype = re.search(r"dtype=torch\.(\w+)", log)
    if kv not in FORMATS or head_dim is None or dtype is None:
        return f"{kv}: {tokens:,} tokens fit"
    block_size = int(match[1]) if (match := re.search(r"block_size=(\d+)", log)) else 128
    stored = FORMATS[kv].content_bytes(head_dim, block_size)
    ratio = 2 * head_dim * BYTES[dtype[1]] / stored
    return (
        f"{kv}: {FORMATS[kv].bits_per_element(head_dim, block_size):.2f} bits per element;"
        f" {tokens:,} tokens fit, {int(tokens / ratio):,} uncompressed in {dtype[1]}"
        f" ({ratio:.2f} times as many)"
    )

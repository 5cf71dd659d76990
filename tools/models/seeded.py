# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face folder from a configuration and a seed: weights that nobody trained.

Trained weights are replaced by ones that make a model worth comparing: attention looks at few
tokens, logits are far apart, and a key bias sits where Qwen2.5's does. So an error in a cache, a
mask or a rotation changes the answer, and rounding does not.
"""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from tools.models import byte_tokenizer

SHARPNESS = 1.2
"""Gain of queries and of keys: scores have a standard deviation of about its square."""
EMBEDDING_SCALE = 3.0
"""The token itself outweighs what the layers add, as in trained models."""
LOGIT_SPREAD = 4.0
KEY_BIAS_NORM = 60.0
"""Of one kv head. The slowest rotary pairs carry it, as in Qwen2.5, where norms of 600 are seen."""
SLOW_PAIRS = 6


def seeded(config: dict[str, Any], seed: int) -> Callable[[Path | None, Path], None]:
    """A recipe: the model of `config` with weights drawn from `seed`, as bfloat16."""

    def make(_package: Path | None, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        loaded = transformers.AutoConfig.from_pretrained(folder)
        architecture = getattr(transformers, config["architectures"][0])
        model = architecture(loaded).to(torch.bfloat16)
        _fill(model, loaded.get_text_config(), seed)
        model.save_pretrained(folder)
        # Transformers writes its own reading of the configuration; a user has the published one.
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        byte_tokenizer.save(folder, loaded.get_text_config().max_position_embeddings)
        if "vision_config" in config:
            _save_processor_configs(folder)

    return make


@torch.no_grad()
def _fill(model: torch.nn.Module, config, seed: int) -> None:
    """Each parameter draws from a generator of its own name: order and neighbours do not matter."""
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        draw = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(_value(name, draw, parameter, config))


def _value(name: str, draw: torch.Tensor, parameter: torch.Tensor, config) -> torch.Tensor:
    """What a parameter holds, from a standard normal draw of its shape."""
    part, _, kind = name.rpartition(".")
    part = part.rpartition(".")[2]
    if kind == "A_log":  # decays between 0.37 and 0.97 per token, as trained heads have
        return torch.linspace(-3.5, 0.0, draw.numel())
    if kind == "dt_bias":
        return 0.5 * draw
    if kind == "bias":
        return _key_bias(draw, config) if part == "k_proj" else 0.1 * draw
    if "norm" in part:
        # Some norms multiply by 1 + weight and start from 0; others start from 1.
        gain = SHARPNESS if part in ("q_norm", "k_norm") else 1.0
        centred = 0.0 if parameter.abs().max() == 0 else 1.0
        return gain - 1.0 + centred + 0.1 * draw
    if part == "conv1d":
        return draw / draw.shape[-1] ** 0.5
    if part == "embed_tokens":
        return EMBEDDING_SCALE * draw
    fan_in = draw[0].numel() if draw.ndim < 3 or part == "proj" else draw.shape[-1]
    gain = {"lm_head": LOGIT_SPREAD, "q_proj": SHARPNESS, "k_proj": SHARPNESS}.get(part, 1.0)
    return gain * draw / fan_in**0.5


def _key_bias(draw: torch.Tensor, config) -> torch.Tensor:
    """[kv_heads * head_dim]: small everywhere, large in the slowest rotary pairs."""
    heads = 0.1 * draw.view(config.num_key_value_heads, -1)
    half = heads.shape[1] // 2
    slow = torch.zeros(heads.shape[1], dtype=torch.bool)
    slow[half - SLOW_PAIRS : half] = slow[-SLOW_PAIRS:] = True
    large = draw.view_as(heads)[:, slow]
    heads[:, slow] = KEY_BIAS_NORM * large / large.norm(dim=1, keepdim=True)
    return heads.flatten()


def _save_processor_configs(folder: Path) -> None:
    """The two files that tell Transformers how published vision models prepare their input."""
    shared = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
    files = {
        "preprocessor_config.json": "Qwen2VLImageProcessorFast",
        "video_preprocessor_config.json": "Qwen3VLVideoProcessor",
    }
    for file, kind in files.items():
        key = "image_processor_type" if file.startswith("pre") else "video_processor_type"
        size = {"shortest_edge": 1024, "longest_edge": 65536}
        content = shared | {key: kind, "processor_class": "Qwen3VLProcessor", "size": size}
        (folder / file).write_text(json.dumps(content, indent=2) + "\n")

# SPDX-License-Identifier: Apache-2.0
"""Qwen models whose layers do not all have a sliding window: which layer has which.

Transformers writes the answer into `layer_types`, from `max_window_layers` where a Qwen2
configuration has only that. Upstream's Qwen2 refuses such a mix (vllm-project/vllm#15705), its
Qwen3 inherits that, and its Qwen2-MoE gives every layer full attention.
"""

from vllm.config import get_current_vllm_config
from vllm.model_executor.models.utils import extract_layer_index

FAMILIES = ("qwen2", "qwen3")
"""What the `model_type` of a model begins with, to have its layers' windows looked up."""


def by_layer(config) -> bool:
    """Whether `of_layer` knows the layers of the model with this (text) configuration."""
    kinds = getattr(config, "layer_types", None) or []
    return "sliding_attention" in kinds and config.model_type.startswith(FAMILIES)


def of_layer(name: str, given: int | None) -> int | None:
    """The sliding window of the attention layer `name` ("model.layers.3.self_attn.attn"), in tokens.

    given: what the model's code says of the layer, which wins. None: as all layers of the model.
    """
    model = get_current_vllm_config().model_config  # None in some of upstream's tests
    if given is not None or model is None or not by_layer(model.hf_text_config):
        return given
    config = model.hf_text_config
    layer = extract_layer_index(name)
    if layer >= len(config.layer_types):
        return None  # not one of the model's own layers, but of its draft
    return config.sliding_window if config.layer_types[layer] == "sliding_attention" else None

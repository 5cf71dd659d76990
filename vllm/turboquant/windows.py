# SPDX-License-Identifier: Apache-2.0
"""Qwen models whose layers do not all have a sliding window: which layer has which.

Transformers writes the answer into `layer_types`, from `max_window_layers` where a Qwen2
configuration has only that. Upstream's Qwen2 refuses such a mix (vllm-project/vllm#15705), its
Qwen3 inherits that, and its Qwen2-MoE gives every layer full attention.
"""

from vllm.config import get_current_vllm_config

FAMILIES = ("qwen2", "qwen3")
"""What the `model_type` of a model begins with, to have its layers' windows looked up."""


def of_layer(name: str, given: int | None) -> int | None:
    """The sliding window of the attention layer `name` ("model.layers.3.self_attn.attn"), in tokens.

    given: what the model's code says of the layer, which wins. None: as all layers of the model.
    """
    model = get_current_vllm_config().model_config  # None in some of upstream's tests
    if given is not None or model is None:
        return given
    config = model.hf_text_config
    kinds = getattr(config, "layer_types", None) or []
    if "sliding_attention" not in kinds or not config.model_type.startswith(FAMILIES):
        return None
    numbers = [int(part) for part in name.split(".") if part.isdecimal()]
    if len(numbers) != 1 or numbers[0] >= len(kinds):  # not the model's own: of a draft, or a tower
        return None
    return config.sliding_window if kinds[numbers[0]] == "sliding_attention" else None

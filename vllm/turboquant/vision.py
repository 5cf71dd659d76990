# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5 and Qwen3.6 as text models: a checkpoint with a vision tower where torchvision is missing."""

import importlib.util

TEXT_WITHOUT_VISION = ("qwen3_5", "qwen3_5_moe")
"""Model types that are served for text as often as for images."""


def text_only(model_type: str, chosen: bool) -> bool:
    """Whether to leave the vision tower out: as chosen, or because it could not be fed.

    Transformers' video processor, which these models always load, needs torchvision.
    """
    if chosen or model_type not in TEXT_WITHOUT_VISION:
        return chosen
    if importlib.util.find_spec("torchvision"):
        return False
    from vllm.logger import init_logger

    init_logger(__name__).warning_once(
        "torchvision is not installed: this model is served for text only, without its vision "
        "tower. Install vllm[multimodal] for images and videos, or pass --language-model-only."
    )
    return True


def image_smart_resize(*args, **kwargs):
    """Transformers' Qwen2-VL `smart_resize`; its module needs torchvision, so an image fetches it."""
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    return smart_resize(*args, **kwargs)

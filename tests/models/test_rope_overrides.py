# SPDX-License-Identifier: Apache-2.0
"""`--hf-overrides` with rope_parameters: what it names changes, the rest of the model's stays."""

import pytest

from tools.models import catalog
from vllm.config import ModelConfig
from vllm.turboquant.rope import with_whole_rope

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def rope(name: str, overrides: dict) -> dict:
    """The rope parameters of the text model that the engine would build."""
    config = ModelConfig(model=str(catalog.make(name)), hf_overrides=overrides, dtype="float32")
    return config.hf_text_config.rope_parameters


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_yarn_keeps_theta(key):
    """Unpatched, theta falls to 10,000 in silence."""
    assert rope("tiny-qwen3", {key: YARN}).items() >= (YARN | {"rope_theta": 1e6}).items()


@pytest.mark.parametrize("nested", [False, True])
def test_yarn_keeps_partial_rotation_and_mrope_of_a_text_config(nested):
    """Unpatched, an override that is not nested is set beside the text model and ignored."""
    overrides = {"rope_parameters": YARN}
    got = rope("tiny-qwen3.5", {"text_config": overrides} if nested else overrides)
    kept = {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}
    assert got.items() >= (YARN | kept).items()


def test_a_longer_context_is_given_beside_it():
    """Upstream takes max_position_embeddings for the scaled length, as Transformers does."""
    overrides = {"rope_parameters": YARN, "max_position_embeddings": 131072}
    config = ModelConfig(model=str(catalog.make("tiny-qwen3")), hf_overrides=overrides)
    assert config.max_model_len == 131072


class Text:
    """A configuration with nothing but rope parameters."""

    def __init__(self, **rope_parameters):
        self.rope_parameters = rope_parameters

    def get_text_config(self):
        return self


def test_the_older_key_of_the_type_is_replaced():
    change = {"rope_scaling": {"type": "yarn", "factor": 2.0}}
    merged = with_whole_rope(Text(type="default", rope_theta=5.0), change)
    assert merged == {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 5.0}}


def test_parameters_by_layer_type_are_merged_by_layer_type():
    config = Text(full_attention={"rope_theta": 5.0}, sliding_attention={"rope_theta": 6.0})
    merged = with_whole_rope(config, {"rope_parameters": {"full_attention": {"factor": 2.0}}})
    assert merged["rope_parameters"] == {
        "full_attention": {"rope_theta": 5.0, "factor": 2.0},
        "sliding_attention": {"rope_theta": 6.0},
    }
    with pytest.raises(ValueError, match="cannot be merged"):
        with_whole_rope(config, {"rope_parameters": {"factor": 2.0}})


def test_two_names_of_one_thing_are_refused():
    with pytest.raises(ValueError, match="Give rope_parameters only"):
        with_whole_rope(Text(), {"rope_parameters": YARN, "rope_scaling": YARN})


def test_other_overrides_pass():
    overrides = {"quantization_config": {"a": 1}}
    assert with_whole_rope(Text(rope_theta=5.0), overrides) == overrides

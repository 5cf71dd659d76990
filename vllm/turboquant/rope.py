# SPDX-License-Identifier: Apache-2.0
"""`--hf-overrides '{"rope_parameters": {…}}'` changes what it names and keeps the rest.

Upstream replaces the whole dictionary: a YaRN factor given alone loses the model's rope_theta, which
becomes 10,000, and its partial rotation and MRoPE sections; and on a model with a text_config the
override lands beside the text model and does nothing. Both give fluent nonsense at length.
"""

from typing import Any

ROPE = ("rope_parameters", "rope_scaling")  # the second is the older name of the first


def with_whole_rope(config, overrides: dict[str, Any]) -> dict[str, Any]:
    """The overrides with each rope dictionary completed from the configuration it changes.

    config: the loaded Hugging Face configuration; overrides: the dictionary-valued ones.
    Raises ValueError where the override cannot be merged.
    """
    changes = {key: overrides[key] for key in ROPE if isinstance(overrides.get(key), dict)}
    if not changes:
        return overrides
    if len(changes) > 1:
        raise ValueError(
            "--hf-overrides names rope_parameters and rope_scaling, which are one thing. "
            "Give rope_parameters only."
        )
    (change,) = changes.values()
    text = config.get_text_config()
    whole = _merged(getattr(text, "rope_parameters", None) or {}, change)
    others = {key: value for key, value in overrides.items() if key not in ROPE}
    if text is config:
        return others | {"rope_parameters": whole}
    text.rope_parameters = whole
    return others


def _merged(own: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Both, the change winning; parameters by layer type are changed by layer type only."""
    by_layer_type = any(isinstance(value, dict) for value in own.values())
    if by_layer_type != any(isinstance(value, dict) for value in change.values()) and own:
        raise ValueError(
            f"--hf-overrides gives rope_parameters {change}, and the model's are {own}: one is by "
            "layer type and the other is not, so they cannot be merged. Give them in the model's "
            "form."
        )
    if by_layer_type:
        return own | {kind: own.get(kind, {}) | part for kind, part in change.items()}
    # The older key of the type must not stand beside the newer one that is being changed.
    if "type" in change and "rope_type" not in change:
        change = change | {"rope_type": change["type"]}
    return {key: value for key, value in (own | change).items() if key != "type"}

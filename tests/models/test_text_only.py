# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5 without torchvision: the class can be looked at, and it is configured as a text model."""

import importlib.util
import subprocess
import sys

import pytest

from tools.models import catalog
from vllm.config import ModelConfig
from vllm.turboquant import vision

BLOCKED = """
import sys
sys.modules["torchvision"] = None  # as if it were not installed
import vllm.model_executor.models.qwen3_5 as models
print(models.Qwen3_5ForConditionalGeneration.__name__)
"""


def test_the_model_class_is_imported_without_torchvision():
    """Unpatched: ModuleNotFoundError from Transformers' image processor."""
    command = [sys.executable, "-c", BLOCKED]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.stdout == "Qwen3_5ForConditionalGeneration\n", ended.stderr[-2000:]


@pytest.mark.parametrize("installed", [False, True])
def test_without_torchvision_the_vision_tower_stays_out(monkeypatch, installed):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        vision.importlib.util,
        "find_spec",
        lambda name: installed if name == "torchvision" else find(name),
    )
    config = ModelConfig(model=str(catalog.make("tiny-qwen3.5")))
    assert config.multimodal_config.language_model_only is not installed


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "llama"])
def test_other_models_are_left_alone(monkeypatch, model_type):
    monkeypatch.setattr(vision.importlib.util, "find_spec", lambda name: None)
    assert vision.text_only(model_type, False) is False
    assert vision.text_only(model_type, True) is True

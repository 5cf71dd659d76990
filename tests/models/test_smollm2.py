# SPDX-License-Identifier: Apache-2.0
"""The default model: made from its pinned package, it tokenises and chats as it should."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.models import catalog


@pytest.fixture(scope="module")
def folder():
    return catalog.make("smollm2")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!\n\n\tdef f(x):  return x ** 2  # 12,345.678",
        "你好，世界！今天天气怎么样？",
        "naïve café, Ωμέγα, Привет, 한국어, عربي, ½ ² ③",
        "😀👍🏽 \u200b \u00a0 " + " " * 70 + "\r\n",
        "I'm sure they'll say we've won; it's John's.",
    ],
)
def test_text_survives_a_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_control_tokens_are_one_token_and_digits_stand_alone(tokenizer):
    assert tokenizer("<|im_start|>user\n")["input_ids"][0] == 1
    assert tokenizer("<|im_end|>")["input_ids"] == [2]
    assert len(tokenizer("2026")["input_ids"]) == 4


def test_the_chat_template_adds_the_system_prompt(tokenizer):
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_it_answers_a_simple_question_and_stops(folder, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of Japan?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert "Tokyo" in answer and answer.endswith("<|im_end|>")

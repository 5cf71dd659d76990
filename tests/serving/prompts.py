# SPDX-License-Identifier: Apache-2.0
"""Prompts of the serving tests."""

from tools.bench.quality import evaluation_text

QUESTIONS = [
    "What is the capital of Japan?",
    "Name three primary colours.",
    "How many days does a week have?",
    "What do bees make?",
    "Write one sentence about the sea.",
    "What is 7 plus 5?",
    "Translate 'good morning' into Spanish.",
    "Which planet is closest to the sun?",
    "Give a synonym of 'happy'.",
    "What is the opposite of hot?",
    "Who wrote Hamlet?",
    "List two fruits that are yellow.",
    "What is water made of?",
    "Write a Python function that adds two numbers.",
    "Why is the sky blue?",
    "What is the largest ocean?",
    "Finish the sentence: The early bird",
    "How do you boil an egg?",
    "What language is spoken in Brazil?",
    "Explain in one sentence what a computer is.",
]


def passages(tokenizer, count: int, length: int) -> list[list[int]]:
    """Token ids of `count` passages of upstream's pinned documentation, which share no prefix."""
    ids = tokenizer.encode(evaluation_text())
    stride = (len(ids) - length) // count
    assert stride > 0, f"{len(ids)} tokens of documentation are too few"
    return [ids[start : start + length] for start in range(0, count * stride, stride)]

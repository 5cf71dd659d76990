# SPDX-License-Identifier: Apache-2.0
"""The prompts of the benches: our documentation, cut by a fixed recipe."""

from pathlib import Path

from tools.pins import ROOT


def tokens(model: Path) -> list[int]:
    """README.md and docs/*.md in the order of their names, as token ids of the model."""
    from tokenizers import Tokenizer

    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n\n".join(page.read_text(encoding="utf-8") for page in pages)
    return Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids


def cut(ids: list[int], count: int, length: int, skip: int = 0) -> list[list[int]]:
    """`count` prompts of `length` tokens that start at even distances; the text repeats as needed.

    No two share a prefix, so nothing is read from a prefix cache. skip: tokens by which all starts
    move on, for prompts other than those of another call.
    """
    starts = [skip + number * len(ids) // count for number in range(count)]
    whole = ids * (-(-(starts[-1] + length) // len(ids)) + 1)
    return [whole[start : start + length] for start in starts]

# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of qwen3-recall: words of one token each, and bytes for all other text.

A word is a blank and three letters, consonant, vowel, consonant: " bak", " lom". There are 2,205.
Vocabulary and merges follow from the alphabet, so nothing is learnt and nothing is stored.
"""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tools.models import byte_tokenizer

END = "<|endoftext|>"
VOWELS = "aeiou"
CONSONANTS = "bcdfghjklmnpqrstvwxyz"


def _vocabulary() -> tuple[list[str], list[tuple[str, str]], list[str]]:
    """All tokens in the order of their ids, the merges, and the words; as ByteLevel writes them."""
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False)
    blank = cut.pre_tokenize_str(" ")[0][0]
    merges = [(blank, first) for first in CONSONANTS]
    for letters in (VOWELS, CONSONANTS):
        merges += [(head, last) for head in _heads(merges) for last in letters]
    written = ["".join(merge) for merge in merges]
    words = written[-len(CONSONANTS) ** 2 * len(VOWELS) :]
    return [*sorted(cut.alphabet()), *written, END], merges, words


def _heads(merges: list[tuple[str, str]]) -> list[str]:
    """The longest tokens so far."""
    longest = max(len("".join(merge)) for merge in merges)
    return ["".join(merge) for merge in merges if len("".join(merge)) == longest]


TOKENS, MERGES, _WORDS = _vocabulary()
TEXT = range(len(TOKENS) - 1)
"""Ids of all tokens that text can become."""
WORDS = range(TOKENS.index(_WORDS[0]), TOKENS.index(_WORDS[-1]) + 1)
"""Ids of the words."""


def build() -> Tokenizer:
    """Byte-level BPE with the vocabulary above."""
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(TOKENS)}, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return tokenizer


def save(folder: Path, longest: int) -> None:
    """Write tokenizer.json and tokenizer_config.json; longest: tokens of a sequence."""
    byte_tokenizer.write(build(), folder, longest, end=END, pad=END)

# SPDX-License-Identifier: Apache-2.0
"""A tokenizer of bytes for models that nobody trained: token 0 to 255 is the byte, then marks."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

MARKS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
MARK_ID = {mark: 256 + i for i, mark in enumerate(MARKS)}

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build() -> Tokenizer:
    """One token per byte of UTF-8, and one per mark."""
    # ByteLevel writes byte b as the printable character of that rank in its alphabet.
    vocabulary = {_written(byte): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(m, special=True, normalized=False) for m in MARKS])
    return tokenizer


def save(folder: Path, longest: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja; longest: in tokens."""
    write(build(), folder, longest, end="<|im_end|>", pad="<|endoftext|>")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def write(tokenizer: Tokenizer, folder: Path, longest: int, end: str, pad: str) -> None:
    """Write tokenizer.json and tokenizer_config.json; longest: tokens of a sequence."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
        "eos_token": end,
        "pad_token": pad,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _written(byte: int) -> str:
    """The character that byte-level tokenizers write for a byte, which GPT-2 chose: itself where
    it is printable, else the next free one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(0x100 + sum(1 for other in range(byte) if other not in printable))

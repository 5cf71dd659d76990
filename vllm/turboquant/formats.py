# SPDX-License-Identifier: Apache-2.0
"""The TDSF cache formats: their names, and where every byte of a block lies.

One (block, kv head) region of the cache holds N tokens in N * C bytes:

    slot      fp16 K and V of the sequence's first token, kept exact     4 * D
    keys      codes of N keys, interleaved for the kernels                N * code_bytes
    values    codes of N values                                           N * code_bytes
    scales    one byte per key, then one byte per value, token order      2 * N

C is the size that vLLM's cache spec calls the content of one token. The slot is
folded into it, so pages carry no header. docs/format.md gives the bit layout.
"""

from dataclasses import dataclass

HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)
BLOCK_MULTIPLE = 32
"""A block holds a multiple of this many tokens; the packed planes need it."""

_SLOT_SHARE = 128
"""Blocks of at least this many tokens all pay the slot's share of one token in 128.

vLLM asks for C with block sizes of 1 when it aligns hybrid pages; a C that changed with
larger blocks would make those answers disagree with the real pages."""


def code_bytes(bits: int, head_dim: int) -> int:
    """Bytes that the codes of one vector of `head_dim` coordinates take."""
    if bits == 3:  # a 2-bit plane, and a 1-bit plane in whole groups of 32 coordinates
        return head_dim // 4 + 4 * -(-head_dim // 32)
    return head_dim * bits // 8


@dataclass(frozen=True)
class Format:
    """A cache format: bits per coordinate of keys and of values."""

    name: str
    key_bits: int
    value_bits: int

    def content_bytes(self, head_dim: int, block_size: int) -> int:
        """C: bytes of one token of one kv head, keys and values and everything else."""
        share = _SLOT_SHARE if block_size == 1 else min(block_size, _SLOT_SHARE)
        slot = -(-4 * head_dim // share)
        codes = code_bytes(self.key_bits, head_dim) + code_bytes(self.value_bits, head_dim)
        return codes + 2 + slot

    def bits_per_element(self, head_dim: int, block_size: int = 128) -> float:
        """Stored bits per cached number, scales and the exact slot counted."""
        return 8 * self.content_bytes(head_dim, block_size) / (2 * head_dim)

    def regions(self, head_dim: int, block_size: int) -> "Regions":
        """Byte offsets of the sections of one (block, kv head) region."""
        keys = 4 * head_dim
        values = keys + block_size * code_bytes(self.key_bits, head_dim)
        key_scales = values + block_size * code_bytes(self.value_bits, head_dim)
        value_scales = key_scales + block_size
        return Regions(keys, values, key_scales, value_scales, value_scales + block_size)


@dataclass(frozen=True)
class Regions:
    """Byte offsets inside a region; the slot starts at 0, `end` is the first unused byte."""

    keys: int
    values: int
    key_scales: int
    value_scales: int
    end: int


FORMATS = {
    f.name: f
    for f in (
        Format("tdsf_k8v8", 8, 8),
        Format("tdsf_k8v4", 8, 4),
        Format("tdsf_k4v4", 4, 4),
        Format("tdsf_k4v3", 4, 3),
        Format("tdsf_k3v3", 3, 3),
    )
}


def is_tdsf(cache_dtype: str | None) -> bool:
    """Whether `--kv-cache-dtype` names one of our formats."""
    return cache_dtype in FORMATS

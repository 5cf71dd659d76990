# SPDX-License-Identifier: Apache-2.0
"""Codes to bytes and back, in the interleaving that the kernels load.

A 64-byte load of keys holds 4 coordinates of each of 16 tokens, one of values 4 tokens of each of
16 coordinates: either way four neighbouring bytes meet one 32-bit lane of an integer dot product.
Below 8 bits several such loads share their bytes (docs/format.md).
"""

import torch

from vllm.turboquant.formats import code_bytes


def _fold(parts: torch.Tensor, dim: int, bits: int) -> torch.Tensor:
    """Lay the slices along `dim` into one byte each, slice i shifted by bits * i."""
    shifts = torch.arange(parts.shape[dim]) * bits
    shape = [1] * parts.dim()
    shape[dim] = -1
    return (parts.int() << shifts.view(shape)).sum(dim).to(torch.uint8)


def _unfold(data: torch.Tensor, dim: int, bits: int) -> torch.Tensor:
    """The inverse of `_fold`: a new axis at `dim` of 8 // bits slices."""
    shifts = torch.arange(8 // bits) * bits
    shape = [1] * (data.dim() + 1)
    shape[dim] = -1
    return ((data.unsqueeze(dim).int() >> shifts.view(shape)) & (2**bits - 1)).to(torch.uint8)


def _key_chunks(codes: torch.Tensor) -> torch.Tensor:
    """[N, D] -> [N/16, D/4, 16, 4]."""
    tokens, dim = codes.shape
    return codes.view(tokens // 16, 16, dim // 4, 4).transpose(1, 2)


def _value_chunks(codes: torch.Tensor) -> torch.Tensor:
    """[N, D] -> [N/4, D/16, 16, 4]."""
    tokens, dim = codes.shape
    return codes.view(tokens // 4, 4, dim // 16, 16).permute(0, 2, 3, 1)


def _pack(chunks: torch.Tensor, axis: int, bits: int) -> torch.Tensor:
    """Fold `axis` of `chunks` into shared bytes, plane after plane; flat uint8."""
    planes = []
    for plane_bits, shift in {8: [(8, 0)], 4: [(4, 0)], 3: [(2, 0), (1, 2)]}[bits]:
        part = (chunks.int() >> shift) & (2**plane_bits - 1)
        group = 8 // plane_bits
        missing = -part.shape[axis] % group
        if missing:
            pad = list(part.shape)
            pad[axis] = missing
            part = torch.cat([part, part.new_zeros(pad)], axis)
        part = part.unflatten(axis, (-1, group))
        planes.append(_fold(part, axis + 1, plane_bits).flatten())
    return torch.cat(planes)


def _unpack(data: torch.Tensor, shape: list[int], axis: int, bits: int) -> torch.Tensor:
    """The inverse of `_pack` for chunks of `shape`."""
    chunks = torch.zeros(shape, dtype=torch.uint8)
    start = 0
    for plane_bits, shift in {8: [(8, 0)], 4: [(4, 0)], 3: [(2, 0), (1, 2)]}[bits]:
        folded = list(shape)
        folded[axis] = -(-shape[axis] // (8 // plane_bits))
        count = torch.Size(folded).numel()
        plane = _unfold(data[start : start + count].view(folded), axis + 1, plane_bits)
        plane = plane.flatten(axis, axis + 1).narrow(axis, 0, shape[axis])
        chunks |= plane << shift
        start += count
    return chunks


def _padded(data: torch.Tensor, size: int) -> torch.Tensor:
    return torch.cat([data, data.new_zeros(size - data.numel())])


def pack_keys(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 codes [N, D] of one block's keys -> uint8 [N * code_bytes(bits, D)]."""
    tokens, dim = codes.shape
    return _padded(_pack(_key_chunks(codes), 1, bits), tokens * code_bytes(bits, dim))


def pack_values(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 codes [N, D] of one block's values -> uint8 [N * code_bytes(bits, D)]."""
    tokens, dim = codes.shape
    return _padded(_pack(_value_chunks(codes), 0, bits), tokens * code_bytes(bits, dim))


def unpack_keys(data: torch.Tensor, tokens: int, dim: int, bits: int) -> torch.Tensor:
    """The inverse of `pack_keys`."""
    chunks = _unpack(data, [tokens // 16, dim // 4, 16, 4], 1, bits)
    return chunks.transpose(1, 2).reshape(tokens, dim)


def unpack_values(data: torch.Tensor, tokens: int, dim: int, bits: int) -> torch.Tensor:
    """The inverse of `pack_values`."""
    chunks = _unpack(data, [tokens // 4, dim // 16, 16, 4], 0, bits)
    return chunks.permute(0, 3, 1, 2).reshape(tokens, dim)

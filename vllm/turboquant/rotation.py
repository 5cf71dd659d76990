# SPDX-License-Identifier: Apache-2.0
"""Orthonormal rotations that spread a vector's energy evenly over its coordinates.

H S: random signs S, then a Hadamard matrix H (Sylvester's construction). A head_dim that is no
power of two (80 = 16 * 5, 96 = 32 * 3, ...) takes the Kronecker product of a Hadamard matrix with
the orthonormal DCT-II of the odd factor.
"""

import functools
import math

import torch


def hadamard(n: int) -> torch.Tensor:
    """float64 [n, n], orthonormal; `n` is a power of two."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < n:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(n)


def cosine(n: int) -> torch.Tensor:
    """float64 [n, n]: the orthonormal DCT-II."""
    k = torch.arange(n, dtype=torch.float64)
    matrix = torch.cos(math.pi / n * (k[None, :] + 0.5) * k[:, None])
    matrix[0] /= math.sqrt(2)
    return matrix * math.sqrt(2 / n)


@functools.cache
def rotation(head_dim: int, seed: int = 0) -> torch.Tensor:
    """float64 [head_dim, head_dim] orthonormal H S; equal seeds give equal bits everywhere."""
    power = head_dim & -head_dim
    matrix = torch.kron(hadamard(power), cosine(head_dim // power))
    # Signs from a fixed integer sequence (Knuth's multiplicative hash), not from a generator
    # whose stream could change with a library: caches and profiles must outlive it.
    signs = [
        1.0 if ((d + 1 + 4099 * seed) * 2654435761 >> 15) & 1 else -1.0 for d in range(head_dim)
    ]
    return matrix * torch.tensor(signs, dtype=torch.float64)

# SPDX-License-Identifier: Apache-2.0
"""Lloyd-Max levels of a standard normal, as the int8 tables the kernels shuffle through.

A rotated key or value has coordinates close to Gaussian, so the levels that minimise the mean
square error of N(0, 1) serve every head; a calibrated profile may bring its own tables.
Lloyd (1982), Max (1960): each level is the mean of its cell, each boundary the midpoint of two
levels.
"""

import functools
import math

import torch

LEVEL_MAX = 127
"""The outermost level of every table. Levels are integers; a vector's scale carries the rest."""


def _density(x: float) -> float:
    return math.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _mass(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


@functools.cache
def normal_levels(bits: int) -> tuple[float, ...]:
    """The 2**bits Lloyd-Max levels of N(0, 1), ascending."""
    half = 2 ** (bits - 1)
    levels = [3.0 * (i + 0.5) / half for i in range(half)]  # symmetric: the positive half
    for _ in range(10_000):
        bounds = [0.0, *((a + b) / 2 for a, b in zip(levels, levels[1:])), math.inf]
        means = [
            (_density(lo) - (_density(hi) if hi < math.inf else 0.0))
            / ((_mass(hi) if hi < math.inf else 1.0) - _mass(lo))
            for lo, hi in zip(bounds, bounds[1:])
        ]
        moved = max(abs(a - b) for a, b in zip(means, levels))
        levels = means
        if moved < 1e-12:
            break
    return tuple([-x for x in reversed(levels)] + levels)


def int8_levels(bits: int) -> torch.Tensor:
    """int8 [2**bits]: the levels scaled so that the outermost is LEVEL_MAX."""
    levels = torch.tensor(normal_levels(bits), dtype=torch.float64)
    return torch.round(levels * (LEVEL_MAX / levels[-1])).to(torch.int8)


def unit_rms(bits: int) -> float:
    """How many level units one standard deviation spans in `int8_levels(bits)`."""
    return LEVEL_MAX / normal_levels(bits)[-1]

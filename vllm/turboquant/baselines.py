# SPDX-License-Identifier: Apache-2.0
"""Other KV caches, computed again from their description, to be measured beside ours.

Each takes keys and values [T, H, D] and returns them as its cache would give them back. The
turboquant presets are upstream's algorithm on every layer; upstream itself leaves the first and
last two layers of a dense model uncompressed, which costs it bits that are not counted here.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm.turboquant.codebook import normal_levels
from vllm.turboquant.rotation import hadamard

Codec = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Baseline:
    """A cache by its two codecs, and what a key and a value together take."""

    key: Codec
    value: Codec
    coordinate_bits: int
    vector_bits: int

    def bits_per_element(self, head_dim: int) -> float:
        """Stored bits per cached number, scales counted."""
        return (self.coordinate_bits + self.vector_bits / head_dim) / 2

    def __call__(self, key, value) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as the cache gives them back."""
        return self.key(key), self.value(value)


def fp8(x: torch.Tensor) -> torch.Tensor:
    """e4m3 with a scale of 1."""
    return x.float().clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


@dataclass(frozen=True)
class Uniform:
    """2**bits levels from the least to the largest of each `group` (0: the vector), both fp16."""

    bits: int
    group: int = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x as it comes back."""
        parts = x.float().unflatten(-1, (-1, self.group or x.shape[-1]))
        low = parts.amin(-1, keepdim=True)
        step = ((parts.amax(-1, keepdim=True) - low) / (2**self.bits - 1)).clamp_min(1e-8)
        codes = ((parts - low) / step + 0.5).floor().clamp(0, 2**self.bits - 1)
        back = codes * step.half().float() + low.half().float()
        return back.flatten(-2).to(x.dtype)


@dataclass(frozen=True)
class RotatedNormal:
    """Unit vectors after a Hadamard rotation, on Lloyd-Max levels, and an fp16 norm.

    What comes back has the stored norm exactly ("norm correction")."""

    bits: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x as it comes back."""
        dim = x.shape[-1]
        turn = hadamard(dim).float()
        norm = x.float().norm(dim=-1, keepdim=True)
        z = (x.float() / (norm + 1e-8)) @ turn
        levels = torch.tensor(normal_levels(self.bits)) / dim**0.5
        z = levels[torch.bucketize(z, (levels[1:] + levels[:-1]) / 2)]
        unit = z / z.norm(dim=-1, keepdim=True)
        return (unit @ turn * norm.half().float()).to(x.dtype)


BASELINES = {
    "fp8": Baseline(fp8, fp8, 16, 0),
    "q4_1": Baseline(Uniform(4, 32), Uniform(4, 32), 10, 0),
    "turboquant_k8v4": Baseline(fp8, Uniform(4), 12, 32),
    "turboquant_4bit_nc": Baseline(RotatedNormal(4), Uniform(4), 8, 48),
    "turboquant_k3v4_nc": Baseline(RotatedNormal(3), Uniform(4), 7, 48),
    "turboquant_3bit_nc": Baseline(RotatedNormal(3), Uniform(3), 6, 48),
}

# SPDX-License-Identifier: Apache-2.0
"""Key bias: the part of every key that is known from the weights, and turns with the position.

Where a key is k_i = R_i (W x + b), R_i the rotation of position i (RoPE), R_i b is the same for
every token at i. Qwen2's b is huge in some channels and would leave no codes for the rest, so it is
subtracted before a key is encoded and its score is added back to every row. Over the pairs of
coordinates that RoPE turns together, b_x and b_y of a pair with the angle a_i,

    R_i b = sum over pairs of  cos(a_i) (b_x, b_y) + sin(a_i) (-b_y, b_x)

a sum of a few waves along the sequence: those of the pairs where b outweighs what else the key
holds. cos and sin are the layer's own table, so scaled and partial rotations need no case here.
"""

from dataclasses import dataclass, replace

import torch

WORTH = 1.25
"""A pair is taken out where that lowers its mean square by this factor, or more."""


@dataclass(frozen=True)
class Rope:
    """How a layer turns its keys: pair p by the angle whose cosine is cos_sin[i, p]."""

    cos_sin: torch.Tensor  # float32 [L, R]: R/2 cosines, then R/2 sines; R <= head_dim
    neox: bool  # pairs (p, p + R/2), else (2p, 2p + 1)

    def pairs(self) -> torch.Tensor:
        """int64 [2, R/2]: the two coordinates of every pair."""
        half = self.cos_sin.shape[1] // 2
        p = torch.arange(half)
        return torch.stack([p, p + half] if self.neox else [2 * p, 2 * p + 1])


@dataclass(frozen=True)
class Waves:
    """R_i b of one layer: the sum over j of table[i // 32, rows[j], i % 32] * shapes[h, j]."""

    table: torch.Tensor  # float32 [L/32, R, 32]; layers may share it
    rows: torch.Tensor  # int32 [J]
    shapes: torch.Tensor  # float32 [H, J, D]

    def heads(self, start: int, count: int) -> "Waves":
        """The part of kv heads start ... start + count - 1."""
        return replace(self, shapes=self.shapes[start : start + count].contiguous())

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """R_i b at positions [T]: float64 [T, H, D]."""
        heights = self.table[positions // 32, :, positions % 32][:, self.rows.long()].double()
        return torch.einsum("tj,hjd->thd", heights, self.shapes.double())


def wave_table(rope: Rope, longest: int) -> torch.Tensor:
    """The table of `Waves` for sequences of up to `longest` tokens."""
    used = rope.cos_sin[:longest].float().cpu()
    padded = torch.nn.functional.pad(used, (0, 0, 0, -len(used) % 32))
    return padded.unflatten(0, (-1, 32)).mT.contiguous()


def waves(rope: Rope, bias: torch.Tensor, table: torch.Tensor) -> Waves | None:
    """The waves of bias [H, D]; None where there is none. table: `wave_table(rope, ...)`."""
    x, y = rope.pairs()
    used = (bias[:, x] != 0).any(0) | (bias[:, y] != 0).any(0)
    chosen = used.nonzero()[:, 0]
    if len(chosen) == 0:
        return None
    n, half = len(chosen), len(x)
    x, y = x[chosen], y[chosen]
    j = torch.arange(n)
    shapes = torch.zeros(len(bias), 2 * n, bias.shape[1])
    shapes[:, j, x], shapes[:, j, y] = bias[:, x], bias[:, y]
    shapes[:, n + j, x], shapes[:, n + j, y] = -bias[:, y], bias[:, x]
    return Waves(table, torch.cat([chosen, half + chosen]).int(), shapes)


def worthwhile(
    rope: Rope, bias: torch.Tensor, key: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """bias [H, D], zero in every pair that is not worth taking out of these keys.

    key: [T, H, D] after RoPE, at positions [T]. A bias that does not reach the keys this way (a
    norm stands between, say) lowers nothing and is dropped whole.
    """
    x, y = rope.pairs()
    turned = torch.zeros_like(bias)
    turned[:, torch.cat([x, y])] = bias[:, torch.cat([x, y])]
    all_waves = waves(rope, turned, wave_table(rope, int(positions.max()) + 1))
    if all_waves is None:
        return turned
    before = key.double()
    energy = [k.square().mean(0) for k in (before, before - all_waves.at(positions))]
    before_pair, after_pair = (e[:, x] + e[:, y] for e in energy)
    keep = before_pair > WORTH * after_pair
    mask = torch.zeros_like(bias)
    mask[:, x], mask[:, y] = keep.to(bias.dtype), keep.to(bias.dtype)
    return turned * mask

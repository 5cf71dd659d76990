# SPDX-License-Identifier: Apache-2.0
"""What qwen3-recall is trained and tested on: pairs of a key and a value, lost in filler.

A context holds each key once, its value right behind it, and other tokens at random in between.
Whoever reads a key again must say its value.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Recall:
    """B contexts of C tokens with P pairs each; all are ids, int64."""

    context: torch.Tensor  # [B, C]
    keys: torch.Tensor  # [B, P], in random order
    values: torch.Tensor  # [B, P]

    def asked(self, queries: int) -> torch.Tensor:
        """The contexts followed by the first `queries` keys, each with its value:
        [B, C + 2 * queries]. The rows that predict the values start at C, every other one."""
        tail = torch.stack([self.keys[:, :queries], self.values[:, :queries]], dim=2)
        return torch.cat([self.context, tail.flatten(1)], dim=1)


def draw(
    batch: int, length: int, pairs: int, tokens: Sequence[int], generator: torch.Generator
) -> Recall:
    """Contexts of `length` tokens. Keys stand nowhere else; values and filler are any other tokens.

    Raises ValueError where the pairs do not fit.
    """
    if 2 * pairs > length or pairs >= len(tokens):
        raise ValueError(f"{pairs} pairs do not fit in {length} of {len(tokens)} tokens")
    shuffled = torch.rand(batch, len(tokens), generator=generator).argsort(dim=1)
    shuffled = torch.tensor(tokens)[shuffled]
    keys, others = shuffled[:, :pairs], shuffled[:, pairs:]
    filler = torch.randint(others.shape[1], (batch, length), generator=generator)
    context = others.gather(1, filler)
    # Pairs as units among the other tokens: every arrangement is equally likely.
    units = torch.rand(batch, length - pairs, generator=generator).argsort(dim=1)[:, :pairs]
    at = units.sort(dim=1).values + torch.arange(pairs)
    context.scatter_(1, at, keys)
    values = context.gather(1, at + 1)
    order = torch.rand(batch, pairs, generator=generator).argsort(dim=1)
    return Recall(context, keys.gather(1, order), values.gather(1, order))

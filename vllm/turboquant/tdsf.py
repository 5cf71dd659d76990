# SPDX-License-Identifier: Apache-2.0
"""Token-wise dynamic scaling factors: a token's scale, predicted from its position.

    scale_k[i] = alpha * exp(-beta * i) + gamma
    scale_v[i] = delta * exp(-epsilon * i) + zeta

i is the 0-based position in the sequence. The six numbers belong to one layer and kv head of one
model version. The stored byte corrects the prediction: it counts steps of `step` octaves from it,
so the better the prior, the finer the step that one byte affords. With a step of 0 (strict TDSF)
the byte says nothing and the formula alone is the scale.
"""

import torch

CENTRE = 128
"""The scale code that means: exactly the prior."""


def prior(numbers: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The predicted scale.

    numbers: [H, 3], (amplitude, decay, floor) of keys or of values.
    positions: integers [T].
    Returns float64 [T, H].
    """
    amplitude, decay, floor = numbers.double().unbind(-1)
    return amplitude * torch.exp(-decay * positions.double()[:, None]) + floor


def scale_code(scale: torch.Tensor, predicted: torch.Tensor, step: float, *, up: bool = False):
    """The byte for `scale` given its prediction: uint8, same shape.

    `up` rounds towards the larger scale, so that a scale chosen to avoid clipping still does.
    """
    if step == 0:
        return torch.full(scale.shape, CENTRE, dtype=torch.uint8)
    steps = torch.log2(scale / predicted) / step
    steps = torch.ceil(steps - 1e-6) if up else torch.round(steps)
    return (steps + CENTRE).clamp(0, 255).to(torch.uint8)


def decode_scale(code: torch.Tensor, predicted: torch.Tensor, step: float) -> torch.Tensor:
    """The scale that a byte stands for."""
    return predicted * torch.exp2((code.double() - CENTRE) * step)

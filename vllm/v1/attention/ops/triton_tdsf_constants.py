# SPDX-License-Identifier: Apache-2.0
"""A layer's constants on the GPU, in the form that the Triton kernels read.

The tensors are allocated once and refilled in place, so a CUDA graph that was captured before
calibration serves the calibrated layer. For the same reason nothing here is a compile-time
property of a kernel: whether a head rounds with feedback is a flag in device memory.
"""

import torch

from vllm.turboquant.constants import LEVEL_GROUP, LayerConstants
from vllm.turboquant.formats import Format

MOST_REGISTERS = 255
"""Of a thread, in every kernel: all there are. Left alone ptxas spills some to run more programs."""

TABLE = 16
"""Entries of a level table; those of 3 bits fill the first half."""


def padded(head_dim: int) -> int:
    """Coordinates of a kernel's tile: a power of two, and at least 16 per slice of a byte."""
    return max(64, 1 << (head_dim - 1).bit_length())


class DeviceConstants:
    """Constants of H kv heads on one device; D head_dim, P `padded(D)`, all float32 unless said.

    Matrices of a transform are held as [H, input, output], metric and feedback row after row.
    """

    def __init__(self, fmt: Format, constants: LayerConstants, device: torch.device) -> None:
        heads, dim = constants.key_center.shape
        self.format, self.heads, self.dim = fmt, heads, dim
        self.device = torch.device(device)

        def empty(*shape: int, dtype=torch.float32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.center = empty(2, heads, dim)  # of keys; of values: zero
        self.into = empty(2, heads, dim, dim)  # key_in, value_in
        self.query_in = empty(heads, dim, dim)
        self.value_out = empty(heads, dim, dim)
        self.metric = empty(2, heads, dim, dim)
        self.feedback = empty(2, heads, dim, dim)
        self.with_feedback = empty(2, dtype=torch.int32)
        self.tdsf = empty(heads, 6)
        self.step = empty(2)
        tables = (2, heads, padded(dim) // LEVEL_GROUP, TABLE)
        self.levels = empty(*tables, dtype=torch.float16)  # exact: levels are int8
        # Rounding by one look: bounds between int8 levels are multiples of 1/2. Entry
        # floor(2 y) + 256 is the nearest level's code plus 256 times that level.
        self.nearest = empty(*tables[:3], 512, dtype=torch.int16)
        self.fill(constants)

    def fill(self, c: LayerConstants) -> None:
        """Replace the constants by those of a layer of the same shape. Raises ValueError."""
        if tuple(c.key_center.shape) != (self.heads, self.dim):
            raise ValueError(
                f"constants for {tuple(c.key_center.shape)} kv heads and head_dim replace those "
                f"for {(self.heads, self.dim)}"
            )
        self.center[0].copy_(c.key_center)
        for to, matrix in (
            *((self.into[0], c.key_in), (self.into[1], c.value_in)),
            *((self.query_in, c.query_in), (self.value_out, c.value_out)),
        ):
            to.copy_(matrix.mT)
        for side, name in enumerate(("key", "value")):
            metric, feedback = (c.rounding[f"{name}_{part}"] for part in ("metric", "feedback"))
            self.metric[side].copy_(getattr(c, f"{name}_metric"))
            self.feedback[side].copy_(getattr(c, f"{name}_feedback"))
            self.with_feedback[side] = int(metric is not None or feedback is not None)
            levels = getattr(c, f"{name}_levels").float()
            if count := levels.shape[-1]:
                groups = levels.shape[1]
                self.levels[side, :, :groups, :count].copy_(levels)
                bounds = (levels[..., 1:] + levels[..., :-1]) / 2
                y = torch.arange(-256, 256) / 2
                code = torch.searchsorted(
                    bounds.contiguous(), y.expand(*levels.shape[:2], -1).contiguous(), right=True
                )
                nearest = code + 256 * levels.gather(-1, code).long()
                self.nearest[side, :, :groups].copy_(nearest)
        self.tdsf.copy_(c.tdsf)
        self.step.copy_(c.scale_step)

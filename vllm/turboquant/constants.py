# SPDX-License-Identifier: Apache-2.0
"""What one attention layer needs to encode keys and values and to attend over the codes.

Everything a model version may calibrate is data here, so kernels know one code path: a dense
head_dim x head_dim matrix per kv head covers centring, balancing and any rotation.
"""

import functools
from dataclasses import dataclass

import torch

from vllm.turboquant.bias import Waves
from vllm.turboquant.codebook import int8_levels
from vllm.turboquant.formats import Format
from vllm.turboquant.rotation import rotation

LEVEL_GROUP = 16
"""Transformed coordinates that share one level table."""


MATRICES = (
    *("key_in", "query_in", "key_metric", "key_feedback"),
    *("value_in", "value_out", "value_metric", "value_feedback"),
)
PER_HEAD = ("key_center", "key_bias", *MATRICES, "tdsf", "key_levels", "value_levels")
TENSORS = (*PER_HEAD, "scale_step")
"""What a profile stores."""


@dataclass(frozen=True)
class LayerConstants:
    """Constants of one layer; H kv heads, D head_dim, all float32 unless said.

    A key k at position i is stored as z = key_in (k - R_i key_bias - key_center) and met by
    query_in q, so that the dot product is q . (k - R_i key_bias - key_center); q . R_i key_bias is
    added to the score. A value v is stored as z = value_in v, and value_out undoes it.

    An error e of z weighs e' T e, T the metric. Rounding goes coordinate by coordinate, and the
    feedback F (upper triangular) says what the error of coordinate d takes from every coordinate
    j > d: F[d, j]; F[d, d] weighs the squared error that is left. Both are the identity where
    nothing was calibrated, and unused at 8 bits.
    """

    key_center: torch.Tensor  # [H, D]
    key_bias: torch.Tensor  # [H, D], before RoPE; zero where it is not taken out, see `bias`
    key_in: torch.Tensor  # [H, D, D]
    query_in: torch.Tensor  # [H, D, D], inverse transpose of key_in
    key_metric: torch.Tensor  # [H, D, D]
    key_feedback: torch.Tensor  # [H, D, D]
    value_in: torch.Tensor  # [H, D, D]
    value_out: torch.Tensor  # [H, D, D], inverse of value_in
    value_metric: torch.Tensor  # [H, D, D]
    value_feedback: torch.Tensor  # [H, D, D]
    tdsf: torch.Tensor  # [H, 6]: alpha beta gamma delta epsilon zeta
    key_levels: torch.Tensor  # int8 [H, D/16, 2**key_bits], ascending; [H, D/16, 0] at 8 bits
    value_levels: torch.Tensor  # int8, likewise
    scale_step: torch.Tensor  # [2]: octaves per scale code, keys and values; 0: codes mean nothing
    waves: Waves | None = None  # R_i key_bias, given by the layer that serves; None where it is zero

    def __post_init__(self) -> None:
        heads, dim = self.key_center.shape
        matrix = (heads, dim, dim)
        shapes = {name: matrix for name in MATRICES}
        shapes |= {"key_bias": (heads, dim), "tdsf": (heads, 6), "scale_step": (2,)}
        for name, shape in shapes.items():
            if tuple(getattr(self, name).shape) != shape:
                found = tuple(getattr(self, name).shape)
                raise ValueError(f"layer constant {name} has shape {found}, expected {shape}")
        for name in ("key_levels", "value_levels"):
            table = getattr(self, name)
            if table.dtype != torch.int8 or tuple(table.shape[:2]) != (heads, dim // LEVEL_GROUP):
                raise ValueError(
                    f"layer constant {name} is {table.dtype} {tuple(table.shape)}, "
                    f"expected int8 [{heads}, {dim // LEVEL_GROUP}, levels]"
                )

        # The kernels multiply column after column, and read metric and feedback row after row.
        # Heads that share one matrix (stride 0) go on sharing it.
        for name in MATRICES:
            given = getattr(self, name).float()
            own = given[:1] if given.stride(0) == 0 else given
            by_rows = name.endswith(("_metric", "_feedback"))
            laid = own.contiguous() if by_rows else own.mT.contiguous().mT
            object.__setattr__(self, name, laid.expand(matrix))

    @functools.cached_property
    def rounding(self) -> dict[str, torch.Tensor | None]:
        """Metric and feedback by name, None for the identity, which kernels pass over."""
        identity = torch.eye(self.key_center.shape[1])
        names = ("key_metric", "key_feedback", "value_metric", "value_feedback")
        found = {name: getattr(self, name) for name in names}
        return {name: None if (m == identity).all() else m for name, m in found.items()}

    def heads(self, start: int, count: int) -> "LayerConstants":
        """The constants of kv heads start ... start + count - 1 (one tensor parallel rank's)."""
        end = start + count
        part = {name: getattr(self, name)[start:end] for name in PER_HEAD}
        part_waves = self.waves and self.waves.heads(start, count)
        return LayerConstants(**part, scale_step=self.scale_step, waves=part_waves)


@functools.cache
def uncalibrated(fmt: Format, kv_heads: int, head_dim: int) -> LayerConstants:
    """Constants that suit any model: a fixed rotation, a flat prior, a wide scale code.

    A scale code of 1/8 octave spans 2**-16 ... 2**16 around the prior, which no key or value of a
    sane model leaves; a calibrated prior affords finer steps.
    """
    turn = rotation(head_dim).float().expand(kv_heads, -1, -1)
    identity = torch.eye(head_dim).expand(kv_heads, -1, -1)
    flat = torch.tensor([0.0, 0.0, 2.0**-5, 0.0, 0.0, 2.0**-5])

    def levels(bits: int) -> torch.Tensor:
        table = int8_levels(bits) if bits < 8 else torch.empty(0, dtype=torch.int8)
        return table.expand(kv_heads, head_dim // LEVEL_GROUP, -1).contiguous()

    return LayerConstants(
        key_center=torch.zeros(kv_heads, head_dim),
        key_bias=torch.zeros(kv_heads, head_dim),
        key_in=turn,
        query_in=turn,
        key_metric=identity,
        key_feedback=identity,
        value_in=turn,
        value_out=turn.mT,
        value_metric=identity,
        value_feedback=identity,
        tdsf=flat.expand(kv_heads, -1).contiguous(),
        key_levels=levels(fmt.key_bits),
        value_levels=levels(fmt.value_bits),
        scale_step=torch.tensor([1 / 8, 1 / 8]),
    )

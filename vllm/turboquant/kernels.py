# SPDX-License-Identifier: Apache-2.0
"""The native kernels: encode-and-store and attention over the stored codes, on CPU.

They do what `vllm.turboquant.reference` specifies, on the instruction set that suits the CPU
(VLLM_TQ_ISA=portable|avx2|avx_vnni|avx512|avx512_vnni|neon forces one). The sources are in
csrc/turboquant.
"""

from pathlib import Path

import torch

from vllm.turboquant.constants import LayerConstants
from vllm.turboquant.formats import Format

LIBRARY = Path(__file__).with_name("_kernels.so")

if not LIBRARY.exists():
    raise ImportError(
        f"The native TDSF kernels are missing: {LIBRARY}\n"
        "They are part of the wheel; a source checkout has none.\n"
        "Build the wheel (build_wheel.sh --target cpu) and install it."
    )
torch.ops.load_library(str(LIBRARY))


def isa() -> str:
    """Name of the instruction set variant in use."""
    return torch.ops.tdsf.isa()


def variants() -> list[str]:
    """Names of all variants that this CPU runs, best first."""
    return torch.ops.tdsf.variants().split()


def store(
    fmt: Format,
    constants: LayerConstants,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Encode keys and values and write them into the cache, in place.

    key, value: [T, H, D], float32, bfloat16 or float16; only the last dimension must be contiguous.
    cache: uint8 [B, H, N, C], each (block, head) region contiguous.
    slot_mapping: int64 [T], block * N + offset; negative: the token is not stored.
    positions: int64 [T], position of each token in its sequence.
    Raises ValueError for a slot outside the cache; nothing is written then.
    """
    torch.ops.tdsf.store(
        key,
        value,
        cache,
        slot_mapping,
        positions,
        constants.key_center,
        constants.key_in,
        constants.rounding["key_feedback"],
        constants.value_in,
        constants.rounding["value_feedback"],
        constants.tdsf,
        constants.key_levels,
        constants.value_levels,
        constants.scale_step,
        fmt.key_bits,
        fmt.value_bits,
        *_waves(constants),
    )


def attend(
    fmt: Format,
    constants: LayerConstants,
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    window_left: int = -1,
    sinks: torch.Tensor | None = None,
) -> None:
    """Causal attention of query [T, Hq, D] over the cached sequences, written into `out`.

    block_table: int32 [R, M]; query_start_loc: int32 [R + 1]; seq_lens: int32 [R], tokens cached
    for each request, this step's included. Row j of a request's q rows sits at seq_len - q + j.
    window_left: how many earlier tokens a row may see, -1 for all. softcap: 0 for none. sinks:
    float32 [Hq], a logit per head that joins the denominator.
    Raises ValueError for a block outside the cache; nothing is written then.
    """
    torch.ops.tdsf.attend(
        query,
        cache,
        block_table,
        query_start_loc,
        seq_lens,
        out,
        constants.key_center,
        constants.query_in,
        constants.value_out,
        constants.tdsf,
        constants.key_levels,
        constants.value_levels,
        constants.scale_step,
        fmt.key_bits,
        fmt.value_bits,
        scale,
        softcap,
        window_left,
        sinks,
        *_waves(constants),
    )


def _waves(constants: LayerConstants) -> tuple[torch.Tensor | None, ...]:
    waves = constants.waves
    return (waves.table, waves.rows, waves.shapes) if waves else (None, None, None)

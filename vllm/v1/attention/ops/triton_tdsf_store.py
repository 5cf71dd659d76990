# SPDX-License-Identifier: Apache-2.0
"""Encode keys and values and store them in their pages, in Triton; docs/format.md is the recipe.

Rounding in turn is serial in the coordinates, so lanes are vectors: the four candidate scales of
each token of a tile side by side. Errors of earlier coordinates reach a block of 16 by a matrix
product with the feedback, those inside the block one by one. Lanes and matrices meet in a scratch
area that stays in the caches; programs are few and walk over the tiles. Cost of a vector: two
head_dim^2 products, and four times half of one for the feedback.

Codes of different tokens share bytes (values below 8 bits). A token's bits change by an atomic
exclusive or of what they were with what they shall be, so all tokens are written at once.
"""

import torch
import triton
import triton.language as tl

from vllm.turboquant.codebook import unit_rms
from vllm.v1.attention.ops.triton_tdsf_constants import MOST_REGISTERS, DeviceConstants, padded

TOKENS = 16
"""Tokens of a tile."""
CANDIDATES = 4
PROGRAMS = 512
"""At most so many programs run, each with its own scratch."""


@triton.jit
def _to_scale_code(ratio, step, octaves):
    """The byte for a scale that is `ratio` times the predicted one, `octaves` up; a float."""
    steps = tl.floor((tl.log2(ratio) + octaves) / step + 128.5)
    return tl.minimum(tl.maximum(steps, 0.0), 255.0)


@triton.jit
def _place(slot_ptr, real, slots, head_ptr, stride_block, BLOCK: tl.constexpr):
    """Where tokens go: whether they are stored, their offset in a block, and its region.

    Volatile, so that a second call reads again and the first result is not kept for it.
    """
    slot = tl.load(slot_ptr, mask=real, other=-1, volatile=True)
    stored = (slot >= 0) & (slot < slots)
    slot = tl.where(stored, slot, 0)
    return stored, (slot % BLOCK).to(tl.int32), head_ptr + (slot // BLOCK) * stride_block


@triton.jit
def _swap_bits(words, bits, shift, mask, wanted):
    """Give `bits` to the masked part (before the shift) of int32 words, and leave the rest."""
    old = tl.load(words, mask=wanted, other=0)
    tl.atomic_xor(words, (old ^ (bits << shift)) & (mask << shift), mask=wanted, sem="relaxed")


@triton.jit(do_not_specialize=["tokens", "slots"])
def store_kernel(
    x_ptr,  # [T, H, D] keys or values
    slot_ptr,  # int64 [T]
    position_ptr,  # int64 [T]
    cache_ptr,  # uint8 [B, H, N, C]
    center_ptr,  # [H, D]
    into_ptr,  # [H, D, D], input by output
    metric_ptr,  # [H, D, D]
    feedback_ptr,  # [H, D, D]
    with_feedback_ptr,  # int32 [1]
    levels_ptr,  # fp16 [H, P / 16, 16]
    nearest_ptr,  # int16 [H, P / 16, 512]
    tdsf_ptr,  # [H, 6]
    step_ptr,  # [1]
    scratch_ptr,  # [programs, SCRATCH]
    tokens,
    slots,
    stride_token,
    stride_head,
    cache_stride_block,
    cache_stride_head,
    HEADS: tl.constexpr,
    IS_KEY: tl.constexpr,
    BITS: tl.constexpr,
    RMS: tl.constexpr,  # of a Gaussian, in units of the levels
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,  # N
    CODES: tl.constexpr,  # offset of the codes in a region
    SCALES: tl.constexpr,  # offset of the scale bytes
    TOKENS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    SCRATCH: tl.constexpr,
):
    LANES: tl.constexpr = TOKENS * CANDIDATES
    TURN: tl.constexpr = 16 if DIM % 32 or DIM > 128 else 32  # wider would spill
    rows, columns = tl.arange(0, TOKENS), tl.arange(0, PADDED)
    inside = columns < DIM
    step = tl.load(step_ptr)
    # Scratch: z [P, TOKENS], errors [P, LANES], one block of y [16, LANES], codes [P / 8, LANES].
    z_at = scratch_ptr + tl.program_id(0).to(tl.int64) * SCRATCH
    error_at = z_at + PADDED * TOKENS
    y_at = error_at + PADDED * LANES
    word_at = (y_at + 16 * LANES).to(tl.pointer_type(tl.int32), bitcast=True)

    for item in range(tl.program_id(0), tl.cdiv(tokens, TOKENS) * HEADS, tl.num_programs(0)):
        head = item % HEADS
        token = (item // HEADS) * TOKENS + rows
        head_ptr = cache_ptr + head.to(tl.int64) * cache_stride_head
        stored, offset, region = _place(
            slot_ptr + token, token < tokens, slots, head_ptr, cache_stride_block, BLOCK
        )
        position = tl.load(position_ptr + token, mask=stored, other=1).to(tl.int32)
        numbers = tdsf_ptr + head * 6 + (0 if IS_KEY else 3)
        decay = tl.exp(-tl.load(numbers + 1) * position.to(tl.float32))
        predicted = tl.load(numbers) * decay + tl.load(numbers + 2)

        # z = into (x - center); what is not finite becomes zero.
        z = tl.zeros([TOKENS, PADDED], tl.float32)
        x_rows = x_ptr + token.to(tl.int64) * stride_token + head.to(tl.int64) * stride_head
        for i in range(0, DIM, TURN):
            d = i + tl.arange(0, TURN)
            x = tl.load(x_rows[:, None] + d[None, :], mask=stored[:, None], other=0.0)
            x = x.to(tl.float32) - tl.load(center_ptr + head * DIM + d)[None, :]
            turn = tl.load(
                into_ptr + (head * DIM + d)[:, None] * DIM + columns[None, :],
                mask=inside[None, :],
                other=0.0,
            )
            z = tl.dot(x, turn, z, input_precision="tf32x3")
        z = tl.where(tl.abs(z) <= 3.0e38, z, 0.0)

        first = stored & (position == 0)
        exact = tl.minimum(tl.maximum(z, -65504.0), 65504.0).to(tl.float16)
        slot_at = region.to(tl.pointer_type(tl.float16), bitcast=True) + (0 if IS_KEY else DIM)
        tl.store(slot_at[:, None] + columns[None, :], exact, mask=first[:, None] & inside[None, :])

        write = stored[:, None] & inside[None, :]
        codes_at = region + CODES
        if BITS == 8:
            most = tl.max(tl.abs(z), 1) / 127.0
            steps = tl.ceil(tl.log2(most / predicted) / step + 128.0 - 1e-6)
            scale_code = tl.minimum(tl.maximum(steps, 0.0), 255.0)
            scale = predicted * tl.exp2((scale_code - 128.0) * step)
            y = tl.floor(z / scale[:, None] + 0.5)
            code = (tl.minimum(tl.maximum(y, -127.0), 127.0) + 128.0).to(tl.uint8)
            if IS_KEY:
                chunk = codes_at + (offset // 16) * (16 * DIM) + offset % 16 * 4
                at = chunk[:, None] + (columns // 4 * 64 + columns % 4)[None, :]
            else:
                chunk = codes_at + (offset // 4) * (4 * DIM) + offset % 4
                at = chunk[:, None] + (columns * 4)[None, :]
            tl.store(at, code, mask=write)
        else:
            tl.store(z_at + columns[None, :] * TOKENS + rows[:, None], z)
            tl.debug_barrier()
            # Lanes: candidate c of token t is lane 4 t + c, c / 4 - 1/4 octaves from a Gaussian's.
            lane = tl.arange(0, LANES)
            octaves = (lane % CANDIDATES).to(tl.float32) * 0.25 - 0.25
            by_token = tl.sqrt(tl.sum(z * z, 1) / DIM) / RMS / predicted
            ratio = tl.reshape(tl.broadcast_to(by_token[:, None], [TOKENS, CANDIDATES]), [LANES])
            base = tl.reshape(tl.broadcast_to(predicted[:, None], [TOKENS, CANDIDATES]), [LANES])
            scale = base * tl.exp2((_to_scale_code(ratio, step, octaves) - 128.0) * step)
            with_feedback = tl.load(with_feedback_ptr)
            feed_at = feedback_ptr + head * (DIM * DIM)
            left = tl.zeros([LANES], tl.float32)
            some = tl.arange(0, 16)
            for b in range(0, DIM // 16):
                here = b * 16 + some
                passed = tl.zeros([LANES, 16], tl.float32)
                for earlier in range(0, b * 16 * with_feedback, 16):
                    before = earlier + some
                    errors = tl.load(error_at + before[None, :] * LANES + lane[:, None])
                    feed = tl.load(feed_at + before[:, None] * DIM + here[None, :])
                    passed = tl.dot(errors, feed, passed, input_precision="tf32x3")
                block = tl.load(z_at + here[None, :] * TOKENS + (lane // CANDIDATES)[:, None])
                block = block / scale[:, None] - passed
                tl.store(y_at + some[None, :] * LANES + lane[:, None], block)
                tl.debug_barrier()
                table = nearest_ptr + (head * (PADDED // 16) + b) * 512
                errors_here = ()
                low = tl.zeros([LANES], tl.int32)
                high = tl.zeros([LANES], tl.int32)
                for k in tl.static_range(16):
                    if k == 8 or k == 12:
                        tl.debug_barrier()  # or all of the block's feedback waits in registers
                    yk = tl.load(y_at + k * LANES + lane)
                    column = feed_at + b * 16 * DIM + b * 16 + k
                    for n in tl.static_range(k):
                        yk -= errors_here[n] * tl.load(column + n * DIM)
                    half = tl.minimum(tl.maximum(tl.floor(yk * 2.0), -256.0), 255.0)
                    nearest = tl.load(table + (half.to(tl.int32) + 256)).to(tl.int32)
                    error = yk - (nearest >> 8).to(tl.float32)
                    left += error * error * tl.load(column + k * DIM)
                    tl.store(error_at + (b * 16 + k) * LANES + lane, error)
                    errors_here = errors_here + (error,)
                    # Eight codes to a word: a key's own layout.
                    if k < 8:
                        low |= (nearest & 15) << (8 * (k % 4) + 4 * (k // 4))
                    else:
                        high |= (nearest & 15) << (8 * (k % 4) + 4 * (k // 4 - 2))
                tl.store(word_at + 2 * b * LANES + lane, low)
                tl.store(word_at + (2 * b + 1) * LANES + lane, high)
                tl.debug_barrier()

            loss = tl.reshape(left * scale * scale, [TOKENS, CANDIDATES])
            best = tl.argmin(loss, 1, tie_break_left=True)
            picked = tl.arange(0, CANDIDATES)[None, :] == best[:, None]
            chosen = tl.sum(tl.where(picked, tl.reshape(scale, [TOKENS, CANDIDATES]), 0.0), 1)
            winner = rows * CANDIDATES + best

            # The scale that leaves the product of z with itself, in the metric, unbiased.
            word = tl.load(
                word_at + (columns // 8)[None, :] * LANES + winner[:, None], mask=write, other=0
            )
            code = (word >> (8 * (columns % 4) + 4 * (columns // 4 % 2))[None, :]) & 15
            group = (head * (PADDED // 16) + columns // 16) * 16
            level = tl.load(levels_ptr + group[None, :] + code).to(tl.float32)
            weighed = tl.zeros([TOKENS, PADDED], tl.float32)
            for i in range(0, DIM * with_feedback, TURN):
                d = i + tl.arange(0, TURN)
                part = tl.load(z_at + d[None, :] * TOKENS + rows[:, None])
                metric = tl.load(
                    metric_ptr + (head * DIM + d)[:, None] * DIM + columns[None, :],
                    mask=inside[None, :],
                    other=0.0,
                )
                weighed = tl.dot(part, metric, weighed, input_precision="tf32x3")
            z = tl.load(z_at + columns[None, :] * TOKENS + rows[:, None])
            weighed = tl.where(with_feedback != 0, weighed, z)
            with_levels = tl.sum(weighed * level, 1)
            unbiased = tl.sum(weighed * z, 1) / tl.where(with_levels > 0.0, with_levels, 1.0)
            sane = (with_levels > 0.0) & (unbiased > chosen / 2) & (unbiased < chosen * 2)
            scale_code = _to_scale_code(tl.where(sane, unbiased, chosen) / predicted, step, 0.0)

            # Read and computed again: kept, they would spill beside the registers of the lanes.
            stored, offset, region = _place(
                slot_ptr + token, token < tokens, slots, head_ptr, cache_stride_block, BLOCK
            )
            write = stored[:, None] & inside[None, :]
            words_at = (region + CODES).to(tl.pointer_type(tl.int32), bitcast=True)
            if IS_KEY and BITS == 4:
                w = tl.arange(0, PADDED // 8)
                codes = tl.load(word_at + w[None, :] * LANES + winner[:, None])
                chunk = words_at + offset // 16 * (2 * DIM) + offset % 16
                wanted = stored[:, None] & (w < DIM // 8)[None, :]
                tl.store(chunk[:, None] + w[None, :] * 16, codes, mask=wanted)
            elif IS_KEY:
                w = tl.arange(0, PADDED // 16)
                word = word_at + w[None, :] * 2 * LANES + winner[:, None]
                a, b = tl.load(word), tl.load(word + LANES)
                codes = (a & 0x03030303) | ((a >> 4) & 0x03030303) << 2
                codes |= (b & 0x03030303) << 4 | ((b >> 4) & 0x03030303) << 6
                chunk = words_at + offset // 16 * DIM + offset % 16
                wanted = stored[:, None] & (w < DIM // 16)[None, :]
                tl.store(chunk[:, None] + w[None, :] * 16, codes, mask=wanted)
                w = tl.arange(0, PADDED // 32)
                codes = tl.zeros([TOKENS, PADDED // 32], tl.int32)
                for j in tl.static_range(8):
                    at = w * 4 + j // 2
                    word = tl.load(
                        word_at + at[None, :] * LANES + winner[:, None],
                        mask=(at < DIM // 8)[None, :],
                        other=0,
                    )
                    codes |= ((word >> (4 * (j % 2) + 2)) & 0x01010101) << j
                chunk = words_at + BLOCK * DIM // 16 + offset // 16 * (16 * ((DIM + 31) // 32))
                chunk += offset % 16
                wanted = stored[:, None] & (w < (DIM + 31) // 32)[None, :]
                tl.store(chunk[:, None] + w[None, :] * 16, codes, mask=wanted)
            elif BITS == 4:
                at = (words_at + offset // 8 * DIM)[:, None] + columns[None, :]
                shift = 8 * (offset % 4) + 4 * (offset // 4 % 2)
                _swap_bits(at, code, shift[:, None], 15, write)
            else:
                at = (words_at + offset // 16 * DIM)[:, None] + columns[None, :]
                shift = 8 * (offset % 4) + 2 * (offset // 4 % 4)
                _swap_bits(at, code & 3, shift[:, None], 3, write)
                at = words_at + BLOCK * DIM // 16 + offset // 32 * DIM
                shift = 8 * (offset % 4) + offset // 4 % 8
                _swap_bits(at[:, None] + columns[None, :], code >> 2, shift[:, None], 1, write)
            tl.debug_barrier()
        tl.store(region + SCALES + offset, scale_code.to(tl.uint8), mask=stored)


def scratch_size(dim: int) -> int:
    """32-bit words of one program's scratch."""
    lanes = TOKENS * CANDIDATES
    return padded(dim) * TOKENS + padded(dim) * lanes + 16 * lanes + padded(dim) // 8 * lanes


def store(
    constants: DeviceConstants,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Encode keys and values and write them into the cache, in place.

    key, value: [T, H, D], float32, bfloat16 or float16; the last dimension is contiguous.
    cache: uint8 [B, H, N, C], each (block, head) region contiguous and 4-byte aligned.
    slot_mapping: int64 [T], block * N + offset; a token whose slot is not in the cache (padding
    has -1) is not stored. positions: int64 [T], position of each token in its sequence.
    """
    tokens, heads, dim = key.shape
    block = cache.shape[2]
    fmt, at = constants.format, constants.format.regions(dim, block)
    items = triton.cdiv(tokens, TOKENS) * heads
    if items == 0:
        return
    programs = min(items, PROGRAMS)
    scratch = torch.empty(programs * scratch_size(dim), dtype=torch.float32, device=key.device)
    for side, (x, bits, codes, scales) in enumerate(
        (
            (key, fmt.key_bits, at.keys, at.key_scales),
            (value, fmt.value_bits, at.values, at.value_scales),
        )
    ):
        store_kernel[(programs,)](
            *(x, slot_mapping, positions, cache, constants.center[side], constants.into[side]),
            *(constants.metric[side], constants.feedback[side], constants.with_feedback[side:]),
            *(constants.levels[side], constants.nearest[side], constants.tdsf),
            *(constants.step[side:], scratch, tokens, cache.shape[0] * block),
            *(x.stride(0), x.stride(1), cache.stride(0), cache.stride(1)),
            **store_options(heads, side == 0, bits, dim, block, codes, scales),
        )


def store_options(
    heads: int, is_key: bool, bits: int, dim: int, block: int, codes: int, scales: int
) -> dict:
    """What `store_kernel` is compiled for."""
    return {
        "HEADS": heads,
        "IS_KEY": is_key,
        "BITS": bits,
        "RMS": unit_rms(bits) if bits < 8 else 1.0,
        "DIM": dim,
        "PADDED": padded(dim),
        "BLOCK": block,
        "CODES": codes,
        "SCALES": scales,
        "TOKENS": TOKENS,
        "CANDIDATES": CANDIDATES,
        "SCRATCH": scratch_size(dim),
        # As many as keep everything in registers; more would repeat the lanes.
        "num_warps": 8 if dim > 128 else 4 if dim > 64 else 2,
        "num_stages": 1,
        "maxnreg": MOST_REGISTERS,
    }

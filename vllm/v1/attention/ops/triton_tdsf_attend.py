# SPDX-License-Identifier: Apache-2.0
"""Attention over stored TDSF codes, in Triton: decode, speculative decode and prefill.

Decoding is bound by the bytes of the cache, so a tile stacks all query heads of a kv head, for as
many query tokens of a request as fit, into one matrix product: codes are read once, become fp16
levels by a table, and meet the tensor cores. Sequences are split so that few requests fill the
machine. Three kernels:

    turn     z = query_in q, as fp16 with a unit per row; once per query
    attend   softmax over one split of the cached tokens; not normalised
    merge    splits in order, sinks, normalisation, and value_out

A byte holds 8 / bits codes of coordinates (keys) or tokens (values) 4 apart. Instead of putting
them in order, each such slice multiplies its own slice of the query or of the weights.

Weights are kept relative to the largest of exp(score) * value scale, not of exp(score): they are
in 0 ... 1 whatever the scales, which fp16 wants, and a row's weights depend on no other row.
"""

import torch
import triton
import triton.language as tl

from vllm.turboquant.formats import Format
from vllm.v1.attention.ops.triton_tdsf_constants import MOST_REGISTERS, DeviceConstants, padded

MOST_ROWS = 32
"""Rows of a tile, at most: more would not fit the registers at every head_dim."""

SPLIT_TOKENS = 256
"""A split has at least so many tokens, where the sequence has."""

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["rows"])
def turn_kernel(
    query_ptr,  # [T, Hq, D]
    matrix_ptr,  # [H, D, D], input by output
    center_ptr,  # [H, D]
    z_ptr,  # fp16 [T, Hq, D]
    unit_ptr,  # [T, Hq]: what the score of z and a level is worth
    bias_ptr,  # [T, Hq]: scale * q . center
    rows,  # T * GROUP
    scale,
    stride_token,
    stride_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    TURN: tl.constexpr = 16 if DIM % 32 else 32
    head = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = row < rows
    token = (row // GROUP).to(tl.int64)
    query_head = head * GROUP + row % GROUP
    at = query_ptr + token * stride_token + query_head * stride_head
    columns = tl.arange(0, PADDED)
    inside = columns < DIM
    z = tl.zeros([ROWS, PADDED], tl.float32)
    bias = tl.zeros([ROWS], tl.float32)
    for i in range(0, DIM, TURN):
        d = i + tl.arange(0, TURN)
        q = tl.load(at[:, None] + d[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
        turn = tl.load(
            matrix_ptr + (head * DIM + d)[:, None] * DIM + columns[None, :],
            mask=inside[None, :],
            other=0.0,
        )
        z = tl.dot(q, turn, z, input_precision="tf32x3")
        bias += tl.sum(q * tl.load(center_ptr + head * DIM + d)[None, :], 1)
    largest = tl.max(tl.abs(z), 1)
    inverse = tl.where(largest > 1e-30, 1.0 / largest, 0.0)
    out = token * (HEADS * GROUP) + query_head
    tl.store(
        z_ptr + out[:, None] * DIM + columns[None, :],
        (z * inverse[:, None]).to(tl.float16),
        mask=valid[:, None] & inside[None, :],
    )
    # A NaN or infinite query gives a NaN unit, hence a NaN row, and disturbs no other.
    broken = tl.sum(z * 0.0, 1)
    tl.store(unit_ptr + out, largest * scale + broken, mask=valid)
    tl.store(bias_ptr + out, bias * scale, mask=valid)


@triton.jit
def _find_request(starts_ptr, tile, requests, PER: tl.constexpr):
    """The request that tile number `tile` belongs to; request r's tiles begin at
    starts[r] // PER + r, which leaves room for all of them whatever the batch."""
    low, high = 0, requests - 1
    while low < high:
        middle = (low + high + 1) // 2
        begins = tl.load(starts_ptr + middle) // PER + middle
        if begins <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _regions(
    table_ptr, first, last, stride_block, BLOCK: tl.constexpr, STEP: tl.constexpr, N: tl.constexpr
):
    """Where N runs of STEP tokens lie from token `first` on: bytes to their block, and tokens
    into it. Runs past token `last` are not read through the table."""
    token = first + tl.arange(0, N) * STEP
    block = tl.load(table_ptr + token // BLOCK, mask=token <= last, other=0)
    return block.to(tl.int64) * stride_block, token % BLOCK


@triton.jit
def _scales(codes_at, tokens, numbers, step):
    """log2 of the tokens' scales: of the prior, and of the byte on top of it."""
    amplitude, decay, floor = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    prior = amplitude * tl.exp(-decay * tokens.to(tl.float32)) + floor
    return tl.log2(prior) + (tl.load(codes_at).to(tl.float32) - 128.0) * step


@triton.jit
def _level(code, table, d, BITS: tl.constexpr):
    """fp16 levels of codes whose coordinates are d (broadcast)."""
    if BITS == 8:
        return (code.to(tl.int16) - 128).to(tl.float16)
    return tl.load(table + d // 16 * 16 + code.to(tl.int32))


@triton.jit
def _key_bytes(
    at, offset, ROW_BYTES: tl.constexpr, UNITS: tl.constexpr, REAL: tl.constexpr, HALF: tl.constexpr
):
    """Bytes [4 UNITS, tokens] of a plane of keys: each unit is 64 bytes, 16 tokens by 4.

    at, offset: [tokens / 16] region and token offset. ROW_BYTES: of 16 tokens. REAL: units that
    exist. HALF: two units share the same bytes.
    """
    CHUNKS: tl.constexpr = at.shape[0]
    x = tl.arange(0, UNITS * 64)
    within = (x // 128 * 64 + x % 64) if HALF else x
    data = tl.load(
        (at + offset // 16 * ROW_BYTES)[:, None] + within[None, :],
        mask=(x < REAL * 64)[None, :],
        other=0,
    )
    data = tl.permute(tl.reshape(data, [CHUNKS, UNITS, 16, 4]), [1, 3, 0, 2])
    return tl.reshape(data, [UNITS * 4, CHUNKS * 16])


@triton.jit
def _value_bytes(at, offset, STEP: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr):
    """Bytes [4 runs, P] of a plane of values: 4 neighbouring bytes are tokens.

    at, offset: [runs] region and token offset. STEP: tokens that share 4 * DIM bytes.
    """
    RUNS: tl.constexpr = at.shape[0]
    x = tl.arange(0, PADDED * 4)
    data = tl.load(
        (at + offset // STEP * (4 * DIM))[:, None] + x[None, :], mask=(x < 4 * DIM)[None, :], other=0
    )
    data = tl.permute(tl.reshape(data, [RUNS, PADDED, 4]), [0, 2, 1])
    return tl.reshape(data, [RUNS * 4, PADDED])


@triton.jit
def _slice_weights(w, SLICES: tl.constexpr):
    """Weights [ROWS, T] as SLICES tensors [ROWS, T / SLICES]: tokens 4 apart, in stored order."""
    ROWS: tl.constexpr = w.shape[0]
    T: tl.constexpr = w.shape[1]
    if SLICES == 1:
        return (w,)
    elif SLICES == 2:
        w = tl.permute(tl.reshape(w, [ROWS, T // 8, 2, 4]), [0, 1, 3, 2])
        a, b = tl.split(tl.reshape(w, [ROWS, T // 2, 2]))
        return (a, b)
    else:
        w = tl.permute(tl.reshape(w, [ROWS, T // 16, 2, 2, 4]), [0, 1, 4, 2, 3])
        even, odd = tl.split(tl.reshape(w, [ROWS, T // 4, 2, 2]))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        return (a, b, c, d)


@triton.jit
def _cap(score, softcap):
    x = tl.minimum(score * (2.0 / softcap), 80.0)
    return softcap * (1.0 - 2.0 / (tl.exp(x) + 1.0))


@triton.jit(do_not_specialize=["requests", "splits", "window_left"])
def attend_kernel(
    z_ptr,  # fp16 [T, Hq, D]
    unit_ptr,  # [T, Hq]
    bias_ptr,  # [T, Hq]
    cache_ptr,  # uint8 [B, H, N, C]
    table_ptr,  # int32 [R, M]
    starts_ptr,  # int32 [R + 1]
    lengths_ptr,  # int32 [R]
    levels_ptr,  # fp16 [2, H, P / 16, 16]
    tdsf_ptr,  # [H, 6]
    step_ptr,  # [2]
    acc_ptr,  # [T, Hq, S, D]
    max_ptr,  # [T, Hq, S], base 2
    sum_ptr,  # [T, Hq, S]
    requests,
    splits,
    table_stride,
    stride_block,
    stride_head,
    window_left,
    softcap,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    KEY_SCALES: tl.constexpr,
    VALUE_SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BIAS: tl.constexpr,
):
    PER: tl.constexpr = ROWS // GROUP
    KEY_SLICES: tl.constexpr = 8 // KEY_BITS if KEY_BITS != 3 else 4
    VALUE_SLICES: tl.constexpr = 8 // VALUE_BITS if VALUE_BITS != 3 else 4
    KEY_WIDTH: tl.constexpr = PADDED // KEY_SLICES
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request = _find_request(starts_ptr, tile, requests, PER)
    start = tl.load(starts_ptr + request)
    count = tl.load(starts_ptr + request + 1) - start
    begin = (tile - (start // PER + request)) * PER  # the tile's first query token
    if begin >= count:
        return
    length = tl.load(lengths_ptr + request)
    row = tl.arange(0, ROWS)
    query = begin + row // GROUP
    valid = (row < PER * GROUP) & (query < count)
    position = length - count + query
    out = (start + query) * (HEADS * GROUP) + head * GROUP + row % GROUP
    last = length - count + tl.minimum(begin + PER, count) - 1
    first = 0
    if WINDOW:
        first = tl.maximum(length - count + begin - window_left, 0)

    # This split's share of the steps of TOKENS tokens.
    steps = last // TOKENS + 1 - first // TOKENS
    share = tl.maximum(tl.cdiv(steps, splits), SPLIT_TOKENS // TOKENS)
    step = first // TOKENS + split * share
    end = tl.minimum(step + share, last // TOKENS + 1)

    table_ptr += request * table_stride
    cache_ptr += head.to(tl.int64) * stride_head
    key_table = levels_ptr + head * PADDED
    value_table = levels_ptr + (HEADS + head) * PADDED
    numbers = tdsf_ptr + head * 6
    key_step, value_step = tl.load(step_ptr), tl.load(step_ptr + 1)

    # Slice j of a key's byte c holds coordinate d: c counts 4 of every 4 * KEY_SLICES.
    column = tl.arange(0, KEY_WIDTH)
    key_dims = column // 4 * (4 * KEY_SLICES) + column % 4
    columns = tl.arange(0, PADDED)
    z = ()
    for j in tl.static_range(KEY_SLICES):
        d = key_dims + 4 * j
        z_slice = tl.load(
            z_ptr + out.to(tl.int64)[:, None] * DIM + d[None, :],
            mask=valid[:, None] & (d < DIM)[None, :],
            other=0.0,
        )
        z = z + (z_slice,)
    unit = tl.load(unit_ptr + out, mask=valid, other=0.0)
    bias = tl.zeros([ROWS], tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + out, mask=valid, other=0.0)

    # The sequence's first token is kept as fp16 z, beside the codes: the initial state.
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED], tl.float32)
    if step == 0:
        block = tl.load(table_ptr).to(tl.int64)
        slot = (cache_ptr + block * stride_block).to(tl.pointer_type(tl.float16), bitcast=True)
        score = tl.zeros([ROWS], tl.float32)
        for j in tl.static_range(KEY_SLICES):
            d = key_dims + 4 * j
            key = tl.load(slot + d, mask=d < DIM, other=0.0).to(tl.float32)
            score += tl.sum(z[j].to(tl.float32) * key[None, :], 1)
        score = score * unit + bias
        if SOFTCAP:
            score = _cap(score, softcap)
        sees = valid
        if WINDOW:
            sees = sees & (position <= window_left)
        value = tl.load(slot + DIM + columns, mask=columns < DIM, other=0.0).to(tl.float32)
        top = tl.where(sees, score * LOG2E, top)
        total = tl.where(sees, 1.0, total)
        acc = tl.where(sees[:, None], value[None, :], acc)

    for s in range(step, end):
        token = s * TOKENS + tl.arange(0, TOKENS)
        seen = (token[None, :] <= position[:, None]) & (token > 0)[None, :]
        if WINDOW:
            seen = seen & (token[None, :] >= position[:, None] - window_left)

        # Scores.
        at, offset = _regions(table_ptr, s * TOKENS, last, stride_block, BLOCK, 16, TOKENS // 16)
        at = cache_ptr + KEYS + at
        score = tl.zeros([ROWS, TOKENS], tl.float32)
        if KEY_BITS == 3:
            low = _key_bytes(at, offset, 4 * DIM, PADDED // 16, DIM // 16, False)
            high = _key_bytes(
                *(at + BLOCK * DIM // 4, offset, 64 * ((DIM + 31) // 32)),
                *(PADDED // 16, DIM // 16, True),
            )
            high = high >> (column // 4 % 2 * 4).to(tl.uint8)[:, None]
            for j in tl.static_range(4):
                code = ((low >> (2 * j)) & 3) | (((high >> j) & 1) << 2)
                key = _level(code, key_table, (key_dims + 4 * j)[:, None], 3)
                score = tl.dot(z[j], key, score)
        else:
            data = _key_bytes(
                *(at, offset, 2 * KEY_BITS * DIM, KEY_WIDTH // 4, DIM // (4 * KEY_SLICES), False)
            )
            for j in tl.static_range(KEY_SLICES):
                code = (data >> (4 * j)) & 15 if KEY_BITS == 4 else data
                key = _level(code, key_table, (key_dims + 4 * j)[:, None], KEY_BITS)
                score = tl.dot(z[j], key, score)
        at, offset = _regions(table_ptr, s * TOKENS, last, stride_block, BLOCK, 1, TOKENS)
        key_scale = _scales(cache_ptr + KEY_SCALES + at + offset, token, numbers, key_step)
        value_scale = _scales(
            cache_ptr + VALUE_SCALES + at + offset, token, numbers + 3, value_step
        )
        score = score * tl.exp2(key_scale)[None, :] * unit[:, None] + bias[:, None]
        if SOFTCAP:
            score = _cap(score, softcap)

        # Weights, relative to the largest of exp(score) * value scale.
        score = tl.where(seen, score * LOG2E + value_scale[None, :], float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weight * tl.exp2(-value_scale)[None, :], 1)
        acc = acc * shrink[:, None]
        top = higher

        # The mix of values.
        w = _slice_weights(weight.to(tl.float16), VALUE_SLICES)
        RUN: tl.constexpr = 4 * VALUE_SLICES
        at, offset = _regions(
            table_ptr, s * TOKENS, last, stride_block, BLOCK, RUN, TOKENS // RUN
        )
        at = cache_ptr + VALUES + at
        data = _value_bytes(at, offset, RUN, PADDED, DIM)
        if VALUE_BITS == 3:
            high = _value_bytes(at + BLOCK * DIM // 4, offset, 32, PADDED, DIM)
            # Runs of 16 tokens are the lower or the upper half of the plane's 32.
            half = tl.arange(0, TOKENS // 4) // 4 % 2 * 4
            high = high >> half.to(tl.uint8)[:, None]
            for j in tl.static_range(4):
                code = ((data >> (2 * j)) & 3) | (((high >> j) & 1) << 2)
                acc = tl.dot(w[j], _level(code, value_table, columns[None, :], 3), acc)
        else:
            for j in tl.static_range(VALUE_SLICES):
                code = (data >> (4 * j)) & 15 if VALUE_BITS == 4 else data
                acc = tl.dot(w[j], _level(code, value_table, columns[None, :], VALUE_BITS), acc)

    # Where the rows lie is read and computed again: kept, it would spill beside the loop's registers.
    start = tl.load(starts_ptr + request, volatile=True)
    count = tl.load(starts_ptr + request + 1, volatile=True) - start
    query = begin + row // GROUP
    valid = (row < PER * GROUP) & (query < count)
    out = (start + query).to(tl.int64) * (HEADS * GROUP) + head * GROUP + row % GROUP
    part = out * splits + split
    tl.store(max_ptr + part, top, mask=valid)
    tl.store(sum_ptr + part, total, mask=valid)
    held = valid[:, None] & (top > float("-inf"))[:, None] & (columns < DIM)[None, :]
    tl.store(acc_ptr + part[:, None] * DIM + columns[None, :], acc, mask=held)


@triton.jit(do_not_specialize=["rows", "splits"])
def merge_kernel(
    acc_ptr,  # [T, Hq, S, D]
    max_ptr,  # [T, Hq, S], base 2
    sum_ptr,  # [T, Hq, S]
    matrix_ptr,  # [H, D, D], input by output
    sinks_ptr,  # [Hq]
    out_ptr,  # [T, Hq, D]
    rows,  # T * GROUP
    splits,
    stride_token,
    stride_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    SINKS: tl.constexpr,
):
    TURN: tl.constexpr = 16 if DIM % 32 else 32
    head = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = row < rows
    token = (row // GROUP).to(tl.int64)
    query_head = head * GROUP + row % GROUP
    part = (token * (HEADS * GROUP) + query_head) * splits
    top = tl.full([ROWS], float("-inf"), tl.float32)
    for s in range(0, splits):
        here = tl.load(max_ptr + part + s, mask=valid, other=float("-inf"))
        top = tl.maximum(top, here, propagate_nan=tl.PropagateNan.ALL)
    sink = tl.full([ROWS], float("-inf"), tl.float32)
    if SINKS:
        sink = tl.load(sinks_ptr + query_head) * LOG2E
        top = tl.maximum(top, sink)
    total = tl.where(sink > float("-inf"), tl.exp2(sink - top), 0.0)
    for s in range(0, splits):
        here = tl.load(max_ptr + part + s, mask=valid, other=float("-inf"))
        share = tl.load(sum_ptr + part + s, mask=valid, other=0.0)
        total += tl.where(here > float("-inf"), tl.exp2(here - top), 0.0) * share

    columns = tl.arange(0, PADDED)
    inside = columns < DIM
    result = tl.zeros([ROWS, PADDED], tl.float32)
    for i in range(0, DIM, TURN):
        d = i + tl.arange(0, TURN)
        mixed = tl.zeros([ROWS, TURN], tl.float32)
        for s in range(0, splits):
            here = tl.load(max_ptr + part + s, mask=valid, other=float("-inf"))
            held = here > float("-inf")
            acc = tl.load(
                acc_ptr + (part + s)[:, None] * DIM + d[None, :], mask=held[:, None], other=0.0
            )
            mixed += tl.where(held, tl.exp2(here - top), 0.0)[:, None] * acc
        matrix = tl.load(
            matrix_ptr + (head * DIM + d)[:, None] * DIM + columns[None, :],
            mask=inside[None, :],
            other=0.0,
        )
        result = tl.dot(mixed / total[:, None], matrix, result, input_precision="tf32x3")
    at = out_ptr + token * stride_token + query_head * stride_head
    tl.store(
        at[:, None] + columns[None, :],
        result.to(out_ptr.dtype.element_ty),
        mask=valid[:, None] & inside[None, :],
    )


def tile_rows(group: int, longest_query: int, dim: int, fmt: Format) -> int:
    """Rows of a tile: those of one request where they fit; 16 fill a matrix product.

    The widest heads with 3-bit values stay at 16: of 32 some variants spill.
    """
    most = 16 if fmt.value_bits == 3 and padded(dim) == 256 else MOST_ROWS
    return min(most, max(16, triton.next_power_of_2(group * longest_query)))


def step_tokens(value_bits: int) -> int:
    """Cached tokens of one step: a slice of a byte of values must fill a matrix product."""
    return 64 if value_bits == 3 else 32


def splits_for(tiles: int, heads: int, processors: int) -> int:
    """Into how many parts sequences are cut so that there are about 4 programs a processor."""
    wanted = max(1, 4 * processors // max(tiles * heads, 1))
    return min(32, 1 << (wanted.bit_length() - 1))


def attend_warps(rows: int, dim: int, fmt: Format) -> int:
    """Warps of a program, as many as keep everything in registers."""
    return 8 if rows * padded(dim) * step_tokens(fmt.value_bits) > 16 * 256 * 32 else 4


def attend_options(
    fmt: Format,
    *,
    heads: int,
    group: int,
    dim: int,
    block: int,
    rows: int,
    window: bool = False,
    softcap: bool = False,
    sinks: bool = False,
) -> dict:
    """What `attend_kernel` is compiled for."""
    at = fmt.regions(dim, block)
    return {
        "HEADS": heads,
        "GROUP": group,
        "DIM": dim,
        "PADDED": padded(dim),
        "BLOCK": block,
        "KEY_BITS": fmt.key_bits,
        "VALUE_BITS": fmt.value_bits,
        "KEYS": at.keys,
        "VALUES": at.values,
        "KEY_SCALES": at.key_scales,
        "VALUE_SCALES": at.value_scales,
        "ROWS": rows,
        "TOKENS": step_tokens(fmt.value_bits),
        "SPLIT_TOKENS": SPLIT_TOKENS,
        "WINDOW": window,
        "SOFTCAP": softcap,
        "BIAS": softcap or sinks,
        "num_warps": attend_warps(rows, dim, fmt),
        "num_stages": 1,
        "maxnreg": MOST_REGISTERS,
    }


def turn_options(heads: int, group: int, dim: int) -> dict:
    """What `turn_kernel` is compiled for, and `merge_kernel` beside its own."""
    return {
        "HEADS": heads,
        "GROUP": group,
        "DIM": dim,
        "PADDED": padded(dim),
        "ROWS": 16,
        "num_warps": 4,
        "num_stages": 2,
        "maxnreg": MOST_REGISTERS,
    }


def attend(
    constants: DeviceConstants,
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    longest_query: int,
    scale: float,
    splits: int,
    softcap: float = 0.0,
    window_left: int = -1,
    sinks: torch.Tensor | None = None,
) -> None:
    """Causal attention of query [T, Hq, D] over the cached sequences, written into `out`.

    Arguments are those of `vllm.turboquant.kernels.attend`, on the device of the cache, and
    longest_query: at least the query tokens of any request, known on the host. splits: into how
    many parts a sequence is cut; with 1 a row's bits depend on its sequence alone for one
    longest_query. Nothing waits for the device, and the workspace depends on T only.
    """
    tokens, query_heads, dim = query.shape
    heads, block = cache.shape[1], cache.shape[2]
    group, requests = query_heads // heads, seq_lens.shape[0]
    if tokens == 0 or requests == 0:
        return
    device = query.device
    rows = tile_rows(group, longest_query, dim, constants.format)
    tiles = tokens // (rows // group) + requests
    z = torch.empty(tokens, query_heads, dim, dtype=torch.float16, device=device)
    unit, bias = torch.empty(2, tokens, query_heads, device=device)
    acc = torch.empty(tokens, query_heads, splits, dim, device=device)
    maximum, total = torch.empty(2, tokens, query_heads, splits, device=device)
    turned = turn_options(heads, group, dim)
    row_grid = (triton.cdiv(tokens * group, turned["ROWS"]), heads)
    turn_kernel[row_grid](
        *(query, constants.query_in, constants.center[0], z, unit, bias),
        *(tokens * group, scale, query.stride(0), query.stride(1)),
        **turned,
    )
    attend_kernel[(tiles, heads, splits)](
        *(z, unit, bias, cache, block_table, query_start_loc, seq_lens),
        *(constants.levels, constants.tdsf, constants.step, acc, maximum, total),
        *(requests, splits, block_table.stride(0), cache.stride(0), cache.stride(1)),
        *(window_left, softcap),
        **attend_options(
            constants.format,
            heads=heads,
            group=group,
            dim=dim,
            block=block,
            rows=rows,
            window=window_left >= 0,
            softcap=softcap > 0,
            sinks=sinks is not None,
        ),
    )
    merge_kernel[row_grid](
        *(acc, maximum, total, constants.value_out, sinks if sinks is not None else unit, out),
        *(tokens * group, splits, out.stride(0), out.stride(1)),
        **turned,
        SINKS=sinks is not None,
    )

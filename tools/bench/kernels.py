# SPDX-License-Identifier: Apache-2.0
"""Attention kernels: ours against upstream's own CPU attention, in one process and run.

Decode (8 sequences of 4,096 tokens, one of 32,768) and prefill (2,048 rows into a context of 8,192)
for the head shapes of three models; encode-and-store of 2,048 tokens. Each timing is the median of
interleaved calls. Every result of ours is checked against the torch reference before it is timed.
"""

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tools.cache import write_whole
from tools.errors import Problem

BLOCK = 128
STORED = 2048  # tokens of a timed store
TOLERANCE = 0.03
SAME_BYTES = 0.95  # codes differ where a coordinate lies on a decision boundary
SECONDS_PER_ROUND = 0.6


@dataclass(frozen=True)
class Shape:
    """A batch of equal sequences: `rows` new query rows each, `length` tokens cached."""

    model: str
    query_heads: int
    kv_heads: int
    dim: int
    batch: int
    rows: int
    length: int

    @property
    def label(self) -> str:
        kind = "decode" if self.rows == 1 else f"prefill {self.rows}"
        heads = f"{self.query_heads}/{self.kv_heads}, {self.dim}"
        return f"{kind} B={self.batch} T={self.length} ({heads})"


MODELS = (("Qwen3.6-27B", 24, 4, 256), ("Qwen3-0.6B", 16, 8, 128), ("SmolLM2-135M", 9, 3, 64))
BATCHES = ((8, 1, 4096), (1, 1, 32768), (1, 2048, 8192))
SHAPES = [Shape(*model, *batch) for batch in BATCHES for model in MODELS]


class Batch:
    """The tensors that both kernels take for a shape."""

    def __init__(self, shape: Shape) -> None:
        blocks = shape.length // BLOCK
        self.shape = shape
        self.starts = torch.arange(shape.batch + 1, dtype=torch.int32) * shape.rows
        self.lengths = torch.full((shape.batch,), shape.length, dtype=torch.int32)
        self.table = torch.randperm(shape.batch * blocks).int().view(shape.batch, blocks)
        self.query = torch.randn(shape.batch * shape.rows, shape.query_heads, shape.dim)
        self.scale = shape.dim**-0.5


def ours(name: str, batch: Batch) -> tuple[Callable[[], None], int]:
    """A call of our kernel over a freshly stored cache, checked; and the bytes it reads."""
    from vllm.turboquant import kernels, reference
    from vllm.turboquant.constants import uncalibrated
    from vllm.turboquant.formats import FORMATS

    shape, fmt = batch.shape, FORMATS[name]
    constants = uncalibrated(fmt, shape.kv_heads, shape.dim)
    blocks = batch.table.numel()
    content = fmt.content_bytes(shape.dim, BLOCK)
    cache = torch.zeros(blocks, shape.kv_heads, BLOCK, content, dtype=torch.uint8)
    position = torch.arange(shape.length)
    for row in batch.table.long():
        key, value = torch.randn(2, shape.length, shape.kv_heads, shape.dim)
        slots = row[position // BLOCK] * BLOCK + position % BLOCK
        kernels.store(fmt, constants, key, value, cache, slots, position)
    out = torch.empty_like(batch.query)

    def call() -> None:
        kernels.attend(
            *(fmt, constants, batch.query, cache, batch.table, batch.starts, batch.lengths, out),
            scale=batch.scale,
        )

    call()
    # The last row of the first sequence, first kv head: enough to see a wrong kernel.
    group = shape.query_heads // shape.kv_heads
    last = shape.rows - 1
    want = reference.attend(
        *(fmt, constants.heads(0, 1), batch.query[last : last + 1, :group], cache[:, :1]),
        *(batch.table[:1], torch.tensor([0, 1]), batch.lengths[:1]),
        scale=batch.scale,
    )
    error = float((out[last, :group].double() - want[0]).norm() / want.norm())
    if not error < TOLERANCE:
        raise Problem(
            f"the kernel's result is wrong: relative error {error:.3f}",
            f"{name}, {shape.label}, variant {kernels.isa()}",
            "run the tests of tests/kernels",
        )
    return call, cache.numel()


def store(name: str, kv_heads: int, dim: int) -> Callable[[], None]:
    """A call that encodes and stores STORED tokens of one layer; checked on its first block."""
    from vllm.turboquant import kernels, reference
    from vllm.turboquant.constants import uncalibrated
    from vllm.turboquant.formats import FORMATS

    fmt = FORMATS[name]
    # A calibrated layer rounds with feedback, whatever its numbers: half of what storing costs.
    feedback = torch.eye(dim) + torch.randn(kv_heads, dim, dim).triu(1) / dim
    constants = replace(
        uncalibrated(fmt, kv_heads, dim), key_feedback=feedback, value_feedback=feedback
    )
    size = (STORED // BLOCK, kv_heads, BLOCK, fmt.content_bytes(dim, BLOCK))
    cache = torch.zeros(size, dtype=torch.uint8)
    key, value = torch.randn(2, STORED, kv_heads, dim)
    slots = torch.arange(STORED)

    def call() -> None:
        kernels.store(fmt, constants, key, value, cache, slots, slots)

    call()
    want = torch.zeros_like(cache[:1])
    first = slots[:BLOCK]
    reference.store(fmt, constants, key[:BLOCK], value[:BLOCK], want, first, first)
    same = float((want == cache[:1]).double().mean())
    if same < SAME_BYTES:
        raise Problem(
            f"the kernel stores something else: {same:.1%} of the bytes are the reference's",
            f"{name}, {kv_heads} kv heads of {dim}, variant {kernels.isa()}",
            "run the tests of tests/kernels",
        )
    return call


def measure_store(model: tuple, formats: list[str], rounds: int) -> dict:
    """Encode-and-store of one layer of a model, nanoseconds per token, keys and values."""
    title, _, kv_heads, dim = model
    found = medians({name: [store(name, kv_heads, dim)] for name in formats}, rounds)
    cost = {name: ms * 1e6 / STORED for name, ms in found.items()}
    return {"model": title, "kv_heads": kv_heads, "dim": dim, "ns_per_token": cost}


def upstream(dtype: torch.dtype, batch: Batch) -> list[Callable[[], None]]:
    """Calls of upstream's kernel, without and with its split of the sequence."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    shape = batch.shape
    size = (batch.table.numel(), shape.kv_heads, BLOCK, shape.dim)
    key_cache, value_cache = torch.randn(size).to(dtype), torch.randn(size).to(dtype)
    query = batch.query.to(dtype)
    out = torch.empty_like(query)

    def made(split: bool) -> Callable[[], None]:
        plan = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=shape.batch,
            num_heads=shape.query_heads,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.dim,
            seq_lens=batch.lengths,
            dtype=dtype,
            query_start_loc=batch.starts,
            causal=True,
            sliding_window_size=-1,
            isa=_get_attn_isa(dtype, BLOCK, head_size=shape.dim),
            enable_kv_split=split,
        )
        return lambda: ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=key_cache,
            value_cache=value_cache,
            output=out,
            query_start_loc=batch.starts,
            seq_lens=batch.lengths,
            scale=batch.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=batch.table,
            softcap=0.0,
            scheduler_metadata=plan,
            s_aux=None,
        )

    return [made(False), made(True)]


def timed(call: Callable[[], None]) -> float:
    """Milliseconds of one call."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def medians(calls: dict[str, list[Callable[[], None]]], rounds: int) -> dict[str, float]:
    """The median of each name's fastest variant, milliseconds; calls are interleaved."""
    for variants in calls.values():
        for call in variants:
            call()
    repeats = {
        name: max(1, min(20, int(SECONDS_PER_ROUND * 1e3 / len(calls) / timed(variants[0]))))
        for name, variants in calls.items()
    }
    times = {name: [[] for _ in variants] for name, variants in calls.items()}
    for _ in range(rounds):
        for name, variants in calls.items():
            for call, found in zip(variants, times[name]):
                found.extend(timed(call) for _ in range(repeats[name]))
    return {name: min(map(statistics.median, found)) for name, found in times.items()}


def read_bandwidth() -> float:
    """GB/s that all threads together read from memory."""
    data = torch.ones(1 << 26, dtype=torch.int64)
    return data.numel() * 8 / min(timed(data.sum) for _ in range(5)) / 1e6


def measure(shape: Shape, formats: list[str], rounds: int, bandwidth: float) -> dict:
    """One row of the table."""
    batch = Batch(shape)
    calls = {
        "upstream_bf16": upstream(torch.bfloat16, batch),
        "upstream_fp32": upstream(torch.float32, batch),
    }
    read = {}
    for name in formats:
        call, read[name] = ours(name, batch)
        calls[name] = [call]
    found = medians(calls, rounds)
    bf16, fp32 = found.pop("upstream_bf16"), found.pop("upstream_fp32")
    return {
        "shape": shape.label,
        "model": shape.model,
        "kind": "decode" if shape.rows == 1 else "prefill",
        "upstream_bf16_ms": bf16,
        "upstream_fp32_ms": fp32,
        "ours_ms": found,
        "ratio_vs_upstream_bf16": {name: bf16 / ms for name, ms in found.items()},
        "ratio_vs_upstream_fp32": {name: fp32 / ms for name, ms in found.items()},
        "share_of_read_bandwidth": {
            name: read[name] / ms / 1e6 / bandwidth for name, ms in found.items()
        },
    }


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def as_line(row: dict) -> str:
    cells = "  ".join(
        f"{name.removeprefix('tdsf_')} {ms:.2f} ({row['ratio_vs_upstream_bf16'][name]:.1f}x)"
        for name, ms in row["ours_ms"].items()
    )
    upstream_times = f"{row['upstream_bf16_ms']:8.2f} {row['upstream_fp32_ms']:8.2f}"
    return f"{row['shape']:38} {upstream_times}  {cells}"


def choose_instruction_set(name: str) -> None:
    """Both sides as on a machine that has no more than `name`; before vLLM is imported."""
    if name == "auto":
        return
    os.environ["VLLM_TQ_ISA"] = name
    if not name.startswith("avx512"):  # upstream then loads its AVX2 build
        torch.cpu._is_avx512_supported = lambda: False
        torch.cpu._is_avx512_bf16_supported = lambda: False


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench kernels", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--formats", help="comma-separated; all by default")
    parser.add_argument("--shapes", help="only shapes whose label contains this text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--isa", default="auto", help="auto, or a name of VLLM_TQ_ISA")
    options = parser.parse_args(arguments)
    choose_instruction_set(options.isa)
    from vllm.turboquant import kernels
    from vllm.turboquant.formats import FORMATS

    formats = options.formats.split(",") if options.formats else list(FORMATS)
    if unknown := set(formats) - set(FORMATS):
        raise Problem(
            f"no format is called {', '.join(unknown)}", "--formats", f"one of {', '.join(FORMATS)}"
        )
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    bandwidth = read_bandwidth()
    print(f"variant {kernels.isa()}, {options.threads} threads, memory reads {bandwidth:.1f} GB/s")
    print(f"{'milliseconds (ratio to upstream bf16)':38} {'up bf16':>8} {'up fp32':>8}  ours")
    rows = []
    for shape in SHAPES:
        if options.shapes and options.shapes not in shape.label:
            continue
        rows.append(measure(shape, formats, options.rounds, bandwidth))
        print(as_line(rows[-1]), flush=True)
    stores = []
    for model in MODELS:
        heads = f"({model[2]}, {model[3]})"
        if options.shapes and options.shapes not in f"store {heads}":
            continue
        stores.append(measure_store(model, formats, options.rounds))
        cost = stores[-1]["ns_per_token"].items()
        cells = "  ".join(f"{name.removeprefix('tdsf_')} {ns:.0f}" for name, ns in cost)
        print(f"store {heads}, ns per token and layer:  {cells}", flush=True)
    decode = [row["ratio_vs_upstream_bf16"] for row in rows if row["kind"] == "decode"]
    means = {
        name: geometric_mean([ratios[name] for ratios in decode]) for name in formats if decode
    }
    for name, mean in means.items():
        print(f"decode, geometric mean over upstream bf16: {name} {mean:.2f}x")
    if options.json:
        report = {
            "variant": kernels.isa(),
            "threads": options.threads,
            "read_bandwidth_gb_s": bandwidth,
            "geomean_vs_upstream_bf16": means,
            "shapes": rows,
            "store": stores,
        }
        write_whole(options.json, json.dumps(report, indent=2) + "\n")
    return 0

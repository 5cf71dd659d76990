# SPDX-License-Identifier: Apache-2.0
"""GPU kernels: checked against the reference, then timed; `--model`: predicted, without a GPU.

Needs a checkout, torch and Triton; no vLLM. Where a vLLM is installed, upstream's own TurboQuant
kernel is timed too. Without a GPU a tiny grid runs under Triton's interpreter: it shows that the
script works and times nothing.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.cache import write_whole
from tools.errors import Problem

BLOCK = 128
SECONDS = 440
"""No new shape is begun after so long."""

BANDWIDTH = {"A100 80GB": 2039, "RTX 4090": 1008, "H100 SXM": 3350, "H200": 4800}
"""GB/s of device memory, from the vendor's data sheets."""

TOLERANCE = 2e-3


@dataclass(frozen=True)
class Heads:
    """The attention of one model: layers that have a cache, and their heads."""

    model: str
    layers: int
    query_heads: int
    kv_heads: int
    dim: int


MODELS = (
    Heads("Qwen3.6-27B", 16, 24, 4, 256),
    Heads("Qwen3-8B", 36, 32, 8, 128),
    Heads("Qwen3-0.6B", 28, 16, 8, 128),
    Heads("SmolLM2-135M", 30, 9, 3, 64),
)


# ---- predictions -----------------------------------------------------------------------------


def token_bytes(heads: Heads, name: str) -> int:
    """Bytes of one cached token that decoding reads in one layer: codes and scales, all heads."""
    from vllm.turboquant.formats import FORMATS, code_bytes

    if name == "bf16":
        return heads.kv_heads * 4 * heads.dim
    fmt = FORMATS[name]
    sides = (code_bytes(bits, heads.dim) for bits in (fmt.key_bits, fmt.value_bits))
    return heads.kv_heads * (sum(sides) + 2)


def predictions(batch: int, context: int) -> list[dict]:
    """The least time that reading the cache takes in one decode step, per model and format."""
    from vllm.turboquant.formats import FORMATS

    rows = []
    for heads in MODELS:
        for name in ("bf16", *FORMATS):
            size = token_bytes(heads, name) * heads.layers
            times = {gpu: batch * context * size / (gb * 1e6) for gpu, gb in BANDWIDTH.items()}
            rows.append(
                {"model": heads.model, "cache": name, "bytes_per_token": size, "least_ms": times}
            )
    return rows


def print_predictions(batch: int, context: int) -> list[dict]:
    rows = predictions(batch, context)
    print(
        f"PREDICTED, not measured: bytes of a cached token over all layers, and the least time to\n"
        f"read {batch} x {context:,} of them at the data sheet's bandwidth, in ms per decode step.\n"
        "Measured kernels reach a part of it."
    )
    print(f"{'model':14} {'cache':10} {'bytes':>8}", *(f"{gpu:>10}" for gpu in BANDWIDTH))
    for row in rows:
        times = (f"{ms:10.2f}" for ms in row["least_ms"].values())
        print(f"{row['model']:14} {row['cache']:10} {row['bytes_per_token']:8}", *times)
    return rows


# ---- scenes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A batch of equal sequences: `rows` new query rows each, `length` tokens cached."""

    query_heads: int
    kv_heads: int
    dim: int
    batch: int
    rows: int
    length: int


class Scene:
    """A stored cache of one format, and queries for it."""

    def __init__(self, shape: Shape, name: str, device: str, dtype) -> None:
        import torch

        from vllm.turboquant.constants import uncalibrated
        from vllm.turboquant.formats import FORMATS
        from vllm.v1.attention.ops.triton_tdsf_constants import DeviceConstants

        g = torch.Generator().manual_seed(0)
        self.shape, self.fmt, self.device = shape, FORMATS[name], device
        self.constants = uncalibrated(self.fmt, shape.kv_heads, shape.dim)
        self.on_device = DeviceConstants(self.fmt, self.constants, device)
        blocks = -(-shape.length // BLOCK)
        order = torch.randperm(shape.batch * blocks, generator=g).int()
        self.table = order.view(shape.batch, blocks).to(device)
        content = self.fmt.content_bytes(shape.dim, BLOCK)
        self.cache = torch.zeros(
            *(len(order), shape.kv_heads, BLOCK, content), dtype=torch.uint8, device=device
        )
        self.starts = torch.arange(shape.batch + 1, dtype=torch.int32, device=device) * shape.rows
        self.lengths = torch.full((shape.batch,), shape.length, dtype=torch.int32, device=device)
        self.positions = torch.arange(shape.length, device=device)
        rows = shape.batch * shape.rows
        self.query = torch.randn(rows, shape.query_heads, shape.dim, generator=g).to(device, dtype)
        self.out = torch.empty_like(self.query)
        kv = torch.randn(2, shape.length, shape.kv_heads, shape.dim, generator=g)
        self.key, self.value = kv.to(device, dtype)
        self.splits = 1
        if device == "cuda":
            from vllm.v1.attention.ops.triton_tdsf_attend import splits_for

            processors = torch.cuda.get_device_properties(0).multi_processor_count
            self.splits = splits_for(shape.batch * shape.rows, shape.kv_heads, processors)

    def slots(self, request: int):
        row = self.table[request].long()
        return row[self.positions // BLOCK] * BLOCK + self.positions % BLOCK

    def store(self, requests: int | None = None) -> None:
        from vllm.v1.attention.ops.triton_tdsf_store import store

        for r in range(self.shape.batch if requests is None else requests):
            store(
                *(self.on_device, self.key, self.value, self.cache, self.slots(r), self.positions)
            )

    def attend(self) -> None:
        from vllm.v1.attention.ops.triton_tdsf_attend import attend

        attend(
            *(self.on_device, self.query, self.cache, self.table, self.starts, self.lengths),
            self.out,
            longest_query=self.shape.rows,
            scale=self.shape.dim**-0.5,
            splits=self.splits,
        )


# ---- correctness -----------------------------------------------------------------------------


def check(shape: Shape, name: str, device: str, dtype) -> dict:
    """Stored bytes and attention of one small scene against the reference. Raises Problem."""
    import torch

    from vllm.turboquant import reference

    scene = Scene(shape, name, device, dtype)
    scene.store()
    want = torch.zeros_like(scene.cache, device="cpu")
    for r in range(shape.batch):
        reference.store(
            *(scene.fmt, scene.constants, scene.key.cpu(), scene.value.cpu(), want),
            *(scene.slots(r).cpu(), scene.positions.cpu()),
        )
    got = scene.cache.cpu()
    different = float((got != want).float().mean())
    scene.attend()
    exact = reference.attend(
        *(scene.fmt, scene.constants, scene.query.cpu(), got, scene.table.cpu()),
        *(scene.starts.cpu(), scene.lengths.cpu()),
        scale=shape.dim**-0.5,
    )
    # The output is rounded to the activations' dtype.
    allowed = TOLERANCE + torch.finfo(dtype).eps
    error = float((scene.out.double().cpu() - exact).norm() / exact.norm())
    where = f"{name}, {shape}, on {device}"
    if not error < allowed:
        raise Problem(
            f"attention is wrong: relative error {error:.4f}", where, "run tests/triton"
        )
    if not different < 0.01:
        raise Problem(f"{different:.1%} of the stored bytes are wrong", where, "run tests/triton")
    return {"format": name, **asdict(shape), "error": error, "different_bytes": different}


# ---- timing ----------------------------------------------------------------------------------


def plain_attention(shape: Shape, dtype) -> Callable[[], None]:
    """torch's attention over an uncompressed, contiguous cache."""
    import torch
    import torch.nn.functional as F

    size = (shape.batch, shape.kv_heads, shape.length, shape.dim)
    key, value = torch.randn(2, *size, device="cuda", dtype=dtype)
    rows = (shape.batch, shape.query_heads, shape.rows, shape.dim)
    query = torch.randn(rows, device="cuda", dtype=dtype)
    causal = {}
    if shape.rows > 1:
        from torch.nn.attention.bias import causal_lower_right

        causal = {"attn_mask": causal_lower_right(shape.rows, shape.length)}
    return lambda: F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **causal)


def upstream_unified(shape: Shape, query, key, value) -> Callable:
    """Upstream's Triton attention over an uncompressed paged cache, split as its backend splits
    decodes; a call returns what it gives. Raises ImportError without a vLLM.

    query: [batch * rows, query_heads, dim]; key, value: [batch, length, kv_heads, dim], length a
    multiple of 16; all of one dtype.
    """
    import torch

    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    page, splits, most = 16, 16, 128 // shape.kv_heads
    pages = shape.batch * shape.length // page
    on = dict(device=query.device)
    order = torch.randperm(pages, **on)
    caches = []
    for side in (key, value):
        cache = torch.empty(pages, page, shape.kv_heads, shape.dim, dtype=side.dtype, **on)
        cache[order] = side.reshape(cache.shape)
        caches.append(cache)
    width = 1 << (shape.dim - 1).bit_length()
    parts = (most, shape.query_heads, splits)
    arguments = dict(
        q=query,
        k=caches[0],
        v=caches[1],
        out=torch.empty_like(query),
        cu_seqlens_q=torch.arange(shape.batch + 1, dtype=torch.int32, **on) * shape.rows,
        max_seqlen_q=shape.rows,
        seqused_k=torch.full((shape.batch,), shape.length, dtype=torch.int32, **on),
        max_seqlen_k=shape.length,
        softmax_scale=shape.dim**-0.5,
        causal=True,
        softcap=0.0,
        window_size=(-1, -1),
        block_table=order.int().view(shape.batch, -1),
        seq_threshold_3D=most,
        num_par_softmax_segments=splits,
        softmax_segm_output=torch.empty(*parts, width, **on),
        softmax_segm_max=torch.empty(parts, **on),
        softmax_segm_expsum=torch.empty(parts, **on),
        **dict.fromkeys(("q_descale", "k_descale", "v_descale")),
    )

    def call():
        unified_attention(**arguments)
        return arguments["out"]

    return call


def paged_attention(shape: Shape, dtype) -> Callable:
    """`upstream_unified` over random numbers."""
    import torch

    rows = (shape.batch * shape.rows, shape.query_heads, shape.dim)
    size = (shape.batch, shape.length, shape.kv_heads, shape.dim)
    key, value = torch.randn(2, *size, device="cuda", dtype=dtype)
    return upstream_unified(shape, torch.randn(rows, device="cuda", dtype=dtype), key, value)


def upstream_turboquant(shape: Shape, dtype) -> Callable[[], None]:
    """Upstream's decode kernel of turboquant_4bit_nc. Raises ImportError without a vLLM."""
    import torch

    from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig
    from vllm.turboquant.codebook import normal_levels
    from vllm.turboquant.rotation import hadamard
    from vllm.v1.attention.ops.triton_turboquant_decode import triton_turboquant_decode_attention

    config = TurboQuantConfig.from_cache_dtype("turboquant_4bit_nc", shape.dim)
    blocks = shape.length // 16
    cache = torch.randint(
        *(0, 128, (shape.batch * blocks, 16, shape.kv_heads, config.slot_size_aligned)),
        dtype=torch.uint8,
        device="cuda",
    )
    table = torch.randperm(shape.batch * blocks, device="cuda").int().view(shape.batch, blocks)
    lengths = torch.full((shape.batch,), shape.length, dtype=torch.int32, device="cuda")
    query = torch.randn(shape.batch, shape.query_heads, shape.dim, device="cuda", dtype=dtype)
    turn = hadamard(shape.dim).float().cuda()
    levels = torch.tensor(normal_levels(4), device="cuda", dtype=torch.float32)
    return lambda: triton_turboquant_decode_attention(
        query=query,
        kv_cache=cache,
        block_table=table,
        seq_lens=lengths,
        Pi=turn,
        centroids=levels / shape.dim**0.5,
        scale=shape.dim**-0.5,
        mse_bits=config.key_mse_bits,
        key_packed_size=config.key_packed_size,
        value_quant_bits=config.effective_value_quant_bits,
        key_fp8=config.key_fp8,
        norm_correction=config.norm_correction,
        PiT=turn.T.contiguous(),
    )


def timed(call: Callable[[], None]) -> float:
    """Median milliseconds of a call on the GPU, the second-level cache flushed between calls."""
    import triton.testing

    return triton.testing.do_bench(call, warmup=20, rep=100, return_mode="median")


def measure(shape: Shape, formats: list[str], dtype) -> dict:
    """Times of one shape; a competitor that cannot run is named with its reason."""
    row = asdict(shape) | {"ms": {}, "not_run": {}, "gb_s": {}}
    others = {
        "sdpa_bf16": lambda: plain_attention(shape, dtype),
        "upstream_unified_bf16": lambda: paged_attention(shape, dtype),
    }
    if shape.rows == 1:
        others["upstream_turboquant_4bit_nc"] = lambda: upstream_turboquant(shape, dtype)
    for name, make in others.items():
        try:
            row["ms"][name] = timed(make())
        except Exception as error:  # another project's code, under no contract with us
            row["not_run"][name] = f"{type(error).__name__}: {error}"[:200]
    for name in formats:
        scene = Scene(shape, name, "cuda", dtype)
        scene.store()
        row["ms"][name] = ms = timed(scene.attend)
        if shape.rows == 1:
            size = token_bytes(Heads("", 1, shape.query_heads, shape.kv_heads, shape.dim), name)
            row["gb_s"][name] = shape.batch * shape.length * size / ms / 1e6
        one = Scene(Shape(*list(asdict(shape).values())[:3], 1, 1, 1), name, "cuda", dtype)
        row["ms"][f"{name} store of a token"] = timed(one.store)
    return row


def plot(rows: list[dict], path: Path) -> None:
    """Speed over bf16 by context; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5))
    names = [n for n in rows[0]["ms"] if n != "sdpa_bf16" and "store" not in n]
    labels = [f"{r['dim']}, B={r['batch']}\nT={r['length']}, q={r['rows']}" for r in rows]
    for name in names:
        ratios = [
            r["ms"]["sdpa_bf16"] / r["ms"][name] if {name, "sdpa_bf16"} <= set(r["ms"]) else None
            for r in rows
        ]
        axes.plot(labels, ratios, marker="o", label=name)
    axes.axhline(1, color="grey")
    axes.set_ylabel("speed, torch's bf16 attention = 1")
    axes.tick_params(axis="x", labelsize=6, rotation=60)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


# ---- the command -----------------------------------------------------------------------------


def find_our_modules() -> str:
    """Make our modules importable from this checkout; says what vLLM is there."""
    root = Path(__file__).parents[2] / "vllm"
    import vllm

    kind = "this checkout alone"
    if getattr(vllm, "__file__", None):
        kind = f"with the vLLM at {Path(vllm.__file__).parent.name}"
        import vllm.v1.attention.ops as ops

        if not (Path(vllm.__file__).parent / "turboquant").is_dir():  # one that is not ours
            vllm.__path__.append(str(root))
            ops.__path__.append(str(root / "v1/attention/ops"))
            kind += ", not ours"
    return kind


def grid() -> list[Shape]:
    """What is timed: decode over batch, context and model, speculative decode, and prefill."""
    shapes = []
    for h in (MODELS[0], MODELS[1]):
        heads = (h.query_heads, h.kv_heads, h.dim)
        for batch, length in ((1, 4096), (1, 65536), (16, 4096), (64, 4096), (8, 32768)):
            shapes.append(Shape(*heads, batch, 1, length))
        shapes += [Shape(*heads, 16, 4, 4096), Shape(*heads, 1, 2048, 8192)]
    return shapes


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench gpu", description=__doc__)
    parser.add_argument("--model", action="store_true", help="print predictions and stop")
    parser.add_argument("--batch", type=int, default=8, help="of the predictions")
    parser.add_argument("--context", type=int, default=32768, help="of the predictions")
    parser.add_argument("--formats", help="comma-separated; all by default")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--plot", type=Path, help="draw them here; needs matplotlib")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    import torch

    on_gpu = torch.cuda.is_available()
    if not on_gpu and not options.model:
        if "triton" in sys.modules:
            raise Problem(
                "Triton was imported before its interpreter was chosen",
                "this Python process",
                "run python -m tools.bench gpu on its own",
            )
        os.environ["TRITON_INTERPRET"] = "1"
    kind = find_our_modules()
    from vllm.turboquant.formats import FORMATS

    formats = options.formats.split(",") if options.formats else list(FORMATS)
    if unknown := set(formats) - set(FORMATS):
        raise Problem(
            f"no format is called {', '.join(unknown)}", "--formats", f"one of {', '.join(FORMATS)}"
        )
    report: dict = {}
    if options.model:
        report["predictions"] = print_predictions(options.batch, options.context)
    else:
        device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.bfloat16)
        report["device"] = torch.cuda.get_device_name(0) if on_gpu else "none: interpreter"
        report["torch"], report["vllm"] = torch.__version__, kind
        print(f"device: {report['device']}; modules: {kind}")
        small = [Shape(4, 2, 64, 1, 1, 9)]
        if on_gpu:
            small = [
                *(Shape(8 * g, 8, d, 2, rows, 300) for d, g, rows in ((64, 3, 1), (128, 4, 5))),
                *(Shape(g, 1, d, 2, rows, 300) for d, g, rows in ((80, 7, 1), (256, 6, 40))),
            ]
        report["checks"] = []
        for shape in small:
            for name in formats:
                found = check(shape, name, device, dtype)
                report["checks"].append(found)
                print(
                    f"right: {name} {shape}: error {found['error']:.5f}, "
                    f"{found['different_bytes']:.3%} of the bytes differ",
                    flush=True,
                )
        report["timings"], report["left_out"] = [], []
        if not on_gpu:
            print("There is no GPU here: nothing was timed.")
        for shape in grid() if on_gpu else []:
            if time.monotonic() - start > SECONDS:
                report["left_out"].append(asdict(shape))
                print(f"left out, time is up: {shape}")
                continue
            row = measure(shape, formats, dtype)
            report["timings"].append(row)
            cells = "  ".join(f"{name} {ms:.3f}" for name, ms in row["ms"].items())
            print(f"{shape}: ms  {cells}", flush=True)
            for name, reason in row["not_run"].items():
                print(f"  not run: {name}: {reason}")
    if options.json:
        write_whole(options.json, json.dumps(report, indent=2) + "\n")
    if options.plot and report.get("timings"):
        try:
            plot(report["timings"], options.plot)
        except ImportError:
            print("no plot: matplotlib is not installed here")
    return 0

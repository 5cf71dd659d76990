# SPDX-License-Identifier: Apache-2.0
"""GPU kernels compiled offline: registers, spills and shared memory of every variant.

No GPU is needed. `--ptxas 12.4` compiles with CUDA 12.4's ptxas (the pinned package
nvidia-cuda-nvcc-cu12) and checks that it is in use: Triton falls back in silence.
"""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tools.errors import Problem

SHARED_LIMIT = {80: 163, 86: 99, 89: 99, 90: 227}
"""KiB of shared memory that one program may have, by architecture (CUDA programming guide)."""

DIMS = (64, 80, 96, 112, 128, 160, 192, 224, 256)
HEADS, GROUP, BLOCK = 8, 4, 128
PTX_VERSION = {"12.4": "8.4"}
LAUNCH = ("num_warps", "num_stages", "maxnreg")


@dataclass(frozen=True)
class Variant:
    """One kernel as it is compiled for a shape."""

    kernel: str  # store key, store value, turn, attend, merge
    dim: int
    key_bits: int = 0  # of a store: the bits of its side; 0 where they do not matter
    value_bits: int = 0
    rows: int = 0
    extras: bool = False  # window, soft-cap and sinks
    group: int = GROUP  # query heads of a kv head
    block: int = BLOCK  # tokens of a block

    @property
    def label(self) -> str:
        bits = {
            "store key": f" {self.key_bits} bit",
            "store value": f" {self.value_bits} bit",
            "attend": f" k{self.key_bits}v{self.value_bits}, {self.rows} rows",
        }.get(self.kernel, "")
        return f"{self.kernel}{bits}{', window, cap, sinks' if self.extras else ''}"


@dataclass(frozen=True)
class Usage:
    """What the compiler reports for a variant."""

    architecture: int
    registers: int
    spilled: int  # bytes of stack and local memory
    shared: int  # bytes
    ptx: str

    def faults(self) -> list[str]:
        limit = SHARED_LIMIT[self.architecture] * 1024
        found = []
        if self.spilled:
            found.append(f"{self.spilled} bytes spilled")
        if self.shared > limit:
            found.append(f"{self.shared} bytes of shared memory, {limit} at most")
        return found


def variants(
    dims: tuple[int, ...] = DIMS, group: int = GROUP, block: int = BLOCK
) -> Iterator[Variant]:
    """Every kernel, head_dim, format and tile; window, cap and sinks all together or not at all."""
    from vllm.turboquant.formats import FORMATS
    from vllm.v1.attention.ops.triton_tdsf_attend import tile_rows

    at = dict(group=group, block=block)
    for dim in dims:
        for bits in (8, 4, 3):
            yield Variant("store key", dim, key_bits=bits, **at)
            yield Variant("store value", dim, value_bits=bits, **at)
        yield Variant("turn", dim, **at)
        yield Variant("merge", dim, **at)
        for fmt in FORMATS.values():
            bits = fmt.key_bits, fmt.value_bits
            for rows in sorted({tile_rows(group, n, dim, fmt) for n in (1, 64)}):
                for extras in (False, True):
                    yield Variant("attend", dim, *bits, rows, extras, **at)


def sample(every: list[Variant]) -> list[Variant]:
    """A few that between them meet every kernel, width of code, and the largest tiles."""
    wanted = {
        ("store key", 64, 3), ("store key", 256, 4), ("store value", 256, 3),
        ("turn", 256, 0), ("merge", 256, 0),
        ("attend", 64, 3), ("attend", 128, 4), ("attend", 256, 4), ("attend", 256, 8),
    }  # fmt: skip
    found: dict[tuple, Variant] = {}
    for v in every:
        key = (v.kernel, v.dim, v.value_bits if v.kernel == "store value" else v.key_bits)
        if key in wanted:
            found[key] = v  # of several, the last: the largest tile
    return list(found.values())


def _job(v: Variant) -> tuple:
    """The kernel of a variant and its compile-time options."""
    from vllm.turboquant.formats import Format
    from vllm.v1.attention.ops import triton_tdsf_attend as attention
    from vllm.v1.attention.ops import triton_tdsf_store as storing

    if v.kernel.startswith("store"):
        is_key = v.kernel == "store key"
        at = Format("", v.key_bits or 4, v.value_bits or 4).regions(v.dim, v.block)
        sides = (v.key_bits, at.keys, at.key_scales), (v.value_bits, at.values, at.value_scales)
        bits, codes, scales = sides[0 if is_key else 1]
        return storing.store_kernel, storing.store_options(
            HEADS, is_key, bits, v.dim, v.block, codes, scales
        )
    if v.kernel == "attend":
        on = v.extras
        return attention.attend_kernel, attention.attend_options(
            Format("", v.key_bits, v.value_bits),
            **dict(heads=HEADS, group=v.group, dim=v.dim, block=v.block, rows=v.rows),
            **dict(window=on, softcap=on, sinks=on),
        )
    turned = attention.turn_options(HEADS, v.group, v.dim)
    if v.kernel == "turn":
        return attention.turn_kernel, turned
    return attention.merge_kernel, turned | {"SINKS": True}


_POINTERS = {
    "x_ptr": "bf16", "query_ptr": "bf16", "out_ptr": "bf16", "z_ptr": "fp16", "levels_ptr": "fp16",
    "slot_ptr": "i64", "position_ptr": "i64", "cache_ptr": "u8", "nearest_ptr": "i16",
    "with_feedback_ptr": "i32", "table_ptr": "i32", "starts_ptr": "i32", "lengths_ptr": "i32",
}  # fmt: skip


def compile_variant(v: Variant, architecture: int) -> Usage:
    """Compile for `architecture` (80: sm_80) and read the compiler's report."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, options = _job(v)
    launch = {name: options.pop(name) for name in LAUNCH}
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in options:
            signature[name] = "constexpr"
            continue
        if name.endswith("_ptr"):
            signature[name] = f"*{_POINTERS.get(name, 'fp32')}"
        else:
            signature[name] = "fp32" if name in ("scale", "softcap") else "i32"
        if name.endswith("_ptr") or "stride" in name:
            attributes[(i,)] = [["tt.divisibility", 16]]
    constants = {(kernel.arg_names.index(name),): value for name, value in options.items()}
    source = ASTSource(kernel, signature, constants, attributes)
    built = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=launch)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(built.asm["cubin"])
        cubin.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        report = subprocess.run(
            [str(tool), "-res-usage", cubin.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", report)
    if not found:
        raise Problem("cuobjdump reports no resources", v.label, "look at its output: " + report)
    registers, stack, local = map(int, found.groups())
    ptx = re.search(r"\.version ([\d.]+)", built.asm["ptx"])[1]
    return Usage(architecture, registers, stack + local, built.metadata.shared, ptx)


def use_ptxas(release: str) -> None:
    """Compile with the ptxas of a CUDA release from now on; "triton": the one in its wheel."""
    if release == "triton":
        return
    spec = importlib.util.find_spec("nvidia.cuda_nvcc")
    places = list(spec.submodule_search_locations) if spec else []
    for place in places:
        path = Path(place) / "bin/ptxas"
        if path.is_file():
            said = subprocess.run([str(path), "--version"], capture_output=True, text=True).stdout
            if f"release {release}" in said:
                # Triton has a second compiler for newer architectures.
                os.environ["TRITON_PTXAS_PATH"] = str(path)
                os.environ["TRITON_PTXAS_BLACKWELL_PATH"] = str(path)
                return
    raise Problem(
        f"there is no ptxas of CUDA {release}",
        f"nvidia.cuda_nvcc {places or 'is not installed'}",
        "pip install -r requirements/dev.txt",
    )


def table(rows: list[tuple[Variant, Usage]]) -> str:
    """Markdown: registers / KiB of shared memory by kernel and head_dim; the most of any architecture,
    with or without window, cap and sinks."""
    most: dict[str, dict[int, tuple[int, int]]] = {}
    for v, u in rows:
        cells = most.setdefault(replace(v, extras=False).label, {})
        registers, shared = cells.get(v.dim, (0, 0))
        cells[v.dim] = max(registers, u.registers), max(shared, u.shared)
    dims = sorted({v.dim for v, _ in rows})
    lines = [
        "| kernel | " + " | ".join(map(str, dims)) + " |",
        "|---" * (len(dims) + 1) + "|",
    ]
    for label, cells in sorted(most.items()):
        found = (cells.get(dim) for dim in dims)
        texts = (f"{c[0]} / {c[1] / 1024:.0f}" if c else "" for c in found)
        lines.append(f"| {label} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench ptx", description=__doc__)
    parser.add_argument("--architectures", default="80,86,89,90")
    parser.add_argument("--dims", default=",".join(map(str, DIMS)))
    parser.add_argument("--group", type=int, default=GROUP, help="query heads per kv head")
    parser.add_argument("--block", type=int, default=BLOCK, help="tokens of a block")
    parser.add_argument("--ptxas", choices=["triton", *PTX_VERSION], default="triton")
    parser.add_argument("--sample", action="store_true", help="a few variants that cover all code")
    parser.add_argument("--json", type=Path, help="write every figure here")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    options = parser.parse_args(arguments)
    use_ptxas(options.ptxas)
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    architectures = [int(a) for a in options.architectures.split(",")]
    if unknown := set(architectures) - set(SHARED_LIMIT):
        raise Problem(
            f"architecture {sorted(unknown)} is not known",
            "--architectures",
            f"one of {sorted(SHARED_LIMIT)}",
        )
    dims = tuple(int(d) for d in options.dims.split(","))
    chosen = list(variants(dims, options.group, options.block))
    if options.sample:
        chosen = sample(chosen)
    rows, faults = [], []
    for v in chosen:
        for architecture in architectures:
            usage = compile_variant(v, architecture)
            rows.append((v, usage))
            wrong = usage.faults()
            if usage.ptx != PTX_VERSION.get(options.ptxas, usage.ptx):
                wrong.append(f"PTX {usage.ptx}: the ptxas of CUDA {options.ptxas} is not in use")
            faults += [f"sm_{architecture}, {v.label}, head_dim {v.dim}: {w}" for w in wrong]
            print(
                f"sm_{architecture} D={v.dim} {v.label}: {usage.registers} registers, "
                f"{usage.spilled} spilled, {usage.shared} shared, PTX {usage.ptx}",
                flush=True,
            )
    text = table(rows)
    print(text)
    if options.json:
        report = [asdict(v) | asdict(u) for v, u in rows]
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(text + "\n")
    if faults:
        raise Problem(
            f"{len(faults)} variants do not fit", "\n  ".join(faults), "smaller tiles or more warps"
        )
    return 0

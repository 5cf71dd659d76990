# SPDX-License-Identifier: Apache-2.0
"""Random but reproducible situations for the kernels: constants, sequences, a scattered cache."""

from dataclasses import dataclass, replace

import torch

from vllm.turboquant import kernels
from vllm.turboquant.bias import Rope, wave_table, waves
from vllm.turboquant.constants import LayerConstants, uncalibrated
from vllm.turboquant.fit import error_metric, feedback
from vllm.turboquant.formats import FORMATS, Format

def calibrated(
    fmt: Format, heads: int, dim: int, g: torch.Generator, longest: int
) -> LayerConstants:
    """Constants as a profile may bring them: no identity, no flat prior, no shared table, and a
    key bias in every third pair of coordinates."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    base = uncalibrated(fmt, heads, dim)
    key_in = base.key_in * (0.3 * normal(heads, 1, dim)).exp()
    value_in = base.value_in * (0.3 * normal(heads, 1, dim)).exp()

    def tables(levels: torch.Tensor) -> torch.Tensor:
        shift = torch.randint(-6, 7, levels.shape, generator=g)
        return (levels.int() + shift).clamp(-127, 127).sort(-1).values.to(torch.int8)

    def metric() -> torch.Tensor:
        mixed = torch.eye(dim) + 0.3 * dim**-0.5 * normal(heads, dim, dim)
        return error_metric(torch.eye(dim).double(), (mixed @ mixed.mT).double())

    key_metric, value_metric = metric(), metric()
    angle = torch.arange(longest)[:, None] / 1e4 ** (torch.arange(0, dim, 2) / dim)
    rope = Rope(torch.cat([angle.cos(), angle.sin()], -1), neox=True)
    key_bias = torch.zeros(heads, dim)
    for pair in rope.pairs():
        key_bias[:, pair[::3]] = normal(heads, len(pair[::3]))
    numbers = torch.tensor([0.02, 0.05, 0.03, 0.01, 0.2, 0.02]).expand(heads, 6)
    return replace(
        base,
        key_center=normal(heads, dim),
        key_bias=key_bias,
        waves=waves(rope, key_bias, wave_table(rope, longest)),
        key_in=key_in,
        query_in=torch.linalg.inv(key_in.double()).mT.float(),
        key_metric=key_metric.float(),
        key_feedback=feedback(key_metric).float(),
        value_in=value_in,
        value_out=torch.linalg.inv(value_in.double()).float(),
        value_metric=value_metric.float(),
        value_feedback=feedback(value_metric).float(),
        tdsf=(numbers * (0.2 * normal(heads, 6)).exp()).contiguous(),
        key_levels=tables(base.key_levels),
        value_levels=tables(base.value_levels),
        scale_step=torch.tensor([1 / 32, 1 / 16]),
    )


@dataclass
class Scene:
    """Sequences of some requests stored by the kernels in blocks of any order."""

    fmt: Format
    constants: LayerConstants
    cache: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor  # [T] of all tokens of all sequences
    positions: torch.Tensor  # [T]
    key: torch.Tensor  # [T, H, D]
    value: torch.Tensor
    query: torch.Tensor  # [T, Hq, D], a query row for every token
    lengths: list[int]
    options: dict

    def store(self) -> None:
        kernels.store(
            *(self.fmt, self.constants, self.key, self.value, self.cache),
            *(self.slots, self.positions),
        )

    def rows(self, request: int, start: int, stop: int) -> torch.Tensor:
        """Query rows of positions start ... stop - 1 of one sequence."""
        first = sum(self.lengths[:request])
        return self.query[first + start : first + stop]

    def attend(self, chunks: list[tuple[int, int, int]], out_dtype=torch.float32) -> torch.Tensor:
        """Attend query rows, as one batch of (request, start, stop)."""
        query = torch.cat([self.rows(*chunk) for chunk in chunks])
        out = torch.full(query.shape, 7.0, dtype=out_dtype)
        kernels.attend(*self.arguments(chunks, query), out, **self.options)
        return out

    def arguments(self, chunks, query) -> tuple:
        """What the kernel and the reference take, up to the output."""
        counts = torch.tensor([0] + [stop - start for _, start, stop in chunks])
        return (
            self.fmt,
            self.constants,
            query,
            self.cache,
            self.block_table[[request for request, _, _ in chunks]],
            counts.cumsum(0).int(),
            torch.tensor([stop for _, _, stop in chunks], dtype=torch.int32),
        )

    def everything(self) -> list[tuple[int, int, int]]:
        """All rows of all sequences, as one chunk each."""
        return [(r, 0, length) for r, length in enumerate(self.lengths)]


def make_scene(
    name: str,
    *,
    heads: int = 2,
    group: int = 3,
    dim: int = 64,
    block_size: int = 32,
    lengths: tuple[int, ...] = (40, 600),
    dtype: torch.dtype = torch.float32,
    profile: bool = True,
    seed: int = 0,
    **options,
) -> Scene:
    """A stored scene. Unused blocks, and unused slots of used ones, hold random bytes."""
    g = torch.Generator().manual_seed(seed)
    fmt = FORMATS[name]
    constants = uncalibrated(fmt, heads, dim)
    if profile:
        constants = calibrated(fmt, heads, dim, g, max(lengths))
    # Query, key and value as views of one fused projection, as models pass them.
    fused = torch.randn(sum(lengths), heads * (group + 2) * dim, generator=g).to(dtype)
    query, key, value = fused.split([heads * group * dim, heads * dim, heads * dim], -1)
    options.setdefault("scale", dim**-0.5)
    if options.pop("with_sinks", False):
        options["sinks"] = torch.randn(heads * group, generator=g)
    blocks = [-(-length // block_size) for length in lengths]
    shape = (sum(blocks) + 2, heads, block_size, fmt.content_bytes(dim, block_size))
    cache = torch.randint(0, 256, shape, dtype=torch.uint8, generator=g)
    order = torch.randperm(shape[0], generator=g)
    table = torch.full((len(lengths), max(blocks)), -1, dtype=torch.int32)
    for r, count in enumerate(blocks):
        table[r, :count] = order[sum(blocks[:r]) :][:count]
    positions = torch.cat([torch.arange(length) for length in lengths])
    request = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    slots = table[request, positions // block_size].long() * block_size + positions % block_size
    scene = Scene(
        *(fmt, constants, cache, table, slots, positions),
        *(x.unflatten(-1, (-1, dim)) for x in (key, value, query)),
        *(list(lengths), options),
    )
    scene.store()
    return scene


def drawn_scene(seed: int) -> Scene:
    """A scene whose every property is drawn at random."""
    g = torch.Generator().manual_seed(seed)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (), generator=g))]

    def length() -> int:
        return int(torch.randint(1, pick(40, 300, 1300), (), generator=g))

    lengths = [length() for _ in range(pick(1, 2, 3))]
    window = {"window_left": pick(0, 31, 100, 600)}
    options = pick({}, window, {"softcap": 8.0}, {"with_sinks": True})
    return make_scene(
        pick(*FORMATS),
        heads=pick(1, 2, 3),
        group=pick(1, 2, 3, 5, 6, 7, 8, 16),
        dim=pick(32, 64, 80, 96, 112, 128, 160, 192, 224, 256),
        block_size=pick(32, 64, 96, 128),
        lengths=tuple(lengths),
        dtype=pick(torch.float32, torch.bfloat16, torch.float16),
        profile=pick(True, False),
        seed=seed,
        **options,
    )

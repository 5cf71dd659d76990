# SPDX-License-Identifier: Apache-2.0
"""What each ingredient of a format brings: KL through the engine, and CPU time of the kernels.

One engine with the default model; its constants are replaced by ones that lack an ingredient.
"""

import argparse
import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from tools.models import catalog

TOKENS, DIM, HEADS, GROUP = 512, 64, 3, 3


def variants(fmt, fitted: dict) -> dict[str, dict]:
    """Constants by layer, for every line of the table."""
    from vllm.turboquant.constants import MATRICES, uncalibrated
    from vllm.turboquant.tdsf import prior

    positions = torch.arange(1, TOKENS)
    plain = {name: uncalibrated(fmt, *c.key_center.shape) for name, c in fitted.items()}

    def each(change: Callable) -> dict:
        return {name: change(plain[name], c) for name, c in fitted.items()}

    def part(c, *names: str) -> dict:
        return {name: getattr(c, name) for name in names}

    def flat(c):
        """The prior replaced by its mean over positions."""
        numbers = torch.zeros_like(c.tdsf).view(-1, 2, 3)
        for which in range(2):
            curve = prior(c.tdsf[:, 3 * which : 3 * which + 3], positions)
            numbers[:, which, 2] = curve.log().mean(0).exp().float()
        return replace(c, tdsf=numbers.flatten(1))

    turns = [name for name in MATRICES if not name.endswith(("_metric", "_feedback"))]
    wide = ("tdsf", "scale_step")
    strictly = {"scale_step": torch.zeros(2)}
    return {
        "rotation, a scale byte": plain,
        "+ centred keys": each(lambda p, c: replace(p, key_center=c.key_center)),
        "+ balanced transform": each(
            lambda p, c: replace(p, **part(c, "key_center", *turns))
        ),
        "+ errors passed on": each(lambda p, c: replace(c, **part(p, *wide))),
        "+ fitted TDSF prior, fine steps": fitted,
        "the same, flat prior": each(lambda p, c: flat(c)),
        "the same, formula alone (strict)": each(lambda p, c: replace(c, **strictly)),
        "the same, one scale for all tokens": each(lambda p, c: replace(flat(c), **strictly)),
    }


class CodedFirst:
    """Stands in for a layer's `impl`: the exact slot gets what the codes of its token say."""

    def __init__(self, impl) -> None:
        self.impl = impl

    def __getattr__(self, name: str):
        return getattr(self.impl, name)

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        """Store, and replace the slot where the sequence's first token came by."""
        from vllm.forward_context import get_forward_context

        self.impl.do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        positions = get_forward_context().attn_metadata[layer.layer_name].positions
        if int(positions[0]) == 0:
            self._overwrite(kv_cache[int(slot_mapping[0]) // kv_cache.shape[2]], key.shape[-1])

    def _overwrite(self, block: torch.Tensor, dim: int) -> None:
        from vllm.turboquant import packing, tdsf
        from vllm.turboquant.constants import LEVEL_GROUP

        fmt, c, tokens = self.impl.format, self.impl.constants, block.shape[1]
        at = fmt.regions(dim, tokens)
        for h, region in enumerate(block.flatten(1)):
            for which, (bits, codes, scale, unpack, table) in enumerate(
                (
                    (fmt.key_bits, region[at.keys : at.values], at.key_scales)
                    + (packing.unpack_keys, c.key_levels[h]),
                    (fmt.value_bits, region[at.values : at.key_scales], at.value_scales)
                    + (packing.unpack_values, c.value_levels[h]),
                )
            ):
                levels = table.double().repeat_interleave(LEVEL_GROUP, 0)
                chosen = unpack(codes, tokens, dim, bits)[0].long()
                numbers = c.tdsf[h : h + 1, 3 * which : 3 * which + 3]
                predicted = tdsf.prior(numbers, torch.zeros(1))[0, 0]
                unit = tdsf.decode_scale(region[scale], predicted, float(c.scale_step[which]))
                z = levels.gather(1, chosen[:, None])[:, 0] * unit
                slot = region[2 * dim * which : 2 * dim * (which + 1)]
                slot.copy_(z.half().view(torch.uint8))


def code_first(worker, active: bool) -> None:
    """First tokens are kept by their codes alone, or exactly again."""
    from vllm.turboquant.worker import layers_with_cache

    for _, layer in layers_with_cache(worker).values():
        layer.impl = CodedFirst(layer.impl) if active else layer.impl.impl


def losses(fmt, text: str, pieces: int) -> tuple[dict[str, float], dict, dict]:
    """KL by line, the fitted constants, and the scales of the first piece by layer."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.turboquant.calibrate import BUILT_IN_TEXT, calibrate, install
    from vllm.turboquant.engine import engine_core
    from vllm.turboquant.evaluate import sample
    from vllm.turboquant.quality import against_uncompressed
    from vllm.turboquant.requests import forget, run
    from vllm.turboquant.scales import recorded

    args = EngineArgs(
        model=str(catalog.make("smollm2")),
        kv_cache_dtype=fmt.name,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        kv_cache_memory_bytes=1 << 28,
    )
    with engine_core(args, "later") as core:
        fitted = calibrate(core, BUILT_IN_TEXT.read_text(encoding="utf-8")).layers

        @contextlib.contextmanager
        def using(layers: dict, coded: bool = False) -> Iterator[None]:
            forget(core)
            install(core, layers)
            if coded:
                core.collective_rpc(code_first, args=(True,))
            try:
                yield
            finally:
                if coded:
                    core.collective_rpc(code_first, args=(False,))
                forget(core)

        cases = {name: (layers, False) for name, layers in variants(fmt, fitted).items()}
        cases["the same, first token by its codes"] = (fitted, True)
        totals = dict.fromkeys(cases, 0.0)
        tokens = 0
        prompts = sample(core, text, pieces, TOKENS)
        for prompt in prompts:
            contexts = [lambda case=case: using(*case) for case in cases.values()]
            for name, sums in zip(cases, against_uncompressed(core, prompt, contexts)):
                totals[name] += sums.kl
            tokens += len(prompt)
        install(core, fitted)
        with recorded(core) as scales:
            run(core, prompts[0])
        return {name: kl / tokens for name, kl in totals.items()}, fitted, scales


def seconds(call: Callable[[], None], repeats: int = 9) -> float:
    """CPU seconds of this thread for one call, the median."""
    call()
    found = []
    for _ in range(repeats):
        start = time.thread_time()
        call()
        found.append(time.thread_time() - start)
    return statistics.median(found)


def costs(fmt, constants) -> tuple[float, float]:
    """CPU seconds to store TOKENS tokens, and for one decode step over them."""
    from vllm.turboquant import kernels

    g = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, TOKENS, HEADS, DIM, generator=g)
    query = torch.randn(1, HEADS * GROUP, DIM, generator=g)
    size = fmt.content_bytes(DIM, 128)
    cache = torch.zeros(TOKENS // 128, HEADS, 128, size, dtype=torch.uint8)
    at, table = torch.arange(TOKENS), torch.arange(TOKENS // 128).int()[None]
    starts, length, out = torch.tensor([0, 1]).int(), torch.tensor([TOKENS]).int(), query.clone()

    def store() -> None:
        kernels.store(fmt, constants, key, value, cache, at, at)

    def attend() -> None:
        for _ in range(20):
            kernels.attend(
                *(fmt, constants, query, cache, table, starts, length, out), scale=DIM**-0.5
            )

    return seconds(store), seconds(attend) / 20


def with_bias(constants, pairs: int):
    """The constants with a key bias in so many pairs of coordinates."""
    from vllm.turboquant.bias import Rope, wave_table, waves

    angle = torch.arange(TOKENS)[:, None] / 1e5 ** (torch.arange(0, DIM, 2) / DIM)
    rope = Rope(torch.cat([angle.cos(), angle.sin()], -1), neox=True)
    bias = torch.zeros(HEADS, DIM)
    bias[:, :pairs] = bias[:, DIM // 2 : DIM // 2 + pairs] = 10.0
    return replace(constants, key_bias=bias, waves=waves(rope, bias, wave_table(rope, TOKENS)))


def main(arguments: list[str]) -> int:
    from tools.bench.quality import evaluation_text
    from vllm.turboquant.formats import FORMATS

    parser = argparse.ArgumentParser(prog="python -m tools.bench ablation", description=__doc__)
    narrow = [name for name in FORMATS if "8" not in name]
    parser.add_argument("--format", default="tdsf_k4v4", choices=narrow)
    parser.add_argument("--pieces", type=int, default=2, help="pieces of text, 512 tokens each")
    options = parser.parse_args(arguments)
    fmt = FORMATS[options.format]
    found, fitted, scales = losses(fmt, evaluation_text(), options.pieces)
    torch.set_num_threads(1)
    layer = next(iter(fitted))
    lines = {name: layers[layer] for name, layers in variants(fmt, fitted).items()}
    timed = {name: costs(fmt, constants) for name, constants in lines.items()}
    for pairs in (4, DIM // 2):
        timed[f"key bias in {pairs} pairs"] = costs(fmt, with_bias(fitted[layer], pairs))
    base = timed["rotation, a scale byte"]
    bits = fmt.bits_per_element(DIM)
    slot, scale_bytes = 4 * DIM / 128 * 8 / (2 * DIM), 2 * 8 / (2 * DIM)  # bits per element
    print(f"| {fmt.name} | bits per element | KL | encode | decode step |\n|---|---|---|---|---|")
    for name in [*found, *(name for name in timed if name not in found)]:
        own = bits - slot if "first token" in name else bits
        unused = scale_bytes if "strict" in name or "one scale" in name else 0.0
        kl = f"{found[name]:.4f}" if name in found else ""
        ratios = [f"{x / y:.2f}" for x, y in zip(timed[name], base)] if name in timed else ["", ""]
        print(f"| {name} | {own - unused:.3f} | {kl} | {ratios[0]} | {ratios[1]} |")
    print("\nShare of the variance of log scales that the formula predicts, keys and values:")
    shares = [x.explained() for x in scales.values()]
    for index, (key, value) in enumerate(shares):
        print(f"  layer {index:2}  {key:6.2f} {value:6.2f}")
    for side, values in zip(("keys", "values"), zip(*shares)):
        low = sum(share < 0.05 for share in values)
        print(f"{side}: median {statistics.median(values):.2f}, below 0.05 in {low} layers")
    return 0 if all(math.isfinite(kl) for kl in found.values()) else 1

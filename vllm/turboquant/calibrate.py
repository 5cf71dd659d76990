# SPDX-License-Identifier: Apache-2.0
"""Fits a model's constants by running a text through a started engine, request by request."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm.logger import init_logger
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.turboquant import worker
from vllm.turboquant.constants import PER_HEAD, LayerConstants
from vllm.turboquant.quality import measure
from vllm.turboquant.requests import forget, run, uncompressed
from vllm.v1.engine.core import EngineCore

logger = init_logger(__name__)

PIECE = 512
"""Tokens of text per request."""

BUILT_IN_TEXT = Path(__file__).with_name("calibration_text.txt")

Progress = Callable[[Iterable], Iterable]


class CannotFit(ValueError):
    """Calibration is impossible here, for the reason given."""


@dataclass(frozen=True)
class Fit:
    """Constants that were fitted, all kv heads of the model, and what is known about them."""

    layers: dict[str, LayerConstants]
    fitted_on: dict[str, str | int]  # text (a hash), tokens, dtype
    quality: dict[str, float]  # measured on the first piece of the text


def calibrate(
    core: EngineCore, text: str, progress: Progress = iter, *, strict: bool = False
) -> Fit:
    """Fit every layer that has a TDSF cache to uncompressed attention over `text`, give the
    layers their constants, and measure what the cache then costs. strict: see `tdsf`.

    Raises CannotFit when the text is too short or the model has no tokenizer.
    """
    pieces = cut(core, text)
    forget(core)
    with uncompressed(core, longest=len(pieces[0])):
        for piece in progress(pieces):
            run(core, piece)
        fitted = core.collective_rpc(worker.fit, args=(strict,))
    if unweighted := sorted({name for part in fitted for name in part.unweighted}):
        logger.warning(
            "TDSF: no output projection was found for %s; all errors of a value weigh the same "
            "there.",
            ", ".join(unweighted),
        )
    biased = {name: c for part in fitted for name, c in part.layers.items() if c.key_bias.any()}
    if biased:
        coordinates = sum(int(c.key_bias.any(0).sum()) for c in biased.values()) / len(biased)
        logger.info(
            "TDSF: a key bias is taken out of %d layers, %.0f coordinates on average.",
            *(len(biased), coordinates),
        )
    config = core.vllm_config
    names = {name: None for part in fitted for name in part.layers}
    if not names:
        raise CannotFit("no layer has a TDSF cache")
    layers = {
        name: _join([part for part in fitted if name in part.layers], name, config.model_config)
        for name in names
    }
    install(core, layers)
    found = measure(core, config.cache_config.cache_dtype, pieces[:1])
    forget(core)
    return Fit(
        layers,
        {
            "text": hashlib.sha256(text.encode()).hexdigest()[:16],
            "tokens": sum(map(len, pieces)),
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
        },
        {"kl": found.kl, "perplexity": found.perplexity, "top1": found.top1},
    )


def install(core: EngineCore, layers: dict[str, LayerConstants]) -> None:
    """Hand constants to every worker, and say which layers have none."""
    answers = core.collective_rpc(worker.install, args=(layers,))
    if missing := sorted({name for answer in answers for name in answer}):
        logger.warning("TDSF: no constants for %s; uncalibrated there.", ", ".join(missing))
    if core.vllm_config.speculative_config is not None:
        logger.warning("TDSF: draft layers, where they have a cache, run uncalibrated.")


def cut(core: EngineCore, text: str) -> list[list[int]]:
    """The text as token ids, in pieces that the engine takes whole, the longest first."""
    config = core.vllm_config.model_config
    tokenizer = cached_tokenizer_from_config(config)
    if tokenizer is None:
        raise CannotFit("--skip-tokenizer-init leaves the text without tokens")
    ids = list(tokenizer.encode(text))
    first = ids[:1] if ids[:1] == [tokenizer.bos_token_id] else []
    size = min(PIECE, config.max_model_len - 1) - len(first)
    ids = ids[len(first) :]
    if size < 2 or len(ids) < 2:
        raise CannotFit("the text or --max-model-len is too short")
    return [first + ids[i : i + size] for i in range(0, len(ids), size)]


def _join(parts: list[worker.Fitted], layer: str, config) -> LayerConstants:
    """The ranks' kv heads side by side; heads that several ranks hold are taken once."""
    parts = sorted(parts, key=lambda part: part.rank)
    copies = max(len(parts) // config.get_total_num_kv_heads(), 1)
    shares = [part.layers[layer] for part in parts[::copies]]
    joined = {name: torch.cat([getattr(x, name) for x in shares]) for name in PER_HEAD}
    return LayerConstants(**joined, scale_step=shares[0].scale_step)

# SPDX-License-Identifier: Apache-2.0
"""Measures several cache formats side by side, each in an engine of its own."""

import multiprocessing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from vllm.engine.arg_utils import EngineArgs
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.turboquant.baselines import BASELINES
from vllm.turboquant.engine import engine_core
from vllm.turboquant.formats import FORMATS
from vllm.turboquant.quality import UNCOMPRESSED, Measured, by_layer, measure
from vllm.turboquant.requests import forget, run
from vllm.turboquant.scales import recorded
from vllm.turboquant.skip import Proposal, propose
from vllm.turboquant.startup import LATER, STRICT
from vllm.v1.engine.core import EngineCore

BUILT_IN_TEXT = Path(__file__).with_name("evaluation_text.txt")
STRICTLY = ":strict"
"""After the name of a TDSF format: measured with strict TDSF."""


@dataclass(frozen=True)
class Task:
    """What to measure, on what."""

    text: str
    pieces: int  # of text, taken evenly
    length: int  # tokens per piece
    mode: str = "auto"  # where constants come from, see `startup`
    layers: bool = False  # every layer alone, too, on the first piece
    scales: bool = False  # the scales of the first piece, too
    target: float | None = None  # KL for which layers to skip are proposed


def check(formats: Iterable[str]) -> None:
    """Raises ValueError naming the formats that cannot be measured."""
    known = [UNCOMPRESSED, *FORMATS, *BASELINES]
    ours = [name + STRICTLY for name in FORMATS]
    if unknown := [name for name in formats if name not in known + ours]:
        raise ValueError(
            f"Unknown formats: {', '.join(unknown)}. Known: {', '.join(known)}, and TDSF formats "
            f"with {STRICTLY} for the formula alone as the scale."
        )


def evaluate(
    args: EngineArgs, formats: list[str], task: Task
) -> Iterator[tuple[Measured, Proposal | None]]:
    """Measure formats that passed `check`; a proposal comes where a target is given.

    Every TDSF format needs an engine of its own, in a process of its own; the others are computed
    in the first of these.
    """
    others = [name for name in formats if name in (UNCOMPRESSED, *BASELINES)]
    ours = [name for name in formats if name not in others]
    context = multiprocessing.get_context("spawn")
    for name in ours or ["tdsf_k8v8"]:
        wanted = [x for x in [*others, name] if x in formats]
        receiver, sender = context.Pipe(duplex=False)
        args.kv_cache_dtype = name.removesuffix(STRICTLY)
        extra = {STRICT: name.endswith(STRICTLY)}
        args.additional_config = dict(args.additional_config or {}) | extra
        mode = task.mode if ours else LATER
        process = context.Process(
            target=_serve, args=(sender, args, wanted, replace(task, mode=mode))
        )
        process.start()
        sender.close()
        try:
            while True:
                answer = receiver.recv()
                if isinstance(answer, Exception):
                    raise answer
                yield answer
        except EOFError:  # the other end is closed: all is sent, or the process has died
            process.join()
            if process.exitcode:
                raise RuntimeError(
                    f"The engine of {name} ended with exit code {process.exitcode}."
                ) from None
        finally:
            process.join()
        others = []


def _serve(sender, args, formats: list[str], task: Task) -> None:
    with sender:
        try:
            with engine_core(args, task.mode) as core:
                prompts = sample(core, task.text, task.pieces, task.length)
                for name in formats:
                    sender.send(_measured(core, name, prompts, task))
        except ValueError as error:
            sender.send(error)


def _measured(core, name: str, prompts, task: Task) -> tuple[Measured, Proposal | None]:
    fmt = name.removesuffix(STRICTLY)
    row = replace(measure(core, fmt, prompts), format=name)
    if fmt not in FORMATS:
        return row, None
    proposal = None
    if task.layers or task.target:
        row = replace(row, layers=by_layer(core, prompts[0]))
    if task.target:
        proposal = propose(core, fmt, prompts, row.layers, task.target)
    if task.scales:
        forget(core)
        with recorded(core) as scales:
            run(core, prompts[0])
        row = replace(row, scales=scales)
    return row, proposal


def sample(core: EngineCore, text: str, pieces: int, length: int) -> list[list[int]]:
    """Token ids of `pieces` pieces of `length` tokens. Raises ValueError for a short text."""
    tokenizer = cached_tokenizer_from_config(core.vllm_config.model_config)
    ids = list(tokenizer.encode(text))
    if len(ids) < pieces * length:
        raise ValueError(
            f"The text has {len(ids)} tokens; {pieces} pieces of {length} need {pieces * length}."
        )
    share = len(ids) // pieces
    first = ids[:1] if ids[:1] == [tokenizer.bos_token_id] else []
    starts = [i * share + (share - length) // 2 for i in range(pieces)]
    return [(first + ids[start:])[:length] for start in starts]

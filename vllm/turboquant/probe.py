# SPDX-License-Identifier: Apache-2.0
"""Compares runs of a text in the worker, where the logits are: full-vocabulary logits of
thousands of tokens never leave it, only their sums do.
"""

from dataclasses import dataclass

import torch

from vllm.forward_context import get_forward_context

_ROWS = 128
"""Tokens whose logits are held at once."""


@dataclass(frozen=True)
class Sums:
    """Totals over the tokens of a text."""

    tokens: int
    kl: float  # nats, of the reference's distribution to the other's
    agreeing: int  # tokens for which both find the same next token most likely
    predicted: int  # tokens that have a successor in the text
    loss: float  # nats, negative log-likelihood of those successors


def watch(worker) -> None:
    """Keep the hidden states of all that runs from now on, until `compare`."""
    model = worker.model_runner.get_model()
    kept: list[torch.Tensor] = []

    def keep(module, args, output) -> None:
        metadata = get_forward_context().attn_metadata
        if metadata:
            hidden = output[0] if isinstance(output, tuple) else output
            # Skipped layers, and a hybrid's others, have metadata of another kind.
            rows = next(len(m.positions) for m in metadata.values() if hasattr(m, "positions"))
            kept.append(hidden[:rows].clone())

    worker.model_runner.tdsf_watch = kept, model.register_forward_hook(keep)


def compare(worker, tokens: list[int]) -> list[Sums] | None:
    """Compare the runs of the same tokens since `watch` with the first of them, in their order.

    None on ranks that hold no logits.
    """
    kept, hook = worker.model_runner.tdsf_watch
    del worker.model_runner.tdsf_watch
    hook.remove()
    model = worker.model_runner.get_model()
    reference, *others = torch.cat(kept).split(len(tokens))
    with torch.inference_mode():
        if model.compute_logits(reference[:1]) is None:
            return None
        return [_compare(model, reference, other, tokens) for other in others]


def _compare(model, reference: torch.Tensor, other: torch.Tensor, tokens: list[int]) -> Sums:
    kl = loss = 0.0
    agreeing = 0
    following = torch.tensor(tokens[1:], device=reference.device)
    for start in range(0, len(tokens), _ROWS):
        rows = slice(start, start + _ROWS)
        wanted = model.compute_logits(reference[rows]).float().log_softmax(-1)
        got = model.compute_logits(other[rows]).float().log_softmax(-1)
        kl += float((wanted.exp() * (wanted - got)).sum(dtype=torch.float64))
        agreeing += int((wanted.argmax(-1) == got.argmax(-1)).sum())
        next_tokens = following[rows]
        picked = got[: len(next_tokens)].gather(1, next_tokens[:, None])
        loss -= float(picked.sum(dtype=torch.float64))
    return Sums(len(tokens), kl, agreeing, len(tokens) - 1, loss)


def stored_bits(worker) -> dict[str, tuple[int, int]]:
    """Bits and numbers that one full block of each attention layer's cache stores, by layer."""
    return {
        name: (8 * spec.page_size_bytes, 2 * spec.block_size * spec.num_kv_heads * spec.head_size)
        for name, spec in worker.get_kv_cache_spec().items()
        if hasattr(spec, "head_size")
    }

# SPDX-License-Identifier: Apache-2.0
"""The real engine with the real default model, for tests."""

import contextlib
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

GIB = 1 << 30


@contextlib.contextmanager
def engine(kv_cache_dtype: str, model: str | None = None, **options):
    """A running `vllm.LLM`; its processes end with the block.

    Eager unless told otherwise: compiling takes longer than any single test.
    """
    from vllm import LLM

    defaults = dict(
        max_model_len=2048, kv_cache_memory_bytes=GIB // 2, enforce_eager=True, seed=0
    )
    llm = LLM(
        model=model or default_model(),
        kv_cache_dtype=kv_cache_dtype,
        **(defaults | options),
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def default_model() -> str:
    """The folder of the default model, made on the first call."""
    from tools.models.catalog import make

    return str(make("smollm2"))


def generate(llm, prompts: list[list[int]], tokens: int = 48) -> list[list[tuple]]:
    """Greedy continuations of prompts of token ids: per prompt, (token, its logprob, top 5)."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=0, logprobs=5, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [
        [
            (token, step[token].logprob, tuple((t, x.logprob) for t, x in step.items()))
            for token, step in zip(o.outputs[0].token_ids, o.outputs[0].logprobs)
        ]
        for o in outputs
    ]

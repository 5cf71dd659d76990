# SPDX-License-Identifier: Apache-2.0
"""Many small engines in one process of their own: starting one takes seconds, not half a minute.

An engine in the test's own process would freeze upstream's environment variables for every test
after it, so the jobs run in a child, described and answered in JSON.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

OPTIONS = dict(dtype="float32", max_model_len=2048, kv_cache_memory_bytes=256 << 20)


def ask(prompts: list[list[int]], tokens: int = 1, *, scores: bool = False, forget: bool = False):
    """One call of an engine: greedy continuations of prompts of token ids.

    scores: also, for each prompt token but the first, its log-probability and the top token there.
    forget: empty the prefix cache first.
    """
    return dict(prompts=prompts, tokens=tokens, scores=scores, forget=forget)


def run(folder: Path, jobs: list[dict]) -> list[dict]:
    """Each job {model, kv, calls, options}: its answers, one list per call, and facts of its cache."""
    plan, answers = folder / "plan.json", folder / "answers.json"
    plan.write_text(json.dumps(jobs))
    root = Path(__file__).parents[2]
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    command = [sys.executable, "-m", "tests.models.engines", str(plan), str(answers)]
    log = folder / "engines.log"
    with log.open("w") as file:
        ended = subprocess.run(command, env=environment, cwd=root, stdout=file, stderr=file)
    assert ended.returncode == 0, log.read_text()[-6000:]
    return json.loads(answers.read_text())


def _job(model: str, kv: str, calls: list[dict], options: dict) -> dict:
    from tests.engine import engine

    with engine(kv, model=model, **(OPTIONS | options)) as llm:
        answers = [_call(llm, **call) for call in calls]
        return {"answers": answers, **_facts(llm)}


def _call(llm, prompts, tokens, scores, forget) -> list[dict]:
    from vllm import SamplingParams

    if forget:
        assert llm.reset_prefix_cache()
    params = SamplingParams(
        max_tokens=tokens,
        temperature=0,
        ignore_eos=True,
        logprobs=1,
        prompt_logprobs=1 if scores else None,
    )
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [_answer(output, scores) for output in outputs]


def _answer(output, scores: bool) -> dict:
    (best,) = output.outputs
    answer = {
        "tokens": list(best.token_ids),
        "logprobs": [step[token].logprob for token, step in zip(best.token_ids, best.logprobs)],
        "cached": output.num_cached_tokens,
    }
    if scores:
        steps = list(zip(output.prompt_token_ids, output.prompt_logprobs))[1:]
        answer["given"] = [step[token].logprob for token, step in steps]
        answer["top"] = [next(t for t, x in step.items() if x.rank == 1) for _, step in steps]
    return answer


def _facts(llm) -> dict:
    """What the cache of an engine holds: tokens of the longest requests that fit, and its blocks."""
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    core = llm.llm_engine.engine_core.engine_core
    config = core.vllm_config
    requests = get_max_concurrency_for_kv_cache_config(config, core.scheduler.kv_cache_config)
    counted = llm.get_metrics() if llm.llm_engine.log_stats else []
    preempted = [m.value for m in counted if m.name == "vllm:num_preemptions"]
    return {
        "fit": requests * config.model_config.max_model_len,
        "blocks": core.scheduler.kv_cache_config.num_blocks,
        "block_size": config.cache_config.block_size,
        "state_page": config.cache_config.mamba_page_size_padded,
        "preempted": sum(preempted),  # 0 where statistics are off
    }


if __name__ == "__main__":
    plan, target = map(Path, sys.argv[1:])
    target.write_text(json.dumps([_job(**job) for job in json.loads(plan.read_text())]))

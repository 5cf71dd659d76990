# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine, ours or upstream's: whichever is installed where this runs.

The job: model, kv_cache_dtype, dtype, eager, prompts (token ids), new (tokens for each), warm_up
(prompts whose run is not counted).
"""

import os
import time
from typing import Any

from tools.bench.subjects.report import Report, peak_memory

BLOCK = 128
WARM_UP_TOKENS = 8
GIB = 1 << 30


def cache_bytes(worker) -> int:
    """In the worker: bytes of the KV cache, every block counted."""
    storages = [tensor.untyped_storage() for tensor in worker.model_runner.kv_caches]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def run(report: Report) -> dict[str, Any]:
    job = report.job
    prompts, new = job["prompts"], job["new"]
    from vllm import LLM, SamplingParams, __version__

    length = max(map(len, prompts)) + new
    llm = LLM(
        model=job["model"],
        dtype=job["dtype"],
        kv_cache_dtype=job["kv_cache_dtype"],
        enforce_eager=job["eager"],
        max_model_len=length,
        block_size=BLOCK,
        # One block is the engine's own. The pool is what the work needs, so memory compares.
        num_gpu_blocks_override=len(prompts) * -(-length // BLOCK) + 1,
        kv_cache_memory_bytes=GIB,
        seed=0,
        disable_log_stats=True,
    )
    engine = llm.llm_engine

    def generate(batch: list[list[int]], tokens: int, counted: bool) -> dict[str, Any]:
        params = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        start = time.perf_counter()
        for number, ids in enumerate(batch):
            engine.add_request(f"{counted}-{number}", {"prompt_token_ids": ids}, params)
        arrived: dict[str, list[float]] = {}
        steps: list[tuple[float, int]] = []  # seconds since the start, tokens arrived in all
        total = len(batch) * tokens
        count = 0
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter() - start
            for output in outputs:
                got = len(output.outputs[0].token_ids)
                times = arrived.setdefault(output.request_id, [])
                times += [now] * (got - len(times))
            count = sum(map(len, arrived.values()))
            steps.append((now, count))
            if counted:
                report.share(count / total)
        if count != total:
            raise RuntimeError(f"{count} tokens came, {total} were asked for")
        return {
            "seconds": steps[-1][0],
            "steps": steps,
            "first": [times[0] for times in arrived.values()],
            "last": [times[-1] for times in arrived.values()],
        }

    generate(job["warm_up"], WARM_UP_TOKENS, counted=False)
    figures = generate(prompts, new, counted=True)
    figures["kv_bytes"] = sum(llm.collective_rpc(cache_bytes))
    figures["peak_memory_bytes"] = peak_memory()
    figures["version"] = __version__
    figures["variant"] = variant(job["kv_cache_dtype"])
    engine.engine_core.shutdown()
    return figures


def variant(kv_cache_dtype: str) -> str | None:
    """The instruction set of our kernels; None where they do not run."""
    if not kv_cache_dtype.startswith("tdsf_"):
        return None
    from vllm.turboquant import kernels

    return kernels.isa()


def main() -> None:
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # `cache_bytes` is sent to the worker
    report = Report()
    report.result(run(report))


if __name__ == "__main__":
    main()

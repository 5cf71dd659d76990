# SPDX-License-Identifier: Apache-2.0
"""The resident memory of a model's weights in an engine, ours or upstream's.

The job: model, kv_cache_dtype, dtype. The engine runs in this process, on glibc's allocator, and
the model's memory is what loading adds to the anonymous pages: it counts what a matrix library
keeps for itself, which no tensor shows, and not the checkpoint's mapped file.
"""

import ctypes
import gc
import os

from tools.bench.subjects.report import Report, anonymous_memory

GIB = 1 << 30


def resident() -> int:
    """Anonymous bytes after everything that is free was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return anonymous_memory()


class Loaded(Exception):
    """Ends the start of the engine: the rest of it is not wanted."""


def run(report: Report) -> dict[str, int]:
    job = report.job
    import torch

    from vllm import LLM
    from vllm.v1.worker.cpu_worker import CPUWorker

    found: dict[str, int] = {}
    upstream_load = CPUWorker.load_model

    def load_model(worker, *args, **kwargs) -> None:
        # A first product, so that the libraries' own memory is there before.
        torch.nn.functional.linear(torch.ones(8, 8), torch.ones(8, 8))
        before = resident()
        upstream_load(worker, *args, **kwargs)
        found["resident_bytes"] = resident() - before
        raise Loaded

    CPUWorker.load_model = load_model
    try:
        LLM(
            model=job["model"],
            dtype=job["dtype"],
            kv_cache_dtype=job["kv_cache_dtype"],
            enforce_eager=True,
            max_model_len=256,
            kv_cache_memory_bytes=GIB // 8,
        )
    except Loaded:
        return found
    raise RuntimeError("the engine started without loading a model")


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    report = Report()
    report.result(run(report))


if __name__ == "__main__":
    main()

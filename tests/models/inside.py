# SPDX-License-Identifier: Apache-2.0
"""The real engine inside the process of the tests: scheduler, worker and model, without the three
processes that a server has. For tests of many engines and tiny models, whose time goes to starting.
"""

import contextlib
import gc

import pytest
import torch

from tests import engine


@contextlib.contextmanager
def engine_inside(kv_cache_dtype: str, model: str, **options):
    """As `tests.engine.engine`, in this process."""
    from vllm.distributed import cleanup_dist_env_and_memory

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        # What vLLM's CPU worker changes in its process, put back at the end.
        patch.setenv("VLLM_DIST_IDENT", "")
        patch.setattr(torch, "set_num_threads", torch.set_num_threads)
        options = options | {"distributed_executor_backend": "uni"}
        with engine.engine(kv_cache_dtype, model, **options) as llm:
            yield llm
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()

# SPDX-License-Identifier: Apache-2.0
"""Single requests through a started engine, whose answers nobody reads."""

import itertools
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from vllm import SamplingParams
from vllm.turboquant import worker
from vllm.turboquant.plain import RoundTrip
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

_serial = itertools.count()


def run(core: EngineCore, prompt: list[int]) -> None:
    """One request of token ids, to its end; nothing is read from the prefix cache.

    Its name is used once: a hybrid's runner may remember where the state of a name lay.
    """
    params = SamplingParams(max_tokens=1, temperature=0, skip_reading_prefix_cache=True)
    core.add_request(
        Request(
            request_id=f"tdsf-{next(_serial)}",
            prompt_token_ids=prompt,
            sampling_params=params,
            pooling_params=None,
            block_hasher=core.request_block_hasher,
        )
    )
    while core.scheduler.has_requests() or core.batch_queue:
        _, executed = core.step_fn()
        core.post_step(executed)


@contextmanager
def uncompressed(
    core: EngineCore,
    *,
    longest: int = 0,
    round_trip: RoundTrip | None = None,
    spared: Collection[str] = (),
) -> Iterator[None]:
    """Requests inside attend uncompressed keys and values; see `worker.attend_plainly`."""
    core.collective_rpc(worker.attend_plainly, args=(longest, round_trip, spared))
    try:
        yield
    finally:
        core.collective_rpc(worker.attend_cached)
        forget(core)


def forget(core: EngineCore) -> None:
    """Empty the prefix cache: its blocks hold nothing, or mean nothing under other constants."""
    if not core.reset_prefix_cache():
        raise RuntimeError("The prefix cache could not be emptied; a request is still running.")

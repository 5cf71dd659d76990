# SPDX-License-Identifier: Apache-2.0
"""An engine without a front end, for the commands: the same core that a server runs."""

import contextlib
from collections.abc import Iterator

from vllm.engine.arg_utils import EngineArgs
from vllm.turboquant.startup import OPTION
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor


@contextlib.contextmanager
def engine_core(args: EngineArgs, mode: str) -> Iterator[EngineCore]:
    """A started core in this process; mode: see `startup`. It ends with the block."""
    args.additional_config = dict(args.additional_config or {}) | {OPTION: mode}
    config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    core = EngineCore(config, Executor.get_class(config), log_stats=False)
    try:
        yield core
    finally:
        core.shutdown()

# SPDX-License-Identifier: Apache-2.0
"""The TDSF formats in upstream's registry of cache dtypes (vLLM 0.33 and later)."""

from collections.abc import Callable

import torch

from vllm.turboquant.formats import FORMATS


class _Handler:
    """What the registry asks about a cache dtype."""

    @classmethod
    def torch_dtype(cls) -> torch.dtype:
        return torch.uint8  # pages are packed bytes

    @classmethod
    def quant_mode(cls):
        """No mode of upstream's: our backend sizes its own pages.

        KVQuantMode.CUSTOM would read as an Octave format, with which it shares its number.
        """
        from vllm.v1.kv_cache_interface import KVQuantMode

        return KVQuantMode.NONE


def register_formats(register: Callable) -> None:
    """Register every format; `register` is upstream's register_kv_cache_dtype."""
    for name in FORMATS:
        register(name)(type(f"Handler_{name}", (_Handler,), {"name": name}))

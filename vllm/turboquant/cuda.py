# SPDX-License-Identifier: Apache-2.0
"""What our patches ask on CUDA hosts: which attention backend."""

from vllm.turboquant.formats import is_tdsf
from vllm.turboquant.selection import backend_path


def attention_backend(config, capability, selected=None) -> str | None:
    """Path of our backend class where `--kv-cache-dtype` names a TDSF format, else None.

    config: upstream's AttentionSelectorConfig, the layer's demands. capability: the device's.
    selected: the registry member that the user asked for, None: no wish.
    Raises ValueError naming every demand the backend does not meet.
    """
    if not is_tdsf(config.kv_cache_dtype):
        return None
    from vllm.v1.attention.backends import tdsf_triton

    return backend_path(tdsf_triton, config, "CUDA", capability, selected)

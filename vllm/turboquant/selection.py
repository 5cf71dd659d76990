# SPDX-License-Identifier: Apache-2.0
"""Choosing the attention backend of a TDSF format, on any platform."""

from types import ModuleType


def backend_path(backends: ModuleType, config, host: str, capability=None, selected=None) -> str:
    """Path of the format's backend class, which is registered where upstream does not know it.

    backends: the platform's module, with one class per format. config: upstream's
    AttentionSelectorConfig, the layer's demands. host: the platform's name in messages.
    capability: the device's, None where there is none such. selected: the registry member that the
    user asked for, None: no wish.
    Raises ValueError naming every demand the backend does not meet.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    dtype = config.kv_cache_dtype
    backend = getattr(backends, f"Tdsf{dtype.removeprefix('tdsf_').upper()}Backend")
    reasons = backend.validate_configuration(device_capability=capability, **config._asdict())
    if selected is not None and selected.name != backend.get_name():
        reasons.append(f"--attention-backend {selected.name} cannot read it")
    if reasons:
        raise ValueError(
            f"--kv-cache-dtype {dtype} cannot serve this model on {host}: {'; '.join(reasons)}. "
            "Serve it with --kv-cache-dtype auto."
        )
    path = f"{backends.__name__}.{backend.__name__}"
    if backend.get_name() not in AttentionBackendEnum.__members__:
        AttentionBackendEnum.register(backend.get_name(), path)
    return path

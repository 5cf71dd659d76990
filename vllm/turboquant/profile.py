# SPDX-License-Identifier: Apache-2.0
"""A profile: one model's constants for one cache format, as a file.

safetensors, never pickle: tensors named "<layer>/<constant>", and one metadata entry,
"vllm_tq_profile", that holds JSON:

    version     3
    model       architecture, config and weights: what `identity` found
    format      name of the cache format
    layers      names of the layers, in order
    fitted_on   text (a hash), tokens, dtype
    quality     what was measured afterwards, {} where nothing was
    sha256      of all tensor bytes, in the order of layers and constants
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from vllm.turboquant.constants import TENSORS, LayerConstants
from vllm.turboquant.formats import FORMATS, HEAD_DIMS, Format
from vllm.turboquant.identity import ModelIdentity

VERSION = 3
_KEY = "vllm_tq_profile"
_LARGEST = 1 << 33
"""Bytes; far above any model's constants, far below what would exhaust a host."""

_INVERSES = (("key_in", "query_in", True), ("value_in", "value_out", False))


@dataclass(frozen=True)
class Profile:
    """Constants by layer name, all kv heads of the model."""

    model: ModelIdentity
    format: Format
    layers: dict[str, LayerConstants]
    fitted_on: dict[str, str | int]
    quality: dict[str, float] = field(default_factory=dict)

    @property
    def strict(self) -> bool:
        """Whether the formula alone is the scale, in every layer; see `tdsf`."""
        return all(bool((c.scale_step == 0).all()) for c in self.layers.values())

    def to_bytes(self) -> bytes:
        """The file's content; equal profiles give equal bytes."""
        tensors = {
            f"{layer}/{name}": getattr(constants, name).clone(memory_format=torch.contiguous_format)
            for layer, constants in self.layers.items()
            for name in TENSORS
        }
        header = {
            "version": VERSION,
            "model": asdict(self.model),
            "format": self.format.name,
            "layers": list(self.layers),
            "fitted_on": self.fitted_on,
            "quality": self.quality,
            "sha256": _checksum(self.layers),
        }
        return save(tensors, {_KEY: json.dumps(header)})


def write(profile: Profile, path: Path) -> None:
    """Write a profile file, whole or not at all; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with partial.open("wb") as file:
            file.write(profile.to_bytes())
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read(path: Path) -> Profile:
    """Read a profile file and check everything that the kernels rely on.

    Raises ValueError, naming the file and what is wrong with it.
    """
    try:
        if path.stat().st_size > _LARGEST:
            raise ValueError("it is larger than any profile")
        return _parse(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} is not a usable TDSF profile: {error}\n"
            "Fit it again with `vllm turboquant calibrate`, or name another file."
        ) from error


def _parse(content: bytes) -> Profile:
    try:
        tensors = load(content)
    except SafetensorError as error:
        raise ValueError(f"not a safetensors file, or a truncated one ({error})") from error
    header = _header(content)
    if header.get("version") != VERSION:
        found = header.get("version")
        raise ValueError(f"its version is {found!r:.40}, this release reads version {VERSION}")
    try:
        model = ModelIdentity(**{name: str(x) for name, x in header["model"].items()})
        fmt = FORMATS[header["format"]]
        names = [str(name) for name in header["layers"]]
        fitted_on, quality, checksum = dict(header["fitted_on"]), dict(header["quality"]), str(
            header["sha256"]
        )
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"its header lacks or garbles an entry ({error!r:.120})") from error
    expected = {f"{layer}/{name}" for layer in names for name in TENSORS}
    if len(set(names)) != len(names) or not names or expected != set(tensors):
        raise ValueError("its tensors are not those of the layers that its header lists")
    layers = {
        layer: _layer(layer, fmt, {name: tensors[f"{layer}/{name}"] for name in TENSORS})
        for layer in names
    }
    if len({bool(x == 0) for c in layers.values() for x in c.scale_step}) > 1:
        raise ValueError("its scale_step is zero in some places and not in others")
    if _checksum(layers) != checksum:
        raise ValueError("its tensors do not match their checksum")
    return Profile(model, fmt, layers, fitted_on, quality)


def _header(content: bytes) -> dict:
    length = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + length]).get("__metadata__") or {}
    try:
        header = json.loads(metadata[_KEY])
    except (LookupError, ValueError, RecursionError) as error:
        raise ValueError(f"its metadata holds no {_KEY!r} entry in JSON") from error
    if not isinstance(header, dict):
        raise ValueError(f"its {_KEY!r} entry is no JSON object")
    return header


def _layer(layer: str, fmt: Format, tensors: dict[str, torch.Tensor]) -> LayerConstants:
    """The constants of one layer, checked. Raises ValueError naming the layer."""

    def demand(condition: bool, problem: str) -> None:
        if not condition:
            raise ValueError(f"layer {layer:.80}: {problem}")

    for name, x in tensors.items():
        dtype = torch.int8 if name.endswith("_levels") else torch.float32
        demand(x.dtype == dtype, f"{name} is {x.dtype}, expected {dtype}")
        demand(bool(x.isfinite().all()), f"{name} has numbers that are not finite")
        want = {"key_center": 2, "key_bias": 2, "tdsf": 2, "scale_step": 1}.get(name, 3)
        demand(x.ndim == want, f"{name} has {x.ndim} dimensions, expected {want}")
    heads, dim = tensors["key_center"].shape
    demand(heads > 0 and dim in HEAD_DIMS, f"{heads} kv heads of dimension {dim}")
    try:
        constants = LayerConstants(**tensors)
    except ValueError as error:
        raise ValueError(f"layer {layer:.80}: {error}") from error
    for name, bits in (("key_levels", fmt.key_bits), ("value_levels", fmt.value_bits)):
        table = tensors[name]
        demand(table.shape[2] == (2**bits if bits < 8 else 0), f"{name} is not of {bits} bits")
        demand(bool((table[..., 1:] > table[..., :-1]).all()), f"{name} does not ascend")
    amplitude, decay, floor = constants.tdsf.view(heads, 2, 3).unbind(-1)
    sane = (floor > 0) & (amplitude + floor > 0) & (decay >= 0)
    demand(bool(sane.all()), "a predicted scale is not positive at every position")
    step = constants.scale_step
    demand(bool(((step >= 0) & (step <= 1 / 4)).all()), "scale_step is outside 0 ... 1/4 octave")
    for one, other, transposed in _INVERSES:
        a, b = getattr(constants, one).double(), getattr(constants, other).double()
        gap = a @ (b.mT if transposed else b) - torch.eye(dim, dtype=torch.float64)
        demand(float(gap.abs().max()) < 0.05, f"{other} does not undo {one}")
    return constants


def _checksum(layers: dict[str, LayerConstants]) -> str:
    digest = hashlib.sha256()
    for constants in layers.values():
        for name in TENSORS:
            digest.update(getattr(constants, name).contiguous().numpy().tobytes())
    return digest.hexdigest()

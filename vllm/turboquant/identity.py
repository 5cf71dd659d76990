# SPDX-License-Identifier: Apache-2.0
"""Which model version a set of constants belongs to.

Two versions of one model share a name and a shape, and still want different constants. So a model
is identified by what it computes with: its architecture, its config, and its weight files.
"""

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path

_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Config entries that do not say what the model computes."""

_SAMPLE = 1024
"""Bytes read from the middle of every tensor."""

_SAMPLES = 256
"""Places read from a weight file whose tensors are not listed at its start."""

_LARGEST_HEADER = 100_000_000
"""The limit of the safetensors format."""


@dataclass(frozen=True)
class ModelIdentity:
    """The hashes are hexadecimal, 16 digits."""

    architecture: str
    config: str
    weights: str

    def __str__(self) -> str:
        return f"{self.architecture} (config {self.config}, weights {self.weights})"

    @property
    def slug(self) -> str:
        """The identity as a part of a file name."""
        return f"{self.architecture}-{self.config[:8]}-{self.weights}"


def identify(model: Path) -> ModelIdentity:
    """The identity of a model folder (config.json and weight files), or of a folder's one file.

    Raises ValueError when the folder has no config or no weights, or a weight file is malformed.
    """
    folder = model if model.is_dir() else model.parent
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        architecture = config["architectures"][0]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{folder} has no readable config.json with an architecture.") from error
    if not (isinstance(architecture, str) and architecture.isidentifier()):
        raise ValueError(f"{folder}/config.json names no architecture: {architecture!r:.60}")
    kept = {name: x for name, x in config.items() if name not in _NOT_THE_MODEL}
    canonical = json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()
    files = [model] if model.is_file() else _weight_files(folder)
    total = hashlib.sha256()
    for file in files:
        total.update(_fingerprint(file))
    return ModelIdentity(
        architecture, hashlib.sha256(canonical).hexdigest()[:16], total.hexdigest()[:16]
    )


def locate(model: str, revision: str | None, download_dir: str | None) -> Path:
    """The folder or file of a model that vLLM has loaded by path or by repository name.

    Raises ValueError when it is not on this machine's disk.
    """
    path = Path(model)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                model, revision=revision, cache_dir=download_dir, local_files_only=True
            )
        )
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise ValueError(f"The files of {model} are not on this machine's disk.") from error


def _weight_files(folder: Path) -> list[Path]:
    for pattern in ("*.safetensors", "*.gguf", "*.bin", "*.pt", "*.pth"):
        if files := sorted(folder.glob(pattern)):
            return files
    raise ValueError(f"{folder} has no weight files.")


def _fingerprint(file: Path) -> bytes:
    """Hash of the file's size, its header, and bytes from every tensor: cheap, and any training
    step changes it."""
    size = file.stat().st_size
    digest = hashlib.sha256(struct.pack("<Q", size))
    with file.open("rb") as data:
        if file.suffix == ".safetensors":
            places = _tensors(data, size, digest, file)
        else:
            places = [size * i // _SAMPLES for i in range(_SAMPLES)]
        for place in places:
            data.seek(place)
            digest.update(data.read(_SAMPLE))
    return digest.digest()


def _tensors(data, size: int, digest, file: Path) -> list[int]:
    """Hash the header of a safetensors file; returns the middle of each tensor, in file order."""
    try:
        (length,) = struct.unpack("<Q", data.read(8))
        if not 2 <= length <= min(size - 8, _LARGEST_HEADER):
            raise ValueError("its header has no sane length")
        header = data.read(length)
        entries = [x for name, x in json.loads(header).items() if name != "__metadata__"]
        middles = [8 + length + (sum(x["data_offsets"]) - _SAMPLE) // 2 for x in entries]
    except (struct.error, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not a safetensors file: {error}") from error
    digest.update(header)
    return sorted(max(middle, 8 + length) for middle in middles)

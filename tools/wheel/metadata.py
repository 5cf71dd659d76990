# SPDX-License-Identifier: Apache-2.0
"""The .dist-info files of our wheel, from those of the kernel wheel and the patched tree."""

import base64
import csv
import hashlib
import io
from email import message_from_string
from email.message import Message
from typing import Any

from packaging.requirements import Requirement

SUMMARY = "vLLM with a TurboQuant KV cache with token-wise dynamic scaling"
DESCRIPTION = """\
# vLLM-TQ

A modified distribution of vLLM whose KV cache can be kept in 3 to 8 bits per coordinate:

    python -m vllm.entrypoints.openai.api_server --model MODEL --kv-cache-dtype tdsf_k4v4

Everything else is used as in vLLM. Image, audio and video models need the extra
`multimodal`. Licensed under the Apache License 2.0; see NOTICE.
"""
# What `vllm turboquant evaluate --html` draws with.
EVALUATE = ("matplotlib>=3.8",)
# Only image, audio and video models import these, and they bind to one build of torch.
MULTIMODAL = ("torchvision", "torchaudio", "torchcodec")
# What needs CUDA 13, or a package that does: kernels for Hopper and Blackwell, video decoding,
# loaders. vLLM imports them where they are used, and has others for those uses.
CUDA_13 = (
    "apache-tvm-ffi", "fastsafetensors", "flashinfer-python", "humming-kernels", "instanttensor",
    "nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "pynvvideocodec", "quack-kernels", "tilelang",
    "tokenspeed-mla",
)  # fmt: skip
PTXAS_12_4 = "nvidia-cuda-nvcc-cu12==12.4.131"
KEPT = ("License-Expression", "Classifier", "Requires-Python")
UPSTREAM_AUTHORS = "vLLM Team and the authors of vLLM-TQ"


def metadata(kernel: str, version: str, license_files: list[str]) -> str:
    """METADATA from the kernel wheel's, under our name, version and requirements.

    Author, links and description of the kernel wheel are its packager's; they go.
    """
    old, new = message_from_string(kernel), Message()
    new["Metadata-Version"] = "2.4"
    new["Name"] = "vllm"
    new["Version"] = version
    new["Summary"] = SUMMARY
    new["Author"] = UPSTREAM_AUTHORS
    for field in KEPT:
        for value in old.get_all(field, []):
            new[field] = value
    for file in license_files:
        new["License-File"] = file
    needed, extras = old.get_all("Requires-Dist", []), old.get_all("Provides-Extra", [])
    if version.endswith(".cu124"):
        needed = _for_cuda_12(needed)
    for requirement in requirements(needed):
        new["Requires-Dist"] = requirement
    for requirement in EVALUATE:
        new["Requires-Dist"] = f'{requirement}; extra == "evaluate"'
    for extra in sorted({*extras, "multimodal", "evaluate"}):
        new["Provides-Extra"] = extra
    new["Description-Content-Type"] = "text/markdown"
    lines = [f"{field}: {value}" for field, value in new.items()]
    return "\n".join([*lines, "", DESCRIPTION])


def requirements(published: list[str]) -> list[str]:
    """What an index can deliver: torch without a local version, media libraries optional."""
    result: list[str] = []
    for text in published:
        requirement = Requirement(text)
        if requirement.name == "torch":
            # "2.13.0+cpu" is on no ordinary index; "==2.13.0" is met by it as well
            public = str(requirement.specifier).split("+")[0]
            text = f"torch{public}"
        elif requirement.name in MULTIMODAL:
            marker = f"({requirement.marker}) and " if requirement.marker else ""
            text = f'{requirement.name}{requirement.specifier}; {marker}extra == "multimodal"'
        if text not in result:
            result.append(text)
    return result


def _for_cuda_12(requirements: list[str]) -> list[str]:
    """Without what needs CUDA 13, with the ptxas that Triton is to use."""
    kept = [text for text in requirements if Requirement(text).name.lower() not in CUDA_13]
    return [*(text for text in kept if "cu13" not in text), PTXAS_12_4]


def wheel(tag: str) -> str:
    """The WHEEL file for one compatibility tag."""
    return f"Wheel-Version: 1.0\nGenerator: vllm-tq\nRoot-Is-Purelib: false\nTag: {tag}\n"


def entry_points(project: dict[str, Any]) -> str:
    """entry_points.txt from the [project] table of the patched pyproject.toml."""
    groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    blocks = [
        "\n".join([f"[{group}]", *(f"{name} = {target}" for name, target in sorted(all_.items()))])
        for group, all_ in sorted(groups.items())
    ]
    return "\n\n".join(blocks) + "\n"


def read_record(text: str) -> dict[str, tuple[str, str]]:
    """RECORD as path -> (hash, size)."""
    return {path: (digest, size) for path, digest, size in csv.reader(io.StringIO(text))}


def write_record(entries: dict[str, tuple[str, str]]) -> str:
    """RECORD, in the order given."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(
        (path, digest, size) for path, (digest, size) in entries.items()
    )
    return buffer.getvalue()


def record_entry(data: bytes) -> tuple[str, str]:
    """Hash and size of a file as RECORD states them."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"sha256={digest}", str(len(data))

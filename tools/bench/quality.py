# SPDX-License-Identifier: Apache-2.0
"""KL, perplexity and bits of every format on the default model and upstream's documentation."""

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tools import index
from tools.models import catalog
from tools.pins import Pins

CHARACTERS = 400_000  # of 2.4 million: tokenizing all of it would take longer than measuring
FORMATS = "fp8,q4_1,turboquant_4bit_nc,tdsf_k8v8,tdsf_k8v4,tdsf_k4v4,tdsf_k4v3,tdsf_k3v3"


def evaluation_text() -> str:
    """The first Markdown files below docs/ of the pinned source archive, in the order of names."""
    pin = Pins().sdist()
    with tarfile.open(index.fetch(pin.project, pin.file, pin.sha256)) as archive:
        pages = {
            member.name: archive.extractfile(member).read().decode()
            for member in archive
            if member.isfile() and _is_page(member.name)
        }
    return "\n\n".join(pages[name] for name in sorted(pages))[:CHARACTERS]


def _is_page(name: str) -> bool:
    path = Path(name)
    return path.suffix == ".md" and path.parts[1:2] == ("docs",)


def main(options: list[str]) -> int:
    """Run `vllm turboquant evaluate`; `options` are added to its own."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as text:
        text.write(evaluation_text())
        text.flush()
        command = [sys.executable, "-m", "vllm.turboquant", "evaluate"]
        command += ["--model", str(catalog.make("smollm2")), "--data", text.name]
        command += ["--dtype", "float32", "--formats", FORMATS, *options]
        return subprocess.run(command, check=False).returncode

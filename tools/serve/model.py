# SPDX-License-Identifier: Apache-2.0
"""Which model MODEL= names: one we make, a folder, or a repository of the model hub."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from tools.errors import Problem
from tools.models import catalog


@dataclass(frozen=True)
class Model:
    """What is passed to the server, the name it answers to, and whether it is on disk."""

    source: str
    name: str
    local: bool

    def config(self) -> dict[str, Any]:
        """Its config.json, or {} where there is none (yet)."""
        if self.local:
            path = Path(self.source, "config.json")
        else:
            cached = try_to_load_from_cache(self.source, "config.json")
            if not isinstance(cached, str):
                return {}
            path = Path(cached)
        return json.loads(path.read_text())


def find(name: str) -> Model:
    """The model `name` names; made now if it is one of ours."""
    if name in catalog.CATALOG:
        return Model(str(catalog.make(name)), name, local=True)
    folder = Path(name).expanduser()
    if (folder / "config.json").exists():
        return Model(str(folder.resolve()), folder.resolve().name, local=True)
    if name.count("/") == 1 and not name.startswith((".", "/", "~")) and not folder.exists():
        return Model(name, name, local=False)
    raise Problem(
        f"unknown model {name}",
        f"{folder} holds no model" if folder.exists() else f"there is no folder {folder}",
        f"MODEL= takes {', '.join(sorted(catalog.CATALOG))}, a folder with a config.json,"
        " or an OWNER/NAME of the model hub",
    )

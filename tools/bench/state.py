# SPDX-License-Identifier: Apache-2.0
"""Finished measurements, kept so that an interrupted bench goes on where it stopped.

One file per set of versions and machine; one entry per contestant, pass and job. Whatever could
change a figure is part of the key, so nothing measured with other code or elsewhere is taken up.
"""

import hashlib
import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tools.cache import cache_dir, write_whole
from tools.errors import Problem
from tools.pins import Pins
from tools.wheel.install import STAMP

SUBJECTS = Path(__file__).with_name("subjects")


def cpus() -> list[int]:
    """One logical CPU of each physical core that this process may use."""
    allowed = sorted(os.sched_getaffinity(0))
    first = {}
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        first.setdefault(siblings.read_text() if siblings.exists() else cpu, cpu)
    return list(first.values())


def machine() -> dict[str, Any]:
    """What of this machine decides speed: processor, cores, memory in MiB."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": named[0] if named else platform.machine(),
        "cores": len(cpus()),
        "memory_mib": pages >> 20,
    }


def versions() -> dict[str, str]:
    """Of everything that is measured, our wheel by its hash. Raises Problem where it is missing."""
    if not STAMP.exists():
        raise Problem("our wheel is not installed", f"in {sys.prefix}", "make install")
    pins = Pins()
    return {
        "ours": STAMP.read_text().strip(),
        "upstream": pins.wheel("cpu", platform.machine()).file,
        "model": pins.model("smollm2").sha256,
        "measured by": digest([path.read_text() for path in sorted(SUBJECTS.glob("*.py"))]),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "python": platform.python_version(),
    }


def digest(value: Any) -> str:
    """12 hex digits that name a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


class State:
    """Results by entry, on disk after every `put`."""

    def __init__(self, fresh: bool = False) -> None:
        self.key = {"versions": versions(), "machine": machine()}
        self.path = cache_dir() / "bench" / f"{digest(self.key)}.json"
        self._results: dict[str, Any] = {}
        if not fresh and self.path.exists():
            try:
                self._results = json.loads(self.path.read_text())["results"]
            except (ValueError, KeyError, TypeError) as error:
                raise Problem(
                    f"the finished passes cannot be read: {error!r}",
                    str(self.path),
                    "remove this file, or add --fresh",
                ) from error

    def get(self, entry: str) -> Any | None:
        """The result of an entry, None where there is none yet."""
        return self._results.get(entry)

    def put(self, entry: str, result: Any) -> None:
        self._results[entry] = result
        write_whole(self.path, json.dumps(self.key | {"results": self._results}))

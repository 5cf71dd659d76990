# SPDX-License-Identifier: Apache-2.0
"""The pinned requirements, and how those of another release differ from them."""

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from email import message_from_string
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import Version

from tools.errors import Problem
from tools.wheel.metadata import requirements


def read_pins(text: str) -> dict[str, str]:
    """Version by name of a file of `name==version` lines, some with a marker."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))


def write_pins(text: str, pins: dict[str, str]) -> str:
    """The same file with these pins beside or instead of its own."""
    head, _, body = text.partition("\n\n")
    lines = {line.split("==")[0]: line for line in body.splitlines()}
    for name, number in pins.items():
        marker = lines.get(name, "").partition(" ;")[1:]
        lines[name] = f"{name}=={number}{''.join(marker)}"
    return f"{head}\n\n" + "".join(f"{lines[name]}\n" for name in sorted(lines))


def differences(wheel: Path, pins: dict[str, str]) -> dict[str, str]:
    """What a kernel wheel needs otherwise than this environment, which holds `pins`.

    pip keeps what is installed as long as it is allowed, so its plan is the difference.
    """
    for name, number in pins.items():
        if (found := _installed(name)) not in (number, ""):
            raise Problem(
                f"this environment is not the pinned one: {name} is {found}, not {number}",
                f"in {sys.prefix}",
                "run make setup and use .venv/bin/python",
            )
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        message = message_from_string(archive.read(name).decode())
    with tempfile.TemporaryDirectory() as folder:
        wanted, plan = Path(folder) / "wanted.txt", Path(folder) / "plan.json"
        wanted.write_text("\n".join(requirements(message.get_all("Requires-Dist", []))))
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        command = [*pip, "install", "--dry-run", "--report", str(plan), "-r", str(wanted)]
        if status := subprocess.run(command).returncode:
            raise Problem(
                f"pip finds no set of packages that suits {wheel.name}",
                f"it ended with status {status}; its messages are above",
                "check the network; the wheel's own requirements may contradict each other",
            )
        items = [item["metadata"] for item in json.loads(plan.read_text())["install"]]
    found = {canonicalize_name(i["name"]): Version(i["version"]).public for i in items}
    return dict(sorted(found.items()))


def _installed(name: str) -> str:
    try:
        return Version(version(name)).public
    except PackageNotFoundError:
        return ""

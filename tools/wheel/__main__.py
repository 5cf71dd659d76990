# SPDX-License-Identifier: Apache-2.0
"""The wheel: build it into dist/, install it into this environment, tell what a file needs."""

import argparse
import json
import os
import platform
import time
from pathlib import Path

from tools import errors
from tools.cache import sha256_of
from tools.errors import Problem
from tools.pins import ROOT, Pins
from tools.wheel import inputs, inspect
from tools.wheel.build import Target, build
from tools.wheel.cuda.kernels import ARCHS
from tools.wheel.install import install

DIST = ROOT / "dist"
MACHINES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.wheel", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("build", "install"):
        options = verbs.add_parser(verb)
        options.add_argument("--target", default="cpu", help="cpu, cu130, cu124")
        options.add_argument("--tag", metavar="X.Y.Z", help="upstream's release (default: the pin)")
        options.add_argument("--machine", default=platform.machine(), help="default: this one")
        options.add_argument("--archs", default=ARCHS, help='GPUs of cu124 (default: "%(default)s")')
        options.add_argument("--jobs", type=int, default=os.cpu_count(), help="of cu124")
    options = verbs.add_parser("inspect", help="what a wheel or library needs of its host")
    options.add_argument("file", type=Path)
    options.add_argument("--expect", choices=inspect.EXPECTED, help="fail unless it serves these")
    arguments = parser.parse_args()
    if arguments.verb == "inspect":
        libraries = inspect.inspect(arguments.file)
        print(inspect.report(arguments.file, libraries), flush=True)
        if arguments.expect:
            inspect.expect(arguments.file, libraries, arguments.expect)
        return
    pins = Pins()
    release = arguments.tag or pins.release
    target = Target(
        arguments.target, _machine(arguments.machine), release, pins.revision, arguments.archs
    )
    _buildable(target)
    wheel = current_wheel(target, pins, arguments.jobs)
    if arguments.verb == "install" and not install(wheel):
        print(f"{wheel.name} is installed")


def current_wheel(target: Target, pins: Pins, jobs: int = 1) -> Path:
    """The wheel made of the present inputs: the one in dist/, or a new one."""
    stamp = ROOT / "build" / f"wheel-{target.target}-{target.machine}.json"
    wanted = inputs.digest(target)
    if stamp.exists():
        made = json.loads(stamp.read_text())
        wheel = DIST / made["file"]
        if made["inputs"] == wanted and wheel.exists() and sha256_of(wheel) == made["sha256"]:
            print(f"{wheel.relative_to(ROOT)} is up to date")
            return wheel
    started = time.monotonic()
    wheel = build(target, pins, DIST, jobs)
    stamp.write_text(
        json.dumps({"inputs": wanted, "file": wheel.name, "sha256": sha256_of(wheel)}) + "\n"
    )
    size, seconds = wheel.stat().st_size / 1e6, time.monotonic() - started
    print(f"{wheel.relative_to(ROOT)}: {size:.0f} MB in {seconds:.0f} s")
    return wheel


def _machine(name: str) -> str:
    """The name by which wheels call a machine; an unknown one stays as it is."""
    return MACHINES.get(name.lower(), name)


def _buildable(target: Target) -> None:
    if target.compiles and target.machine != _machine(platform.machine()):
        raise Problem(
            f"a wheel for {target.machine} cannot be built here",
            f"this machine is {platform.machine()}; what is compiled is for its own kind",
            f"run build_wheel.sh on a machine of {' or '.join(sorted(set(MACHINES.values())))}",
        )


if __name__ == "__main__":
    errors.run(main)

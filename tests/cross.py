# SPDX-License-Identifier: Apache-2.0
"""Debian's compiler for aarch64, and qemu-user, which runs what it makes."""

import os
import platform
import shutil
import subprocess

import pytest

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
PACKAGES = {COMPILER: "g++-aarch64-linux-gnu", EMULATOR: "qemu-user"}


def require() -> None:
    """Both on PATH: as root on Debian or Ubuntu, installed now where they are missing.

    The caller's test skips, and says what it would take, on other hosts that lack them; it also
    skips on aarch64 itself, where other tests run the same code natively.
    """
    if platform.machine() == "aarch64":
        pytest.skip("this host is aarch64: test_variants.py and test_sanitized.py run its variants")
    missing = [package for tool, package in PACKAGES.items() if shutil.which(tool) is None]
    if not missing:
        return
    install = ["apt-get", "install", "-q", "-y", "--no-install-recommends", *missing]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip(f"aarch64 is not tested; next: as root on Debian or Ubuntu, {' '.join(install)}")
    print(f"installing {' '.join(missing)}", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["apt-get", "update", "-q"], install):
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}{result.stderr}"

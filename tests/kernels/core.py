# SPDX-License-Identifier: Apache-2.0
"""core.cpp: the kernel core as a program without torch."""

import os
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("core.cpp")


def is_core(unit: str) -> bool:
    """Whether a file of csrc/turboquant is part of the program: those that know torch are not."""
    return unit != "floor.cpp" and not unit.endswith("binding.cpp")


def run(command: list[str | Path], rounds: int, variant: str = "") -> tuple[str, str]:
    """The variant that ran `rounds` of cases, and the digest of all that it wrote.

    command: the program, or an emulator and the program. variant: "" for the CPU's best.
    """
    result = subprocess.run(
        [*command, str(rounds)],
        # libgomp keeps its threads' memory to the end, which is no leak of ours.
        env={**os.environ, "VLLM_TQ_ISA": variant, "ASAN_OPTIONS": "detect_leaks=0"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    name, digest = result.stdout.split()
    return name, digest

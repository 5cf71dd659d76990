# SPDX-License-Identifier: Apache-2.0
"""Every instruction set variant this CPU runs gives the portable one's bits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm.turboquant import kernels

ROOT = Path(__file__).parents[2]
OTHERS = [name for name in kernels.variants() if name != "portable"]


def digests(variant: str) -> list[str]:
    """One line per scene: digests of the stored cache and of the attention over it."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.digests"],
        env={**os.environ, "VLLM_TQ_ISA": variant},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.fixture(scope="module")
def portable() -> list[str]:
    lines = digests("portable")
    assert lines[0] == "portable" and len(set(lines)) == len(lines) > 20
    return lines


@pytest.mark.parametrize("variant", OTHERS)
def test_same_bits(variant, portable):
    lines = digests(variant)
    assert lines[0] == variant
    assert lines[1:] == portable[1:]


def test_unknown_variant_is_refused():
    with pytest.raises(AssertionError, match="VLLM_TQ_ISA is abacus; this CPU runs"):
        digests("abacus")

# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of `interpreted` under Triton's interpreter, on the CPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("part", sorted(p.name for p in HERE.glob("interpreted/test_*.py")))
def test_kernels_do_what_the_reference_says(part):
    done = subprocess.run(
        *([sys.executable, "-m", "pytest", "-q", f"{HERE}/interpreted/{part}"],),
        cwd=HERE.parents[1],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    print(done.stdout[-6000:], done.stderr[-2000:])
    assert done.returncode == 0
    assert re.search(r"\b[1-9]\d* passed", done.stdout)
    assert "skipped" not in done.stdout

# SPDX-License-Identifier: Apache-2.0
"""The kernels compile for every architecture, without spilling, with Triton's own ptxas and with
CUDA 12.4's. A sample that meets all code; `python -m tools.bench ptx` compiles every variant."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench.ptx import SHARED_LIMIT, sample, variants

ROOT = Path(__file__).parents[2]


def compiled(tmp_path, *arguments: str) -> list[dict]:
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench", "ptx", "--sample", "--json", report, *arguments],
        cwd=ROOT,
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(report.read_text())


@pytest.mark.parametrize("architecture", [80, 90])
def test_nothing_spills(tmp_path, architecture):
    rows = compiled(tmp_path, "--architectures", str(architecture))
    assert len(rows) == len(sample(list(variants())))
    for row in rows:
        assert row["spilled"] == 0
        assert 0 < row["registers"] <= 255
        # Of sm_80, sm_86 and sm_89 the code differs in name; the last two share the least memory.
        assert row["shared"] <= 1024 * min(SHARED_LIMIT.values())


def test_ptxas_of_cuda_12_4(tmp_path):
    rows = compiled(tmp_path, "--architectures", "86,89", "--dims", "64", "--ptxas", "12.4")
    assert {row["ptx"] for row in rows} == {"8.4"}
    assert {row["architecture"] for row in rows} == {86, 89}
    assert not any(row["spilled"] for row in rows)


def test_the_sample_meets_every_kernel_and_width():
    chosen = sample(list(variants()))
    assert {v.kernel for v in chosen} == {v.kernel for v in variants()}
    assert {v.key_bits for v in chosen if v.kernel == "attend"} == {3, 4, 8}
    assert {v.value_bits for v in chosen if v.kernel == "attend"} >= {3, 4}

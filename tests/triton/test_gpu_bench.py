# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.bench gpu` from a bare checkout: runs to its end without GPU and without vLLM."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path):
    """A copy of what the command needs, and a path to packages without vLLM among them."""
    for folder in ("tools", "vllm"):
        shutil.copytree(ROOT / folder, tmp_path / "repo" / folder)
    packages = tmp_path / "packages"
    packages.mkdir()
    for entry in Path(torch.__file__).parents[1].iterdir():
        if not entry.name.startswith("vllm") and entry.suffix != ".pth":
            (packages / entry.name).symlink_to(entry)
    return tmp_path / "repo", packages


def run(checkout, *arguments: str) -> tuple[str, dict]:
    repo, packages = checkout
    report = repo / "report.json"
    done = subprocess.run(
        [sys.executable, "-S", "-m", "tools.bench", "gpu", "--json", report, *arguments],
        cwd=repo,
        env=os.environ | {"PYTHONPATH": str(packages), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout, json.loads(report.read_text())


def test_without_a_gpu_it_checks_and_times_nothing(checkout):
    said, report = run(checkout, "--formats", "tdsf_k8v8,tdsf_k4v4")
    assert "nothing was timed" in said and report["vllm"] == "this checkout alone"
    assert [c["format"] for c in report["checks"]] == ["tdsf_k8v8", "tdsf_k4v4"]
    assert all(c["error"] < 0.01 for c in report["checks"])
    assert report["timings"] == []


def test_predictions_say_so(checkout):
    said, report = run(checkout, "--model")
    assert said.startswith("PREDICTED, not measured")
    rows = {(r["model"], r["cache"]): r for r in report["predictions"]}
    # Qwen3-8B: 36 layers of 8 heads, 128 coordinates of 4 bits twice and two scale bytes.
    row = rows["Qwen3-8B", "tdsf_k4v4"]
    assert row["bytes_per_token"] == 36 * 8 * (64 + 64 + 2)
    assert row["least_ms"]["H100 SXM"] == pytest.approx(8 * 32768 * 37440 / 3350e6)
    assert rows["Qwen3-8B", "bf16"]["bytes_per_token"] == 36 * 8 * 512

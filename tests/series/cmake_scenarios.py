# SPDX-License-Identifier: Apache-2.0
"""The edited parts of CMakeLists.txt, run alone by CMake's script mode."""

import json
import subprocess
import sys
from pathlib import Path


def lines_that_run(text: str, folder: Path) -> set[int]:
    """The numbers of the lines that run in the scenarios. text: the patched CMakeLists.txt."""
    lines, ran = text.splitlines(), set()

    def run(begin: int, end: int | None = None, rest: str = "", **variables: str) -> list[str]:
        """The commands of lines [begin, end), which keep their numbers, and `rest` that ran."""
        script, trace = folder / "part.cmake", folder / "trace.json"
        script.write_text("\n" * begin + "\n".join(lines[begin:end]) + f"\n{rest}\n")
        command = [sys.executable, "-m", "cmake", "--trace-format=json-v1"]
        command += [f"--trace-redirect={trace}"]
        command += [f"-D{name}={value}" for name, value in variables.items()]
        subprocess.run([*command, "-P", script], cwd=folder, capture_output=True)
        _, *records = map(json.loads, trace.read_text().splitlines())
        for record in records:
            numbers = range(record["line"], record.get("line_end", record["line"]) + 1)
            ran.update(number for number in numbers if end is None or number <= end)
        return [record["cmd"] for record in records]

    # With our option the file ends before it includes the external projects.
    own = lines.index("if (VLLM_TQ_OWN_KERNELS)")
    assert run(own, VLLM_GPU_LANG="CUDA", VLLM_TQ_OWN_KERNELS="ON") == ["if", "return"]
    assert "include" in run(own, VLLM_GPU_LANG="CUDA")

    # cooperative_topk wants CUDA 12.8.
    topk = next(at for at, line in enumerate(lines) if "COOPERATIVE_TOPK_ARCHS" in line)
    end = max(at for at in range(topk) if lines[at].endswith("12.8)")) + 1
    begin = max(at for at in range(end) if lines[at].lstrip().startswith("if("))
    for version, commands in (("12.4.131", ["if"]), ("12.8.61", ["if", "message"])):
        given = {"VLLM_GPU_LANG": "CUDA", "CMAKE_CUDA_COMPILER_VERSION": version}
        assert run(begin, end, "message(taken)\nendif()", **given) == commands
    # CMake reports no end of a block: it counts with the line above it.
    return ran | {at + 1 for at in ran if at < len(lines) and lines[at].lstrip() == "endif()"}

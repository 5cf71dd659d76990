# SPDX-License-Identifier: Apache-2.0
"""CUDA 12.4's ptxas for Triton, on the build for driver 550.

Triton writes GPU code for the ptxas it finds: it brings a newer one, whose code an older
driver may refuse, and where it is pointed at one that does not work it silently takes its
own. So the path is set before anything is compiled, and checked the way Triton checks it.
"""

import os
import re
import subprocess
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import torch

NEWEST = (12, 4)
PACKAGE = "nvidia-cuda-nvcc-cu12"
# The second one is asked for GPUs from sm_90 on by Triton 3.9, from sm_100 on by others.
VARIABLES = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")


def take_ptxas(version: str) -> None:
    """Point Triton at CUDA 12.4's ptxas; nothing on builds other than cu124.

    version: that of this build, "0.32.0+tq1.cu124". Raises ImportError where ptxas is missing,
    does not run or is newer, and where torch needs a newer driver than this build.
    """
    if not version.endswith(".cu124"):
        return
    if torch.version.cuda and int(torch.version.cuda.split(".")[0]) > NEWEST[0]:
        raise ImportError(
            "This vLLM is built for CUDA 12.4,"
            f" but the installed torch for CUDA {torch.version.cuda}.\n"
            "Install torch's CUDA 12.6 build of the same version (requirements/cu124.txt),\n"
            "or use the cu130 wheel with a driver of at least 580."
        )
    given = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    for path in given.values() or [_packaged()]:
        _check(path)
    for name in VARIABLES:
        os.environ[name] = given.get(name) or next(iter(given.values()), None) or _packaged()


def _packaged() -> str:
    try:
        path = Path(str(distribution(PACKAGE).locate_file("nvidia/cuda_nvcc/bin/ptxas")))
    except PackageNotFoundError:
        raise ImportError(
            "This vLLM is built for CUDA 12.4, whose ptxas is not installed.\n"
            f"Run pip install {PACKAGE}==12.4.131, or set TRITON_PTXAS_PATH to a ptxas 12.4."
        ) from None
    return str(path)


def _check(path: str) -> None:
    try:
        result = subprocess.run([path, "--version"], capture_output=True, text=True)
        said = result.stdout
    except OSError as error:
        said = str(error)
    found = re.search(r"release (\d+)\.(\d+)", said)
    if found is None or (int(found[1]), int(found[2])) > NEWEST:
        what = f"release {found[1]}.{found[2]}" if found else f"not a ptxas that runs: {said}"
        raise ImportError(
            f"Triton needs ptxas of CUDA 12.4 here; {path} is {what}.\n"
            f"Run pip install --force-reinstall {PACKAGE}==12.4.131 and unset {VARIABLES[0]}\n"
            f"and {VARIABLES[1]}, or set them to a ptxas 12.4."
        )

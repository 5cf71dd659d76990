# SPDX-License-Identifier: Apache-2.0
"""Small matrices want one thread: waking others costs more than their whole product, and the
number of threads would show in the last bits of a fit."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def on_one_thread(function: Callable[..., T], *args) -> T:
    """The result of `function(*args)`, computed without OpenMP teams.

    A fresh Python thread has OpenMP settings of its own, so the teams of the calling thread, which
    vLLM binds to cores, stay as they are. (vLLM's CPU worker disarms `torch.set_num_threads`.)
    """
    before = torch.get_num_threads()

    def alone() -> T:
        torch._C.set_num_threads(1)
        try:
            with torch.no_grad():
                return function(*args)
        finally:
            torch._C.set_num_threads(before)

    with ThreadPoolExecutor(1) as executor:
        return executor.submit(alone).result()

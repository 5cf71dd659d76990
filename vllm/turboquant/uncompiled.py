# SPDX-License-Identifier: Apache-2.0
"""A model's steps as `--enforce-eager` takes them, in an engine that compiles as well.

A compiled step rounds differently. Constants must depend on the model alone: those fitted at a
server's start and those of `vllm turboquant calibrate`, which compiles nothing, are to be the same
to the last bit.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vllm.config import VllmConfig, set_current_vllm_config


@contextmanager
def uncompiled(model: torch.nn.Module, config: VllmConfig) -> Iterator[None]:
    """Inside, `model` runs operator by operator, with the kernels that are chosen when nothing is
    compiled. Nothing is changed where nothing is compiled."""
    compiled = [m for m in model.modules() if not getattr(m, "do_not_compile", True)]
    operators = [m for m in model.modules() if hasattr(m, "dispatch_forward")] if compiled else []
    methods = [m._forward_method for m in operators]
    with _every_kernel(config):
        eager = [m.dispatch_forward(compile_native=False) for m in operators]
    try:
        for module in compiled:
            module.do_not_compile = True
        for module, method in zip(operators, eager):
            module._forward_method = method
        yield
    finally:
        for module in compiled:
            module.do_not_compile = False
        for module, method in zip(operators, methods):
            module._forward_method = method


@contextmanager
def _every_kernel(config: VllmConfig) -> Iterator[None]:
    """Operators choose as they do when nothing is compiled: their own kernel, where there is one."""
    choice = config.compilation_config
    usual, choice.custom_ops = choice.custom_ops, ["all"]
    try:
        with set_current_vllm_config(config):
            yield
    finally:
        choice.custom_ops = usual

# SPDX-License-Identifier: Apache-2.0
"""A model's steps as `--enforce-eager` takes them, in an engine that compiles as well.

A compiled step rounds differently. Constants must depend on the model alone: those fitted at a
server's start and those of `vllm turboquant calibrate`, which compiles nothing, are to be the same
to the last bit.
"""

from collections.abc import Callable, Iterator
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
    usual = _chosen(operators, config, config.compilation_config.custom_ops)
    eager = _chosen(operators, config, ["all"])
    try:
        for module in compiled:
            module.do_not_compile = True
        for module, method, by_rule, own_kernel in zip(operators, methods, usual, eager):
            if method == by_rule:  # others settled it by rules of their own
                module._forward_method = own_kernel
        yield
    finally:
        for module in compiled:
            module.do_not_compile = False
        for module, method in zip(operators, methods):
            module._forward_method = method


def _chosen(
    operators: list[torch.nn.Module], config: VllmConfig, custom_ops: list[str]
) -> list[Callable]:
    """The method each operator chooses when these custom_ops are configured."""
    choice = config.compilation_config
    configured, choice.custom_ops = choice.custom_ops, custom_ops
    try:
        with set_current_vllm_config(config):
            return [m.dispatch_forward(compile_native=False) for m in operators]
    finally:
        choice.custom_ops = configured

# SPDX-License-Identifier: Apache-2.0
"""Hybrid models in float32 on CPU: upstream's gated-delta-net operator computes in bf16 only.

Everything around the operator runs in the model's dtype. What enters is rounded to bf16, what leaves
is widened; the operator's own parameters and its convolution states are bf16, and its recurrent
state is what the model asks for, float32 as a rule.
"""

from collections.abc import Callable

import torch

INSIDE = torch.bfloat16


def keep_in_bf16(*parameters: torch.nn.Parameter) -> None:
    """Give float32 parameters the operator's dtype before weights are loaded into them."""
    for parameter in parameters:
        if parameter.dtype == torch.float32:
            parameter.data = parameter.data.to(INSIDE)


def convolution_dtype(model_dtype: torch.dtype | str) -> torch.dtype | str:
    """What stands for the model's dtype when the dtype of convolution states is derived from it."""
    from vllm.platforms import current_platform

    converts = model_dtype in (torch.float32, "float32") and current_platform.is_cpu()
    return INSIDE if converts else model_dtype


def in_bf16(
    operator: Callable[..., None],
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    output: torch.Tensor,
    layer_name,
) -> None:
    """Run the operator on rounded inputs; output [T, value_heads, head_dim] is written in its dtype.

    mixed_qkv [T, channels], b and a [T, value_heads]: as upstream's operator takes them.
    """
    result = output.to(INSIDE)
    operator(mixed_qkv.to(INSIDE), b.to(INSIDE), a.to(INSIDE), result, layer_name)
    output.copy_(result)

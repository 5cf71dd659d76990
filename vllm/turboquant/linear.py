# SPDX-License-Identifier: Apache-2.0
"""Linear layers on CPU whose rows do not depend on how many rows there are.

A cache of few bits turns the last bit of an activation into another code, and another code into
another answer. So with a TDSF cache a row of a linear layer must come out the same in a prefill
of 1,000 rows and in a decode of 1.

float32 models whose weights are bf16 numbers keep them as bf16 and run our kernel, exact and with
half the memory; that is also the fast choice on every host without bf16 arithmetic. Elsewhere
upstream's library computes, and is held to the rule by a probe when the weights are loaded.
"""

import functools

import torch
import torch.nn.functional as F

from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.turboquant import kernels
from vllm.turboquant.cpu import has_fast_bf16
from vllm.turboquant.formats import is_tdsf

logger = init_logger(__name__)

PANEL = 32  # output columns of a packed panel, csrc/turboquant/linear.h


@torch.library.register_fake("tdsf::linear")
def _(x, panels, out, bias):
    return x.new_empty(x.shape[0], out)


@torch.library.register_fake("tdsf::embed")
def _(ids, panels, out):
    return ids.new_empty(ids.shape[0], panels.shape[1], dtype=torch.float32)


def _serves_tdsf() -> bool:
    config = get_current_vllm_config_or_none()
    return config is not None and is_tdsf(config.cache_config.cache_dtype)


def take(layer: torch.nn.Module, drop_weight: bool) -> bool:
    """Choose the product of a layer with `weight` [out, in]; called before upstream chooses.

    True: `layer.cpu_linear` is set. False: upstream goes on.
    drop_weight: a plain linear layer, which needs its weight no more once that is packed.
    """
    weight = layer.weight
    if weight.is_meta or weight.ndim != 2 or getattr(layer, "_tdsf_entered", False):
        return False
    serves = _serves_tdsf()
    if weight.dtype == torch.float32 and (serves or not has_fast_bf16()) and _pack(layer):
        return True
    if not serves:
        return False
    # Let upstream choose, then look at what it chose.
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    rows, width = weight.shape
    layer._tdsf_entered = True
    dispatch_cpu_unquantized_gemm(layer, drop_weight)
    verdict = _probe(layer.cpu_linear, layer.weight, rows, width, weight.dtype)
    if verdict == "single":
        layer.cpu_linear = functools.partial(_with_spare_row, layer.cpu_linear)
    elif verdict == "several":
        logger.warning_once(
            "The matrix library of this host computes a row of a %s x %s product differently "
            "with the number of rows: answers may depend on batching in their last digits.",
            width,
            rows,
        )
    return True


def lookup(layer: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Embedding rows [*ids.shape, width] of a layer whose weight is packed."""
    weight = layer.weight
    rows = torch.ops.tdsf.embed(ids.reshape(-1).long(), weight.tdsf_panels, weight.tdsf_rows)
    return rows.view(*ids.shape, -1)


def _pack(layer: torch.nn.Module) -> bool:
    """Move a float32 weight into bf16 panels and use our kernel, where nothing is lost by it."""
    weight = layer.weight
    if kernels.isa() == "portable":
        return False
    if not hasattr(weight, "tdsf_panels"):
        rows, width = weight.shape
        panels = torch.empty(-(-rows // PANEL), width, PANEL, dtype=torch.int16)
        if not torch.ops.tdsf.pack_linear(weight.data, panels):
            logger.info_once(
                "Weights that are no bf16 numbers stay float32, at twice the memory and traffic."
            )
            return False
        # On the parameter, which a tied output head shares with the embedding.
        weight.tdsf_panels, weight.tdsf_rows = panels, rows
        weight.data = weight.data.new_empty(0, width)
    panels, rows = weight.tdsf_panels, weight.tdsf_rows

    def multiply(x, _weight, bias):
        y = torch.ops.tdsf.linear(x.reshape(-1, x.shape[-1]), panels, rows, bias)
        return y.view(*x.shape[:-1], rows)

    layer.cpu_linear = multiply
    return True


_verdicts: dict[tuple, str] = {}


def _probe(product, weight, rows: int, width: int, dtype: torch.dtype) -> str:
    """How a library's product depends on the number of input rows.

    "none": not at all. "single": one row alone differs from the same row among others, seen where
    `width` is large. "several": more than that. One answer per shape, from 64 random rows.
    """
    key = (rows, width, dtype)
    if key not in _verdicts:
        x = torch.randn(64, width, generator=torch.Generator().manual_seed(0)).to(dtype)
        whole = product(x, weight, None)

        def agrees(count: int) -> bool:
            parts = [product(part.contiguous(), weight, None) for part in x.split(count)]
            return torch.equal(torch.cat(parts), whole)

        if not all(map(agrees, (2, 4, 32))):
            _verdicts[key] = "several"
        else:
            _verdicts[key] = "none" if agrees(1) else "single"
    return _verdicts[key]


def _with_spare_row(product, x, weight, bias):
    flat = x.reshape(-1, x.shape[-1])
    y = product(F.pad(flat, (0, 0, 0, 1)), weight, bias)[:-1]
    return y.view(*x.shape[:-1], -1)

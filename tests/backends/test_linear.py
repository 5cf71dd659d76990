# SPDX-License-Identifier: Apache-2.0
"""Linear layers on CPU: exact, half the memory, and rows that do not see each other."""

import functools

import pytest
import torch

from vllm.turboquant import linear
from vllm.turboquant.kernels import isa

SHAPES = [(960, 576), (576, 1536), (3072, 576), (33, 64), (4096, 2048)]  # [out, in]


def packed(out: int, width: int, seed: int = 0) -> tuple[torch.nn.Module, torch.Tensor]:
    """A layer that our kernel took, and its weight as it was."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, width, generator=g).bfloat16().float()
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    assert linear._pack(layer)
    return layer, weight


@pytest.fixture(autouse=True)
def vector_unit():
    assert isa() != "portable", "this host has no variant that the engine would choose"


@pytest.mark.parametrize("out,width", SHAPES)
def test_products_are_those_of_the_wide_weight(out, width):
    layer, weight = packed(out, width)
    x, bias = torch.randn(19, width), torch.randn(out)
    got = layer.cpu_linear(x, layer.weight, bias)
    want = x.double() @ weight.double().T + bias.double()
    assert (got - want).abs().max() < 1e-5 * want.abs().max()


@pytest.mark.parametrize("out,width", SHAPES)
def test_a_row_is_the_same_for_any_number_of_rows(out, width):
    layer, _ = packed(out, width)
    x = torch.randn(300, width)
    whole = layer.cpu_linear(x, None, None)
    for rows in (1, 2, 3, 5, 6, 7, 8, 12, 13, 64, 255):
        parts = [layer.cpu_linear(part, None, None) for part in x.split(rows)]
        assert torch.equal(torch.cat(parts), whole), rows


def test_the_weight_is_kept_once_and_at_half_the_size():
    layer, weight = packed(1024, 512)
    assert layer.weight.numel() == 0
    panels = layer.weight.tdsf_panels
    assert panels.numel() * panels.element_size() == weight.numel() * 2
    head = torch.nn.Module()
    head.weight = layer.weight  # tied
    assert linear._pack(head) and head.weight.tdsf_panels is panels


def test_the_embedding_reads_rows_of_the_head():
    layer, weight = packed(1000, 96)
    ids = torch.tensor([[0, 999, 17], [31, 32, 33]])
    assert torch.equal(linear.lookup(layer, ids), weight[ids])
    with pytest.raises(ValueError, match="embedding id 1000"):
        linear.lookup(layer, torch.tensor([1000]))


def test_weights_that_are_no_bf16_numbers_are_left_alone():
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.full((64, 64), 1.0 + 2.0**-10), requires_grad=False)
    assert not linear._pack(layer)
    assert layer.weight.shape == (64, 64)


def test_a_library_that_treats_one_row_alone_is_given_two():
    """The probe finds the fault that oneDNN shows for wide inputs, and the remedy removes it."""
    weight = torch.randn(48, 64)

    def single(x, weight, bias):
        y = x @ weight.T
        return y * (1 + 2**-20) if len(x) == 1 else y

    def exact(x, weight, bias):
        return (x.double() @ weight.double().T).float()

    def counting(x, weight, bias):
        return exact(x, weight, bias) + len(x)

    probe = functools.partial(linear._probe, weight=weight, rows=48, dtype=torch.float32)
    linear._verdicts.clear()
    assert probe(exact, width=64) == "none"
    linear._verdicts.clear()
    assert probe(lambda x, w, b: exact(x, w, b) + (len(x) == 1), width=64) == "single"
    linear._verdicts.clear()
    assert probe(counting, width=64) == "several"
    linear._verdicts.clear()
    spare = functools.partial(linear._with_spare_row, single)
    x = torch.randn(2, 64)
    assert torch.equal(spare(x[:1], weight, None), (x @ weight.T)[:1])

# SPDX-License-Identifier: Apache-2.0
"""Which layers are proposed to be skipped, without an engine."""

from types import SimpleNamespace

import pytest

from vllm.turboquant import skip

LOSSES = {f"model.layers.{i}.attn": kl for i, kl in enumerate((1.0, 8.0, 3.0, 5.0))}


@pytest.fixture
def measured(monkeypatch):
    """Skipped sets in the order they were measured; losses add up and something is left over."""
    asked = []

    def measure(core, name, prompts, *, skipped):
        asked.append(list(skipped))
        kl = 1.1 * sum(x for layer, x in LOSSES.items() if layer not in skipped) + 0.05
        return SimpleNamespace(kl=kl, bits_per_element=4.0 + len(skipped))

    monkeypatch.setattr(skip, "measure", measure)
    return asked


@pytest.mark.parametrize(
    "target,layers",
    [(20.0, []), (10.0, [1]), (5.0, [1, 3]), (4.5, [1, 3]), (1.2, [1, 2, 3]), (0.1, [0, 1, 2, 3])],
)
def test_the_fewest_layers_that_meet_the_target(measured, target, layers):
    found = skip.propose(None, "tdsf_k4v4", [], LOSSES, target)
    assert found.layers == layers
    assert found.bits_per_element == 4.0 + len(layers)
    assert found.kl <= target
    assert measured[0] == []


def test_a_target_out_of_reach_skips_all_and_says_what_is_left(measured):
    found = skip.propose(None, "tdsf_k4v4", [], LOSSES, 0.01)
    assert found.layers == [0, 1, 2, 3] and found.kl > found.target

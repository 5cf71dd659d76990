# SPDX-License-Identifier: Apache-2.0
"""One sequence, one answer, to the last bit, however the scheduler cuts and batches the work.

A code that flips by rounding cascades: with a 4-bit cache, log-probabilities that should be equal
came out 1.0 apart before attention and linear layers were made to compute every row one way.
"""

import pytest
from transformers import AutoTokenizer

from tests.engine import default_model, engine, generate
from tests.serving.prompts import passages
from vllm.turboquant.cpu import has_fast_bf16

LENGTH, TOKENS = 700, 80

# What --dtype auto means here, eager and compiled as a server runs it; and float32, where that is
# another one: auto means float32 on hosts without bf16 arithmetic.
CASES = {
    "auto": dict(dtype="auto"),
    "compiled": dict(dtype="auto", enforce_eager=False),
}
if has_fast_bf16():
    CASES["float32"] = dict(dtype="float32")


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture(scope="module")
def prompts():
    return passages(AutoTokenizer.from_pretrained(default_model()), 8, LENGTH)


@pytest.fixture(scope="module")
def whole(case, prompts):
    """The prompt in one piece and alone; then a prefix hit; then among seven others."""
    with engine("tdsf_k4v4", max_num_batched_tokens=1024, **case) as llm:
        alone = generate(llm, prompts[:1], TOKENS)[0]
        hit = generate(llm, prompts[:1], TOKENS)[0]
        assert llm.reset_prefix_cache()
        among = generate(llm, prompts, TOKENS)[0]
    return {"alone": alone, "hit": hit, "among": among}


def assert_same(got, want):
    """Tokens, their log-probabilities and the next best five, to the last bit."""
    assert len(got) == len(want) == TOKENS
    for step, (a, b) in enumerate(zip(got, want)):
        assert a == b, f"step {step} of {TOKENS}: {a} is not {b}"


def test_after_a_prefix_cache_hit(whole):
    assert_same(whole["hit"], whole["alone"])


def test_among_seven_other_requests(whole):
    assert_same(whole["among"], whole["alone"])


def test_in_chunks_of_64(whole, case, prompts):
    with engine("tdsf_k4v4", max_num_batched_tokens=64, **case) as llm:
        assert_same(generate(llm, prompts[:1], TOKENS)[0], whole["alone"])


def test_after_preemption(whole, case, prompts):
    """Three prompts of 6 blocks run in 19; when each wants a seventh, one is put off."""
    options = case | dict(num_gpu_blocks_override=20, disable_log_stats=False)
    with engine("tdsf_k4v4", max_num_batched_tokens=1024, **options) as llm:
        answers = generate(llm, prompts[:3], TOKENS)
        preempted = sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
        assert preempted > 0
        assert llm.reset_prefix_cache()
        again = [generate(llm, [p], TOKENS)[0] for p in prompts[:3]]
    assert_same(answers[0], whole["alone"])
    for got, want in zip(answers, again):
        assert_same(got, want)


def test_the_comparison_has_something_to_compare(whole):
    """It would pass on a model that is always certain of one thing."""
    assert len({logprob for _, logprob, _ in whole["alone"]}) > TOKENS * 3 // 4

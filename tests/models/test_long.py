# SPDX-License-Identifier: Apache-2.0
"""Positions: the token asked for is found wherever it stands, by distance, to the last position.

At 8,192 tokens here; `make test-long` adds 131,072, the context that Qwen3 has with YaRN.
"""

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.models import distance_model
from tests.models.distance_model import question, short_distance
from tests.models.inside import engine_inside
from tools.models.recall import tokenizer
from vllm.turboquant.formats import FORMATS

CASES = {  # cache format and context: the share of rows that may take a neighbour instead
    ("auto", 8192): 0.0,
    ("tdsf_k8v8", 8192): 0.0,
    ("tdsf_k4v4", 8192): 0.01,
    ("auto", 131072): 0.0,
    ("tdsf_k8v8", 131072): 0.0,
    ("tdsf_k4v4", 131072): 0.06,
}
"""Four bits hardly tell keys apart that differ by one step of RoPE and in nothing else."""
BLOCK, CHUNK = 128, 2048
DECODED = 24
CERTAIN, UNLIKELY = -0.05, -4.0
"""Log-probabilities: of an answer at least, of any other token at most."""
AHEAD = 5
"""Index of the question for the token that comes next, which nobody may see."""


@dataclass
class Served:
    """An engine whose cache holds one sequence of `context` tokens and no block more."""

    llm: object
    name: str
    context: int
    needles: list[int]  # positions, by the index of the question that asks for them
    text: list[int]
    planned: int  # bytes of the cache
    rise: int = 0  # bytes that the first request took on top, at most

    @property
    def tolerance(self) -> float:
        return CASES[self.name, self.context]

    def prompt(self, needle: int) -> list[int]:
        return [*self.text, question(needle)]

    def answers(self, needle: int) -> list[int]:
        """The word asked for; of a format that mistakes some rows, its neighbours too, for which
        rows those are depends on the last bit of the machine's products."""
        at, reach = self.needles[needle], 1 if self.tolerance else 0
        return self.text[max(at - reach, 0) : at + reach + 1]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, marks=[pytest.mark.long] * (case[1] > 8192)) for case in CASES
    ],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def served(request, tmp_path_factory):
    name, context = request.param
    last = context - DECODED - 1  # where the question stands
    needles = [0, 1, 17, context // 2 - 1, context - 72]
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": context // 4,
    }
    folder = tmp_path_factory.mktemp("distance")
    distance_model.build(folder, [*(last - needle for needle in needles), -1], rope, context)
    planned = (context // BLOCK + 1) * page_bytes(name)  # vLLM keeps one block for itself
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_TQ_CACHE", str(tmp_path_factory.mktemp("cache")))
        with engine_inside(
            name,
            str(folder),
            dtype="float32",
            max_model_len=context,
            block_size=BLOCK,
            max_num_batched_tokens=CHUNK,
            max_num_seqs=2,
            kv_cache_memory_bytes=planned,
        ) as llm:
            yield Served(llm, name, context, needles, text(last, needles), planned)


def page_bytes(name: str) -> int:
    """Of a block of keys and values of the model's one kv head."""
    if name == "auto":
        return BLOCK * 2 * distance_model.HEAD_DIM * 4
    return BLOCK * FORMATS[name].content_bytes(distance_model.HEAD_DIM, BLOCK)


def text(length: int, needles: list[int]) -> list[int]:
    """Words of which about every second is the answer to the word before it, the others are any;
    here and there a question for the next word. The needles and their neighbours differ."""
    generator = random.Random(length)
    ids = [generator.choice(tokenizer.WORDS) for _ in range(64)]
    while len(ids) < length:
        kind = generator.random() if ids[-1] != question(AHEAD) else 1.0
        if kind < 0.02:
            ids.append(question(AHEAD))
        elif kind < 0.5:
            ids.append(ids[-1 - short_distance(ids[-1])])
        else:
            ids.append(generator.choice(tokenizer.WORDS))
    for needle in needles:
        near = range(max(needle - 1, 0), needle + 2)
        for position, word in zip(near, generator.sample(tokenizer.WORDS, len(near))):
            ids[position] = word
    return ids


def ask(llm, prompt: list[int], tokens: int = 1, **options):
    """The greedy answer to one prompt."""
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=tokens, temperature=0, logprobs=0, ignore_eos=True, **options
    )
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return output


def said(output) -> tuple[int, float]:
    """The first token of an answer and its log-probability."""
    completion = output.outputs[0]
    token = completion.token_ids[0]
    return token, completion.logprobs[0][token].logprob


@pytest.fixture(scope="module")
def first(served):
    """The first request: question 0, and all rows of its prompt, in chunks, nothing cached."""
    forget_peak()
    before = resident("VmRSS")
    output = ask(served.llm, served.prompt(0), prompt_logprobs=0)
    served.rise = resident("VmHWM") - before
    assert output.num_cached_tokens == 0
    return output


def judged(served, first):
    """(index, kind, whether it is mistaken) of every row of the prompt that asks for a word, by the
    log-probability it gives to the next token: the `right` word, an `other` or one that lies `ahead`."""
    for i, (token, following) in enumerate(zip(served.text, served.text[1:])):
        logprob = first.prompt_logprobs[i + 1][following].logprob
        asked = i - short_distance(token)
        if token == question(AHEAD):
            yield i, "ahead", logprob >= UNLIKELY
        elif asked >= 0:
            right = served.text[asked] == following
            mistaken = logprob < CERTAIN if right else logprob > UNLIKELY
            yield i, "right" if right else "other", mistaken


def test_every_row_sees_what_it_asks_for_and_nothing_ahead(served, first):
    rows = list(judged(served, first))
    seen = Counter(kind for _, kind, _ in rows)
    assert all(seen[kind] > served.context / 200 for kind in ("right", "other", "ahead")), seen
    assert not any(mistaken for _, kind, mistaken in rows if kind == "ahead")
    wrong = sum(mistaken for _, _, mistaken in rows)
    print(f"{served.name} {served.context}: {wrong} of {dict(seen)} rows take a neighbour")
    assert wrong <= served.tolerance * sum(seen.values()), (wrong, seen)


@pytest.mark.parametrize("index", range(AHEAD))
def test_the_last_token_finds_the_needle_behind_a_cached_prefix(served, first, index):
    """At positions 0, 1, 17, in the middle and near the end."""
    output = ask(served.llm, served.prompt(index))
    assert output.num_cached_tokens == len(served.text) // BLOCK * BLOCK
    token, logprob = said(output)
    assert token in served.answers(index)
    assert logprob > CERTAIN or served.tolerance
    if index == 0:  # the same question without the cache
        exact = served.name != "auto"
        assert (token, logprob) == (said(first) if exact else pytest.approx(said(first), abs=1e-3))


def test_decode_goes_on_to_the_last_position(served, first):
    """Each token is judged by those before it, so a wrong one does not make the next ones wrong.

    As often as prefill's rows of such positions, give or take three standard deviations.
    """
    output = ask(served.llm, served.prompt(4), DECODED)
    spoken = output.outputs[0].token_ids
    sequence = [*served.prompt(4), *spoken]
    assert len(sequence) == served.context
    assert spoken[0] in served.answers(4)
    wrong = 0
    for at in range(served.context - DECODED + 1, served.context):
        wrong += sequence[at] != sequence[at - 1 - short_distance(sequence[at - 1])]
    late = [
        mistaken
        for i, kind, mistaken in judged(served, first)
        if kind == "right" and i > served.context * 15 // 16
    ]
    expected = (DECODED - 1) * sum(late) / len(late)
    print(f"{served.name} {served.context}: {wrong} of {DECODED - 1} mistaken, {expected:.1f} expected")
    assert wrong <= expected + 3 * expected**0.5, (wrong, spoken)


def test_memory_is_as_planned(served, first):
    """The cache is what its configuration says, and attention needs no memory of the context's size
    besides: the scores of one chunk alone would be 2 GiB at 131,072."""
    config = served.llm.llm_engine.vllm_config.cache_config
    assert config.num_gpu_blocks == served.context // BLOCK + 1
    (held,) = served.llm.collective_rpc(cache_bytes)
    assert held == served.planned
    print(f"{served.name} {served.context}: cache {held >> 10} KiB, rise {served.rise >> 20} MiB")
    assert served.rise < served.planned + (512 << 20)


def cache_bytes(worker) -> int:
    """Memory behind the worker's KV cache."""
    caches = worker.model_runner.kv_caches
    return sum({c.data_ptr(): c.untyped_storage().nbytes() for c in caches}.values())


def resident(entry: str) -> int:
    """Bytes of this process's memory: VmRSS now, VmHWM at its highest since `forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{entry}:"):
            return int(line.split()[1]) << 10
    raise LookupError(entry)


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")

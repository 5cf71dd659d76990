# SPDX-License-Identifier: Apache-2.0
"""qwen3-recall at 4,096 tokens: how many of 512 values are right, by cache format."""

from dataclasses import dataclass, replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from tests.models.inside import engine_inside
from tools.models import catalog
from tools.models.recall import train
from tools.models.recall.recipe import CONFIG, WEIGHTS
from tools.models.recall.task import draw
from tools.models.recall.tokenizer import WORDS
from vllm.turboquant import profile, registry
from vllm.turboquant.formats import FORMATS
from vllm.turboquant.identity import identify

CONTEXTS, PAIRS, LENGTH, BLOCK = 8, 64, 4096, 128
OPTIONS = dict(dtype="float32", max_model_len=LENGTH + BLOCK, block_size=BLOCK)
FORCED = "tdsf_k3v3"


@dataclass(frozen=True)
class Recalled:
    """What a cache gives back of all pairs."""

    accuracy: float  # per cent of the values that are the most likely token
    certainty: float  # mean log-probability of the values


@pytest.fixture(scope="module")
def task():
    return draw(CONTEXTS, LENGTH, PAIRS, WORDS, torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def folder():
    return catalog.make("qwen3-recall")


def recall(llm, task) -> Recalled:
    """Ask for every key behind its context, which the cache holds after the first one."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0, logprobs=20)
    right, certainty = 0, 0.0
    for context, keys, values in zip(*(x.tolist() for x in vars(task).values())):
        prompts = [{"prompt_token_ids": [*context, key]} for key in keys]
        outputs = llm.generate(prompts[:1], params, use_tqdm=False)
        outputs += llm.generate(prompts[1:], params, use_tqdm=False)
        assert all(output.num_cached_tokens == LENGTH for output in outputs[1:])
        for output, value in zip(outputs, values, strict=True):
            (said,) = output.outputs[0].logprobs
            right += output.outputs[0].token_ids[0] == value
            lowest = min(x.logprob for x in said.values())
            certainty += said[value].logprob if value in said else lowest
    return Recalled(100 * right / (CONTEXTS * PAIRS), certainty / (CONTEXTS * PAIRS))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache folder of this module, for the profiles that the engines fit."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("VLLM_TQ_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def recalled(folder, task, cache) -> dict[str, Recalled]:
    results = {}
    for name in ("auto", "tdsf_k8v8", "tdsf_k8v4", "tdsf_k4v4", "tdsf_k3v3"):
        with engine_inside(name, str(folder), **OPTIONS) as llm:
            results[name] = recall(llm, task)
        print(name, results[name])
    return results


@pytest.mark.parametrize(
    ("name", "loss"),
    [("tdsf_k8v8", 0.5), ("tdsf_k8v4", 0.5), ("tdsf_k4v4", 0.5), ("tdsf_k3v3", 3.0)],
)
def test_a_compressed_cache_recalls_what_the_uncompressed_does(recalled, name, loss):
    """loss: in points of accuracy, at most."""
    assert recalled["auto"].accuracy >= 97
    assert recalled[name].accuracy >= recalled["auto"].accuracy - loss, recalled


def test_fewer_bits_say_it_less_surely(recalled):
    """Else the formats would not have been used."""
    order = ("tdsf_k8v8", "tdsf_k8v4", "tdsf_k4v4", "tdsf_k3v3")
    certainty = [recalled[name].certainty for name in order]
    assert certainty == sorted(certainty, reverse=True) and certainty[0] > 1.5 * certainty[-1]


def test_the_profile_of_another_model_costs_recall(
    folder, task, cache, recalled, tmp_path, monkeypatch
):
    """One of this shape, whose two layers do each other's work."""
    identity, fmt = identify(folder), FORMATS[FORCED]
    own = profile.read(registry.cached_path(identity, fmt))
    layers = dict(zip(own.layers, reversed(own.layers.values())))
    other = replace(identity, weights="0123456789abcdef")
    path = tmp_path / "other.safetensors"
    profile.write(replace(own, model=other, layers=layers), path)
    monkeypatch.setenv("VLLM_TQ_CALIBRATION", str(path))

    with pytest.raises(ValueError, match="is a profile of another model and would cost accuracy"):
        with engine_inside(FORCED, str(folder), **OPTIONS):
            pass
    monkeypatch.setenv("VLLM_TQ_ANY_PROFILE", "1")
    with engine_inside(FORCED, str(folder), **OPTIONS) as llm:
        forced = recall(llm, task)
    print(f"{FORCED}: own profile {recalled[FORCED]}, another model's {forced}")
    assert forced.certainty < 1.5 * recalled[FORCED].certainty  # both are negative
    assert forced.accuracy < recalled[FORCED].accuracy


def test_a_word_is_a_token(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer(" bak lom zuz")["input_ids"]) == 3
    text = "".join(tokenizer.decode([word]) for word in WORDS)
    assert tokenizer(text)["input_ids"] == list(WORDS)
    other = "naïve café, 你好，世界！\n\tdef f(x): return x ** 2  # <|x|>"
    assert tokenizer.decode(tokenizer(other)["input_ids"]) == other


def test_a_task_holds_each_key_once_and_its_value_behind_it():
    task = draw(3, 200, 40, range(100, 400), torch.Generator().manual_seed(1))
    for context, keys, values in zip(task.context, task.keys, task.values):
        for key, value in zip(keys, values):
            (at,) = (context == key).nonzero()
            assert context[at + 1] == value
    assert task.asked(5).shape == (3, 210)
    assert torch.equal(task.asked(5)[:, 200::2], task.keys[:, :5])
    with pytest.raises(ValueError, match="300 pairs do not fit in 500 of 300 tokens"):
        draw(1, 500, 300, range(300), torch.Generator())


def test_training_is_what_recalls(folder):
    """The sketch that training starts from loses most of a long context; the weights do not."""
    task = draw(1, 2048, 64, WORDS, torch.Generator().manual_seed(2))
    sketched = train.sketch(Qwen3Config(**CONFIG), torch.Generator().manual_seed(0))
    trained = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        right = [
            (train.predict(model, task, 64).argmax(-1) == task.values).float().mean().item()
            for model in (sketched, trained)
        ]
    assert right[0] < 0.8 and right[1] > 0.95, right


def test_the_trainer_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "CURRICULUM", ((64, 16, 16, 20),))
    monkeypatch.setattr(train, "WARM_UP", 2)
    train.main([str(tmp_path / "weights.safetensors"), "--seed", "3"])
    weights = load_file(tmp_path / "weights.safetensors")
    shipped = load_file(WEIGHTS)
    assert {k: (x.shape, x.dtype) for k, x in weights.items()} == {
        k: (x.shape, x.dtype) for k, x in shipped.items()
    }
    lines = capsys.readouterr().out.splitlines()
    right = [float(line.split("right")[1].split()[0]) for line in lines]
    assert right[-1] > right[0] + 2

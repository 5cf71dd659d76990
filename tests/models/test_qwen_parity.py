# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5, Qwen3 and Qwen3-MoE through the real engine, against Transformers, in float32.

Prompts of 1 to 8,192 tokens, in a batch of 8 and alone, whole and in chunks; with YaRN given by the
configuration and by --hf-overrides; with a sliding window; with head dims that are no
powers of two and up to 16 query heads per kv head.
"""

import functools
import json
import shutil

import pytest
import torch

from tests.models.engines import ask, run
from tests.models.reference import Distance, Reference
from tools.models import catalog, qwen_shapes, seeded

LENGTHS = (1, 2, 17, 127, 128, 129, 300, 700)
TOKENS = 12
LONG = 8192
FAMILIES = ("tiny-qwen2", "tiny-qwen3", "tiny-qwen3-moe")
EACH_FAMILY = (*FAMILIES[:2], pytest.param(FAMILIES[2], marks=pytest.mark.long))

# Mean error of a log-probability and its 99th percentile, in nats; the standard deviation of the
# models' log-probabilities is 4. Two to three times what was measured.
BOUNDS = {
    "auto": (1e-4, 1e-3),
    "tdsf_k8v8": (0.02, 0.1),
    "tdsf_k8v4": (0.15, 1.2),
    "tdsf_k4v4": (0.25, 2.0),
    "tdsf_k3v3": (0.5, 3.0),
}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
SHAPES = {
    "a window on every layer": qwen_shapes.QWEN3
    | {
        "use_sliding_window": True,
        "sliding_window": 64,
        "max_window_layers": 0,
        "layer_types": ["sliding_attention"] * 4,
    },
    "Qwen2, windows from the third layer on": qwen_shapes.QWEN2
    | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
    "Qwen3, windows on every second layer": qwen_shapes.QWEN3
    | {
        "use_sliding_window": True,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "head_dim 80": qwen_shapes.QWEN3 | {"head_dim": 80},
    "head_dim 96, 16 query heads to one": qwen_shapes.QWEN3
    | {"head_dim": 96, "num_attention_heads": 16, "num_key_value_heads": 1},
}

EACH_SHAPE = [
    pytest.param(name, marks=[pytest.mark.long] if name.startswith("Qwen3") else []) for name in SHAPES
]


def random_tokens(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), generator=generator).tolist()


PROMPTS = [random_tokens(length, seed=length) for length in LENGTHS]
LONG_PROMPT = random_tokens(LONG, seed=1)


def job(model, kv: str, *calls: dict, **options) -> dict:
    return dict(model=str(model), kv=kv, calls=list(calls), options=options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model folder of a family, of another shape, or of Qwen3 with YaRN in its configuration."""
    root = tmp_path_factory.mktemp("shapes")

    @functools.cache
    def find(name: str):
        if name in FAMILIES:
            return catalog.make(name)
        made = root / name.replace(" ", "-").replace(",", "")
        if name == "yarn":
            shutil.copytree(catalog.make("tiny-qwen3"), made)
            config = qwen_shapes.QWEN3 | {"rope_parameters": YARN | {"rope_theta": 1e6}}
            (made / "config.json").write_text(json.dumps(config))
        else:
            made.mkdir()
            seeded.seeded(SHAPES[name], seed=1)(None, made)
        return made

    return find


@pytest.fixture(scope="module")
def answers(folder, tmp_path_factory):
    """What the engines of a model say, by job; run when first asked for."""
    batch = ask(PROMPTS, TOKENS, scores=True)
    alone = [ask(PROMPTS[i : i + 1], TOKENS, scores=True, forget=True) for i in (3, 7)]

    @functools.cache
    def get(name: str) -> dict[str, dict]:
        model, plain, exact = folder(name), ("auto", "tdsf_k8v8"), "tdsf_k8v8"
        # Eight bits need no fitting but for a key bias, and it is most of the time that a start takes.
        fitted = name in FAMILIES or name.startswith("Qwen2")
        fit = {"additional_config": {"tdsf_calibration": "auto" if fitted else "off"}}
        kinds = BOUNDS if name in FAMILIES else plain
        plan = {kv: job(model, kv, batch, **fit) for kv in kinds}
        if name in FAMILIES:
            plan[exact] = job(model, exact, batch, *alone)
            plan["chunks"] = job(model, exact, batch, *alone, max_num_batched_tokens=96)
        if name == "tiny-qwen2":
            longer = dict(max_model_len=LONG + 64, max_num_batched_tokens=2048)
            for kv in plain:
                plan[f"long {kv}"] = job(model, kv, ask([LONG_PROMPT], TOKENS, scores=True), **longer)
        if name == "yarn":
            for kv in plain:
                overridden = fit | dict(hf_overrides={"rope_parameters": YARN})
                plan[f"override {kv}"] = job(folder("tiny-qwen3"), kv, batch, **overridden)
        return dict(zip(plan, run(tmp_path_factory.mktemp("engines"), list(plan.values()))))

    return get


@pytest.fixture(scope="module")
def distance(folder, answers):
    """Distance of a job's first call from Transformers."""
    reference = functools.cache(lambda name: Reference(folder(name)))

    def measure(name: str, task: str, prompts=PROMPTS) -> Distance:
        first = answers(name)[task]["answers"][0]
        parts = [reference(name).compare(p, a) for p, a in zip(prompts, first, strict=True)]
        result = Distance.of(parts)
        print(name, task, result)
        return result

    return measure


def assert_within(found: Distance, kv: str) -> None:
    assert found.within(*BOUNDS[kv]), found


@pytest.mark.parametrize("kv", BOUNDS)
@pytest.mark.parametrize("name", EACH_FAMILY)
def test_every_format_is_near_transformers(distance, name, kv):
    assert_within(distance(name, kv), kv)


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_chunks_and_batches_change_nothing(answers, name):
    """Whole in a batch of 8, alone, and in chunks of 96 tokens: equal to the last bit."""
    whole, *alone = answers(name)["tdsf_k8v8"]["answers"]
    chunked, *chunked_alone = answers(name)["chunks"]["answers"]

    def values(answer):
        return {key: answer[key] for key in ("tokens", "logprobs", "given", "top")}

    for a, b in zip(whole, chunked, strict=True):
        assert values(a) == values(b)
    for position, a, b in zip((3, 7), alone, chunked_alone, strict=True):
        assert values(a[0]) == values(b[0]) == values(whole[position])


@pytest.mark.parametrize("kv", ["auto", "tdsf_k8v8"])
@pytest.mark.parametrize("name", EACH_SHAPE)
def test_other_shapes(distance, name, kv):
    assert_within(distance(name, kv), kv)


def test_a_window_matters():
    """The windows above hide most of the long prompts; without that the test would be idle."""
    assert max(LENGTHS) > 4 * SHAPES["a window on every layer"]["sliding_window"]


@pytest.mark.parametrize("kv", ["auto", "tdsf_k8v8"])
def test_a_prompt_of_8192_tokens(distance, kv):
    assert_within(distance("tiny-qwen2", f"long {kv}", [LONG_PROMPT]), kv)


@pytest.mark.parametrize("kv", ["auto", "tdsf_k8v8"])
def test_yarn_by_configuration_and_by_override(answers, distance, kv):
    assert_within(distance("yarn", kv), kv)
    assert_within(distance("yarn", f"override {kv}"), kv)
    assert answers("yarn")[kv]["answers"] == answers("yarn")[f"override {kv}"]["answers"]


def test_yarn_matters(answers):
    plain, yarn = (answers(name)["auto"]["answers"][0][7] for name in ("tiny-qwen3", "yarn"))
    assert plain["given"] != yarn["given"]

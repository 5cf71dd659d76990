# SPDX-License-Identifier: Apache-2.0
"""The parts of the benches that need no engine."""

import itertools
import json

import pytest

from tests.engine import default_model
from tools.bench import headline, kernels, progress, prompts, state
from tools.bench.__main__ import verbs
from tools.bench.contestants import describe, search, step_seconds
from tools.bench.headline import Workload, curve, figures
from tools.errors import Problem
from vllm.turboquant.formats import FORMATS


def test_a_search_changes_one_setting_at_a_time_and_keeps_what_is_faster():
    cost = {"a": {"x": 3, "y": 1}, "b": {1: 2, 2: 5, 3: 1}}
    tried = []

    def trial(settings):
        tried.append(settings)
        return cost["a"][settings["a"]] + cost["b"][settings["b"]]

    found = search({"a": ["x", "y"], "b": [1, 2, 3]}, trial)
    assert found["chosen"] == {"a": "y", "b": 3}
    assert found["seconds"] == 2
    assert tried == [dict(a=a, b=b) for a, b in [("x", 1), ("y", 1), ("y", 2), ("y", 3)]]
    assert describe({"dtype": "float32", "eager": False}) == "float32, compiled"


def test_prompts_share_no_prefix_and_never_change():
    ids = list(range(100))
    cut = prompts.cut(ids, 4, 130)
    assert [p[0] for p in cut] == [0, 25, 50, 75]
    assert all(len(p) == 130 and p[100:] == p[:30] for p in cut)
    assert prompts.cut(ids, 4, 130) == cut
    assert all(a[0] != b[0] for a, b in itertools.product(cut, prompts.cut(ids, 4, 10, skip=7)))


def test_prompts_are_our_documentation():
    from pathlib import Path

    from transformers import AutoTokenizer

    ids = prompts.tokens(Path(default_model()))
    text = AutoTokenizer.from_pretrained(default_model()).decode(ids)
    assert text.startswith("# vLLM-TQ")
    assert "# The TDSF cache format" in text


def test_figures_of_a_pass():
    """Two sequences of 10 tokens; first tokens after 1 and 2 s, then 8 steps of half a second."""
    steps = [(1.0, 1), (2.0, 3), *((2.0 + 0.5 * i, 3 + 2 * i) for i in range(1, 9)), (6.5, 20)]
    raw = {"seconds": 6.5, "steps": steps, "first": [1.0, 2.0], "last": [6.0, 6.5]}
    raw |= {"kv_bytes": 5, "peak_memory_bytes": 6}
    work = Workload(count=2, prompt=30, total=40, passes=1)
    got = figures(raw, work)
    assert got["tokens_per_s"] == pytest.approx(80 / 6.5)
    assert got["generated_tokens_per_s"] == pytest.approx(20 / 6.5)
    assert got["ttft_s"] == 1.5
    assert got["tpot_s"] == pytest.approx((5.0 / 9 + 4.5 / 9) / 2)
    points = curve(steps, 2.0, work)
    assert all(seconds == pytest.approx(0.5) for _, seconds in points[:8])
    assert [context for context, _ in points[:2]] == [32, 33]
    assert step_seconds(steps, 2) == pytest.approx([1.0, *[0.5] * 8])


def test_state_outlives_the_process_and_belongs_to_its_versions(tmp_path, monkeypatch):
    monkeypatch.setattr(state, "cache_dir", lambda: tmp_path)
    first = state.State()
    first.put("a", {"x": 1})
    again = state.State()
    assert again.get("a") == {"x": 1} and again.get("b") is None
    assert state.State(fresh=True).get("a") is None
    first.path.write_text("half")
    with pytest.raises(Problem, match="cannot be read"):
        state.State()
    real = state.versions()
    monkeypatch.setattr(state, "versions", lambda: real | {"ours": "another wheel"})
    assert state.State().get("a") is None


def test_progress_says_how_long_it_will_take(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    bar = progress.Progress([("a", 60.0), ("b", 90.0), ("a", 60.0)])
    bar.begin("a, pass 1")
    assert "0%  a, pass 1, 0%; 3 min 30 s left" in capsys.readouterr().err
    now[0] = 40.0
    bar.update(0.25)  # a quarter in 40 s: 120 s to go, where 20 were expected
    assert "13%  a, pass 1, 25%; 4 min 30 s left" in capsys.readouterr().err
    now[0] = 160.0
    bar.end()
    bar.begin("b, pass 1")  # the second pass of a is expected to take 160 s now
    assert "39%  b, pass 1, 0%; 4 min 10 s left" in capsys.readouterr().err


def test_every_verb_is_listed_and_no_other():
    assert {"decode", "headline", "kernels", "quality"} <= set(verbs())
    assert not {"child", "contestants", "state", "plot"} & set(verbs())
    assert all(verbs().values())


@pytest.mark.parametrize("wrong", ["[1]", "{", "fast"])
def test_settings_that_are_none_are_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        headline.main(["--settings", wrong])
    assert "--settings" in capsys.readouterr().err


def test_a_workload_that_measures_nothing_is_refused():
    with pytest.raises(Problem, match="nothing can be measured"):
        headline.main(["--prompt", "64", "--total", "64"])


def test_the_kernel_bench_writes_what_its_readers_expect(tmp_path):
    path = tmp_path / "k.json"
    options = ["--formats", "tdsf_k4v4", "--shapes", "decode B=8 T=4096 (9/3, 64)", "--rounds", "1"]
    assert kernels.main([*options, "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    (row,) = found["shapes"]
    ratio = row["upstream_bf16_ms"] / row["ours_ms"]["tdsf_k4v4"]
    assert found["geomean_vs_upstream_bf16"] == {"tdsf_k4v4": pytest.approx(ratio)}
    read = 8 * 4096 // 128 * 3 * 128 * FORMATS["tdsf_k4v4"].content_bytes(64, 128)
    rate = read / row["ours_ms"]["tdsf_k4v4"] / 1e6
    share = row["share_of_read_bandwidth"]["tdsf_k4v4"]
    assert share == pytest.approx(rate / found["read_bandwidth_gb_s"])


def test_the_cost_of_a_store_is_that_of_a_token(monkeypatch):
    monkeypatch.setattr(kernels, "medians", lambda calls, rounds: dict.fromkeys(calls, 4.096))
    row = kernels.measure_store(("small", 6, 2, 32), ["tdsf_k4v4", "tdsf_k3v3"], 1)
    assert row["ns_per_token"] == pytest.approx({"tdsf_k4v4": 2000, "tdsf_k3v3": 2000})


def test_a_store_that_is_wrong_is_not_timed(monkeypatch):
    from vllm.turboquant import kernels as native

    monkeypatch.setattr(native, "store", lambda *_: None)
    with pytest.raises(Problem, match="stores something else"):
        kernels.measure_store(("small", 6, 2, 32), ["tdsf_k4v4"], 1)

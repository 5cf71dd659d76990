# SPDX-License-Identifier: Apache-2.0
"""The benches of whole engines, on real ones: two prompts of 32 tokens, eager, in float32.

Engines run in one process each, which starts in a third of the time.
"""

import json
import sys
from pathlib import Path

import pytest

from tests.engine import default_model
from tools.bench import child, decode, headline, state
from tools.errors import Problem
from vllm.turboquant import kernels

COUNT, PROMPT, TOTAL = 2, 32, 48
SETTINGS = {"dtype": "float32", "eager": True}
COMMON = ["--settings", json.dumps(SETTINGS), "--count", str(COUNT)]
WORK = ["--prompt", str(PROMPT), "--total", str(TOTAL), "--passes", "1"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Finished passes of this module lie in a folder of its own."""
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "cache_dir", lambda: folder)
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        yield folder


@pytest.fixture(scope="module")
def found(place):
    output = ["--json", str(place / "h.json"), "--plot", str(place / "h.png")]
    assert headline.main([*COMMON, *WORK, *output, "--table", str(place / "h.md")]) == 0
    return json.loads((place / "h.json").read_text())


def test_the_headline_reports_what_was_asked(found):
    assert found["variant"] in kernels.variants()
    assert list(found["contestants"]) == ["transformers", "upstream", "ours"]
    for row in found["contestants"].values():
        assert row["tokens_per_s"] == pytest.approx(COUNT * TOTAL / row["seconds"])
        assert row["generated_tokens_per_s"] < row["tokens_per_s"]
        assert 0 < row["ttft_s"] < row["seconds"]
        steps = TOTAL - PROMPT - 1
        assert row["ttft_s"] + steps * row["tpot_s"] == pytest.approx(row["seconds"], rel=0.5)
        assert row["peak_memory_bytes"] > 4 * 134e6  # the weights, at least
        assert row["settings"]["dtype"] == "float32"
    ours, upstream = (found["contestants"][x] for x in ("ours", "upstream"))
    assert found["ratio_vs_upstream"] == ours["tokens_per_s"] / upstream["tokens_per_s"]
    others = found["contestants"]["transformers"]
    assert found["ratio_vs_transformers"] == ours["tokens_per_s"] / others["tokens_per_s"]


def test_upstream_is_upstreams(found):
    assert "+tq" in found["contestants"]["ours"]["version"]
    assert "+tq" not in found["contestants"]["upstream"]["version"]
    assert found["contestants"]["upstream"]["variant"] is None
    # 30 layers of 3 heads of 64, keys and values; one block more per engine.
    tokens = (COUNT * -(-TOTAL // 128) + 1) * 128
    assert found["contestants"]["upstream"]["kv_bytes"] == tokens * 30 * 2 * 3 * 64 * 4
    ratio = found["contestants"]["upstream"]["kv_bytes"] / found["contestants"]["ours"]["kv_bytes"]
    assert ratio == pytest.approx(32 / 4.25, rel=0.01)


def test_the_table_and_the_picture(found, place):
    text = (place / "h.md").read_text()
    assert f"**{found['ratio_vs_transformers']:.2f}×** Transformers" in text
    assert sum(line.startswith("| ") for line in text.splitlines()) == 4
    assert (place / "h.png").read_bytes().startswith(b"\x89PNG")


def test_a_second_run_measures_nothing(found, place, monkeypatch):
    monkeypatch.setattr(child, "run", None)
    assert headline.main([*COMMON, *WORK, "--json", str(place / "again.json")]) == 0
    assert json.loads((place / "again.json").read_text()) == found


def test_an_interrupted_run_goes_on_where_it_stopped(found, place, monkeypatch):
    (path,) = (place / "bench").glob("*.json")
    whole = path.read_text()
    kept = json.loads(whole)
    (lost,) = (entry for entry in kept["results"] if entry.startswith("ours "))
    figures = kept["results"].pop(lost)
    path.write_text(json.dumps(kept))
    started = []

    def run(name, *_):
        started.append(name)
        return figures

    monkeypatch.setattr(child, "run", run)
    assert headline.main([*COMMON, *WORK, "--json", str(place / "resumed.json")]) == 0
    assert started == ["ours"]
    assert json.loads((place / "resumed.json").read_text()) == found
    assert json.loads(path.read_text()) == json.loads(whole)


def test_decode_compares_three(found, place):
    """Around 40 tokens: the same jobs as above for two of the three, taken from the state."""
    options = ["--context", "40", "--new", "16", "--rounds", "1"]
    assert decode.main([*COMMON, *options, "--json", str(place / "d.json")]) == 0
    got = json.loads((place / "d.json").read_text())
    rows = got["contestants"]
    assert list(rows) == ["upstream", "uncompressed", "ours"]
    for other in ("upstream", "uncompressed"):
        ratio = rows[other]["step_ms"] / rows["ours"]["step_ms"]
        assert got[f"ratio_vs_{other}"] == pytest.approx(ratio)
    assert rows["ours"]["tokens_per_s"] == pytest.approx(COUNT * 1e3 / rows["ours"]["step_ms"])
    assert rows["uncompressed"]["kv_bytes"] == rows["upstream"]["kv_bytes"]
    assert got["variant"] in kernels.variants()


def test_weights_kept_as_bf16_take_half_the_memory(found, place, monkeypatch):
    monkeypatch.setattr(decode, "SHORT", PROMPT)
    options = ["--weights", "--new", "16", "--rounds", "1", "--json", str(place / "w.json")]
    assert decode.main([*COMMON, *options]) == 0
    got = json.loads((place / "w.json").read_text())
    rows = got["contestants"]
    assert decode.parameters(Path(default_model())) == 134_515_008
    assert rows["upstream"]["resident_bytes"] > 0.99 * 4 * 134_515_008
    # The portable variant keeps float32.
    assert got["weights_vs_float32"] < (1.05 if got["variant"] == "portable" else 0.55)


def test_a_contestant_that_fails_says_why(place):
    with pytest.raises(Problem, match="broken ended without a result\n  KeyError: 'prompts'\n"):
        child.run("broken", Path(sys.executable), "engine", {}, {})

# SPDX-License-Identifier: Apache-2.0
"""The server as users start it: compiled, defaults, the openai client, metrics, wrong use."""

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import openai
import pytest

from tests.engine import default_model

PATIENCE = 600  # seconds until it answers; the first start compiles


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def environment() -> dict[str, str]:
    return os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


@contextlib.contextmanager
def serve(command: list[str], log):
    """A server that answers; `command` gets the port. Fails with its log when it ends early."""
    port = free_port()
    command = [*command, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment())
    try:
        until = time.monotonic() + PATIENCE
        while not healthy(port):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < until, log.read_text()[-4000:]
            time.sleep(0.5)
        yield port
    finally:
        process.terminate()
        process.wait(60)


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", default_model(), "--served-model-name", "smollm2"]
    command += ["--kv-cache-dtype", "tdsf_k4v4", "--kv-cache-memory-bytes", str(512 << 20)]
    log = tmp_path_factory.mktemp("server") / "log"
    with serve(command, log) as port:
        yield port, log


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server[0]}/v1", api_key="none")


def ask(client, text: str, **options):
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(
        model="smollm2", messages=messages, temperature=0, max_tokens=40, **options
    )


def test_english(client):
    assert "Tokyo" in ask(client, "What is the capital of Japan?").choices[0].message.content


def test_chinese_arrives_whole(client):
    """Characters of several tokens each, in a pattern that no rounding of a small model breaks."""
    sentence = "北京是中国的首都。"
    answer = client.completions.create(
        model="smollm2", prompt=sentence * 8, temperature=0, max_tokens=40
    )
    assert answer.choices[0].text.startswith(sentence)


@pytest.mark.parametrize("text", ["What do bees make?", "请用中文写一句话介绍北京。"])
def test_streamed_is_what_is_not_streamed(client, text):
    parts = ask(client, text, stream=True)
    streamed = "".join(p.choices[0].delta.content or "" for p in parts if p.choices)
    assert streamed == ask(client, text).choices[0].message.content


def test_metrics(server):
    with urllib.request.urlopen(f"http://127.0.0.1:{server[0]}/metrics") as answer:
        text = answer.read().decode()
    assert "vllm:kv_cache_usage_perc" in text
    assert 'cache_dtype="tdsf_k4v4"' in text


def test_the_model_runner_is_the_tested_one(server):
    assert "Using V2 Model Runner" not in server[1].read_text()


def test_every_layer_is_compressed(server):
    """The capacity in the log is that of 4.25 bits per element in every layer."""
    page = 30 * 3 * 128 * 68  # layers, kv heads, tokens, bytes
    blocks = (512 << 20) // page
    assert f"KV cache size: {blocks * 128:,} tokens" in server[1].read_text()


def run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command, capture_output=True, text=True, env=environment(), timeout=300
    )


def test_an_unknown_cache_dtype_is_answered_with_the_valid_ones():
    vllm = os.path.join(os.path.dirname(sys.executable), "vllm")
    result = run(vllm, "serve", default_model(), "--kv-cache-dtype", "tdsf_k5v5")
    assert result.returncode == 2
    for name in ("tdsf_k8v8", "tdsf_k8v4", "tdsf_k4v4", "tdsf_k4v3", "tdsf_k3v3", "auto"):
        assert name in result.stderr
    assert "Traceback" not in result.stderr


def test_a_model_with_alibi_is_refused_at_start(tmp_path):
    from transformers import BloomConfig

    config = BloomConfig(
        vocab_size=256, hidden_size=128, n_layer=1, n_head=2, architectures=["BloomForCausalLM"]
    )
    config.save_pretrained(tmp_path)
    result = run(
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(tmp_path), "--load-format", "dummy", "--skip-tokenizer-init"),
        *("--kv-cache-dtype", "tdsf_k4v4", "--max-model-len", "128", "--enforce-eager"),
        *("--port", str(free_port()), "--kv-cache-memory-bytes", str(1 << 26)),
    )
    assert result.returncode != 0
    assert "does not support ALiBi slopes" in result.stdout + result.stderr

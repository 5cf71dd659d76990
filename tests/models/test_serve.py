# SPDX-License-Identifier: Apache-2.0
"""Starting a server: checks, progress and its end, with small child processes as servers."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from tools.errors import Problem
from tools.pins import ROOT
from tools.serve import model, report
from tools.serve.server import Server

READY = """
import http.server, sys, time
print("(EngineCore pid=1) INFO 11-29 20:49:06 [a.py:1] loading", flush=True)
time.sleep(1)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
FAILS = """
import sys
print("(APIServer pid=0) WARNING 11-29 20:49:06 [c.py:3] this can cause OSError: too many files")
print("(Worker pid=2) ERROR 11-29 20:49:06 [b.py:2] ValueError: the cache needs 9 GiB")
print("(EngineCore pid=1) ERROR [a.py:1] RuntimeError: a worker failed")
sys.exit(1)
"""
LOG = """
(EngineCore pid=1) INFO config: model='/m', dtype=torch.bfloat16, max_seq_len=8192
(EngineCore pid=1) INFO CPU KV cache size: 701,696 tokens, Maximum concurrency 85.66x
"""


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def restore_signals():
    old = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in old.items():
        signal.signal(number, handler)


def start(script, port, tmp_path):
    return Server([sys.executable, "-c", script, str(port)], dict(os.environ), tmp_path / "log")


def test_a_server_is_waited_for_and_stopped_by_one_interrupt(tmp_path, port, restore_signals):
    server = start(READY, port, tmp_path)
    server.wait_until_ready(f"http://127.0.0.1:{port}/health")
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert server.wait() == 0
    assert server.process.returncode is not None
    assert "loading" in (tmp_path / "log").read_text()


def test_a_second_interrupt_ends_a_server_that_does_not_listen(tmp_path, port, restore_signals):
    deaf = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
    server = start(deaf, port, tmp_path)
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.5)
    assert server.process.poll() is None
    os.kill(os.getpid(), signal.SIGINT)
    assert server.wait() == 0 and server.process.returncode == -signal.SIGKILL


def test_the_first_error_is_told_when_it_does_not_start(tmp_path, port, restore_signals):
    server = start(FAILS, port, tmp_path)
    with pytest.raises(Problem, match="did not start\n  ValueError: the cache needs 9 GiB"):
        server.wait_until_ready(f"http://127.0.0.1:{port}/health")


def serve(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "tools.serve", *arguments], capture_output=True, text=True, cwd=ROOT
    )


def test_a_port_in_use_is_told_before_anything_starts():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        result = serve("--port", str(port))
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        f"error: port {port} cannot be used: Address already in use",
        "  on 127.0.0.1",
        f"  next: stop what listens there, or choose another: make serve PORT={port + 1}",
    ]


def test_an_unknown_model_is_told_before_anything_starts(port):
    result = serve("--model", "/no/such/folder", "--port", str(port))
    assert result.returncode == 1
    assert result.stderr.splitlines()[:2] == [
        "error: unknown model /no/such/folder",
        "  there is no folder /no/such/folder",
    ]
    assert len(result.stderr.splitlines()) == 3


@pytest.mark.parametrize("name", ["nonsense", "./owner/name", "a/b/c"])
def test_what_is_neither_a_model_nor_a_folder_nor_a_hub_name_is_refused(name):
    with pytest.raises(Problem, match=f"unknown model {name}"):
        model.find(name)


def test_a_folder_and_a_hub_name_are_told_apart(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    found = model.find(str(tmp_path))
    assert found.local and found.name == tmp_path.name and found.config() == {"hidden_size": 64}
    assert model.find("Owner/Name") == model.Model("Owner/Name", "Owner/Name", local=False)


def test_the_cache_is_compared_with_the_same_memory_uncompressed():
    # D = 64: K and V in bf16 take 256 bytes; 4 bits take 64, scales 2, the exact token 2
    text = report.cache("tdsf_k4v4", {"head_dim": 64}, LOG)
    assert "4.25 bits per element" in text
    assert "701,696 tokens fit, 186,388 uncompressed in bfloat16 (3.76 times" in text


def test_an_uncompressed_cache_states_its_tokens():
    assert report.cache("auto", {"head_dim": 64}, LOG) == "auto: 701,696 tokens fit"

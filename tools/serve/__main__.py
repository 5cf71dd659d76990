# SPDX-License-Identifier: Apache-2.0
"""python -m tools.serve: prepare a model and serve it on 127.0.0.1."""

import argparse
import os
import shlex
import socket
import sys

import psutil

from tools import errors
from tools.cache import cache_dir
from tools.errors import Problem
from tools.serve import model, report
from tools.serve.server import Server

HOST = "127.0.0.1"
GIB = 1 << 30
# Upstream takes 92 % of the machine's memory for the cache; a first run should not.
CACHE_SHARE, CACHE_MOST = 0.25, 2 * GIB
MEMORY_OPTIONS = ("--kv-cache-memory-bytes", "--gpu-memory-utilization")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.serve", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--kv", default="tdsf_k4v4", help="--kv-cache-dtype")
    parser.add_argument("rest", nargs="*", help="after --: options for vLLM")
    arguments = parser.parse_args()
    _check_port(arguments.port)
    chosen = model.find(arguments.model)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", chosen.source, "--served-model-name", chosen.name]
    command += ["--host", HOST, "--port", str(arguments.port)]
    command += ["--kv-cache-dtype", arguments.kv]
    command += [*_memory(arguments.rest), *arguments.rest]
    print(f"serving {chosen.name}: {shlex.join(command[1:])}", file=sys.stderr, flush=True)
    log = cache_dir() / "logs" / f"serve-{arguments.port}.log"
    server = Server(command, _environment(chosen.local), log)
    server.wait_until_ready(f"http://{HOST}:{arguments.port}/health")
    text = log.read_text()
    print(
        report.summary(chosen.name, arguments.kv, arguments.port, chosen.config(), text),
        flush=True,
    )
    server.show()
    return server.wait()


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise Problem(
                f"port {port} cannot be used: {error.strerror}",
                f"on {HOST}",
                f"stop what listens there, or choose another: make serve PORT={port + 1}",
            ) from error


def _memory(rest: list[str]) -> list[str]:
    """The cache's size, unless the person named one."""
    named = any(word.split("=")[0] in MEMORY_OPTIONS for word in rest)
    if named or "VLLM_CPU_KVCACHE_SPACE" in os.environ:
        return []
    size = min(CACHE_MOST, int(psutil.virtual_memory().available * CACHE_SHARE))
    return ["--kv-cache-memory-bytes", str(size)]


def _environment(local: bool) -> dict[str, str]:
    defaults = {"VLLM_NO_USAGE_STATS": "1"}
    environment = {**defaults, **os.environ}
    if local:
        environment["HF_HUB_OFFLINE"] = "1"  # nothing to look up
    return environment


if __name__ == "__main__":
    errors.run(main)

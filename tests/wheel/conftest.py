# SPDX-License-Identifier: Apache-2.0
import http.server
import threading
from pathlib import Path

import pytest


class Index:
    """A package index on the loopback interface that serves one project from a dict."""

    def __init__(self, project: str) -> None:
        self.files: dict[str, bytes] = {}
        self.cut: set[str] = set()  # files whose transfer breaks off half-way
        self.requests: list[str] = []
        self.serves_ranges = True
        index = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                index.requests.append(self.path)
                name = self.path.rsplit("/", 1)[1]
                if self.path == f"/simple/{project}/":
                    links = "".join(f'<a href="/files/{n}">{n}</a>' for n in index.files)
                    self.reply("text/html", f"<html><body>{links}</body></html>".encode())
                elif name in index.files and "Range" in self.headers and index.serves_ranges:
                    first, last = self.headers["Range"].removeprefix("bytes=").split("-")
                    self.part(index.files[name], int(first), int(last))
                elif name in index.files:
                    content = index.files[name]
                    sent = content[: len(content) // 2] if name in index.cut else content
                    self.reply("application/octet-stream", sent, len(content))
                else:
                    self.send_error(404)

            def reply(self, kind: str, body: bytes, length: int | None = None) -> None:
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(length or len(body)))
                self.end_headers()
                self.wfile.write(body)

            def part(self, content: bytes, first: int, last: int) -> None:
                body = content[first : last + 1]
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_) -> None:
                return

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/simple"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("VLLM_TQ_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(cache, monkeypatch):
    index = Index("thing")
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    yield index
    index.close()

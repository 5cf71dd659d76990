# SPDX-License-Identifier: Apache-2.0
"""A package index of the tests' own on this machine: real fetching without a network."""

import contextlib
import hashlib
import http.server
import threading
from pathlib import Path


@contextlib.contextmanager
def serving(files: dict[str, list[Path]]):
    """Serve the files of each project; yields the index URL for PIP_INDEX_URL."""
    links = {
        project: "".join(
            f'<a href="/files/{path.name}#sha256={hashlib.sha256(path.read_bytes()).hexdigest()}">'
            f"{path.name}</a>\n"
            for path in paths
        )
        for project, paths in files.items()
    }
    by_name = {path.name: path for paths in files.values() for path in paths}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            kind, name = self.path.strip("/").split("/")[-2:]
            if kind == "simple" and name in links:
                self._answer("text/html", links[name].encode())
            elif kind == "files" and name in by_name:
                self._answer("application/octet-stream", by_name[name].read_bytes())
            else:
                self.send_error(404)

        def _answer(self, kind: str, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            """Quiet: pytest shows what matters."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/simple/"
    finally:
        server.shutdown()
        server.server_close()

"""A folder over HTTP with ranges, on a port of this machine."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def web_folder(folder: Path) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """(the URL of `folder`, the name of each file asked for and the bytes given of it so far)."""
    asked: list[tuple[str, int]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = folder / self.path.lstrip("/")
            data = path.read_bytes() if path.is_file() else b""
            wanted = self.headers.get("Range", "").removeprefix("bytes=")
            first, last = map(int, wanted.split("-")) if wanted else (0, len(data))
            part = data[first : last + 1]
            asked.append((path.name, len(part)))
            self.send_response(404 if not path.is_file() else 206 if wanted else 200)
            self.send_header("Content-Length", str(len(part)))
            if wanted:
                self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(data)}")
            self.end_headers()
            self.wfile.write(part)

        def log_message(self, *args: object) -> None: ...

    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{made.server_address[1]}", asked
    finally:
        made.shutdown()
        made.server_close()
        thread.join()

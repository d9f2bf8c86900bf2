"""Web servers on a port of this machine: one that answers as a test wants, and a folder with ranges."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

WebAnswer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def web_server(answer: WebAnswer) -> Iterator[str]:
    """The URL of a server that answers each GET and POST so."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        do_POST = do_GET

        def log_message(self, *args: object) -> None: ...

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{made.server_port}"
    finally:
        made.shutdown()
        made.server_close()
        thread.join()


@contextmanager
def web_folder(folder: Path) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """(the URL of `folder`, the name of each file asked for and the bytes given of it so far)."""
    asked: list[tuple[str, int]] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        path = folder / handler.path.lstrip("/")
        data = path.read_bytes() if path.is_file() else b""
        wanted = handler.headers.get("Range", "").removeprefix("bytes=")
        first, last = map(int, wanted.split("-")) if wanted else (0, len(data))
        part = data[first : last + 1]
        asked.append((path.name, len(part)))
        handler.send_response(404 if not path.is_file() else 206 if wanted else 200)
        handler.send_header("Content-Length", str(len(part)))
        if wanted:
            handler.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(data)}")
        handler.end_headers()
        handler.wfile.write(part)

    with web_server(answer) as url:
        yield url, asked

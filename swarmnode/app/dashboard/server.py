"""The servers of pages. A run's: its page, a read-only JSON API described by openapi.json, and a stream of changes.

No request to a run's page changes anything: clients that can reach the port can only read. By default a server answers
only requests that name this machine as their host, so that a web page elsewhere cannot read it through a visitor's
browser. `public` answers all requests and leaves out the nodes' addresses.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import hmac
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from swarmnode.app.dashboard import view
from swarmnode.app.dashboard.heartbeat import WRITE_TIMEOUT_S, Heartbeat
from swarmnode.base.ids import PeerId, short
from swarmnode.base.metrics.http_server import HttpServer
from swarmnode.base.wire import record_pb2

DOWNLOADS_MAX = 32  # concurrent downloads, and below the limit for one address; guess
DOWNLOADS_PER_ADDRESS_MAX = 4
ENTRIES_MAX = 500
POINTS_MAX = 4000
REQUEST_BYTES_MAX = 4096  # of a body: all limits, as texts
PACKED_FROM = 2048  # bytes; below that gzip saves no packet
LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}

TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".json": "application/json",
    ".txt": "text/plain",
}


class Asset(NamedTuple):
    """One file of the wheel, in memory."""

    body: bytes
    packed: bytes
    kind: str
    tag: str


def load_assets() -> dict[str, Asset]:
    """All files of static/, by name."""
    assets = {}
    for entry in (resources.files(__package__) / "static").iterdir():
        kind = TYPES.get("." + entry.name.rpartition(".")[2])
        if kind is not None and entry.is_file():
            body = entry.read_bytes()
            tag = hashlib.sha256(body).hexdigest()[:16]
            assets[entry.name] = Asset(body, gzip.compress(body, 6, mtime=0), kind, f'"{tag}"')
    return assets


class PageServer:
    """One page of static/ with its assets. Requests must name this machine as their host, unless it is `public`."""

    def __init__(self, page: str, *, public: bool, request_bytes_max: int = REQUEST_BYTES_MAX) -> None:
        self._start_page = page
        self._public = public
        self._request_bytes_max = request_bytes_max
        self._assets = load_assets()
        self._server = HttpServer(self.app())

    async def start(self, host: str, port: int) -> str:
        """Listen on `host`:`port` (0: any free one); returns the page's URL. Raises UsageError when it cannot."""
        bound = await self._server.start(host, port, "--port")
        shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        return f"http://{shown}:{bound}/"

    async def close(self) -> None:
        """End the server."""
        await self._server.close()

    def app(self) -> web.Application:
        """The routes of the page and its assets."""
        app = web.Application(middlewares=[self._guard], client_max_size=self._request_bytes_max)
        app.router.add_get("/", self._page)
        app.router.add_get("/static/{name}", self._asset)
        return app

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if not self._public and _host(request.host) not in LOCAL_HOSTS:
            raise web.HTTPForbidden(text="this page is for this machine; a coordinator with --public shares its own\n")
        response = await handler(request)
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    async def _page(self, request: web.Request) -> web.Response:
        return self._send(request, self._assets[self._start_page])

    async def _asset(self, request: web.Request) -> web.Response:
        asset = self._assets.get(request.match_info["name"])
        if asset is None:
            raise web.HTTPNotFound(text="no such file\n")
        return self._send(request, asset)

    def _send(self, request: web.Request, asset: Asset) -> web.Response:
        headers = {"ETag": asset.tag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
        if request.headers.get("If-None-Match") == asset.tag:
            return web.Response(status=304, headers=headers)
        packed = "gzip" in request.headers.get("Accept-Encoding", "")
        if packed:
            headers["Content-Encoding"] = "gzip"
        body = asset.packed if packed else asset.body
        return web.Response(body=body, content_type=asset.kind, charset="utf-8", headers=headers)


class DashboardServer(PageServer):
    """Serves `live`. `run` is the result of view.run, `signed` the run's manifest. No request changes anything."""

    def __init__(self, live: Heartbeat, run: view.Json, signed: record_pb2.SignedManifest, *, public: bool) -> None:
        self._live = live
        self._run = run
        self._signed = signed
        self._downloads: Counter[str] = Counter()
        super().__init__("index.html", public=public)

    async def close(self) -> None:
        """End every stream, then the server."""
        self._live.close()
        await super().close()

    def app(self) -> web.Application:
        """The routes, all of them GET (and HEAD)."""
        app = super().app()
        app.on_shutdown.append(self._end_streams)
        get = app.router.add_get
        get("/node/{peer}", self._page)
        get("/healthz", self._healthz)
        get("/api/v1/openapi.json", self._openapi)
        get("/api/v1/run", self._json(lambda request: self._run))
        get("/api/v1/picture", self._json(lambda request: self._live.picture()))
        get("/api/v1/summary", self._json(lambda request: view.summary(self._live.board, self._live.now_s())))
        get("/api/v1/nodes", self._json(lambda request: {"nodes": self._nodes()}))
        get("/api/v1/nodes/{peer}", self._json(self._node))
        get("/api/v1/links", self._json(lambda request: {"links": view.links(self._live.board)}))
        get("/api/v1/rounds", self._json(lambda request: {"rounds": view.recent_rounds(self._live.board)}))
        get("/api/v1/curves", self._json(self._curves))
        get("/api/v1/timeline", self._json(self._timeline))
        get("/api/v1/alarms", self._json(lambda request: {"alarms": [asdict(alarm) for alarm in self._live.alarms]}))
        get("/api/v1/contributors", self._json(lambda request: {"contributors": view.contributors(self._live.board)}))
        get("/api/v1/contributors/{peer}/receipts", self._json(self._receipts))
        get("/api/v1/manifest", self._json(self._manifest))
        get("/api/v1/archive", self._json(self._archive))
        get("/api/v1/models", self._json(lambda request: {"models": list(self._live.history.models.values())}))
        get("/archive/{label}/urls.txt", self._urls)
        get("/archive/{label}/{name}", self._download)
        get("/api/v1/stream", self._stream)
        return app

    async def _end_streams(self, app: web.Application) -> None:
        self._live.close()

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _openapi(self, request: web.Request) -> web.Response:
        return self._send(request, self._assets["openapi.json"])

    def _json(self, make: Callable[[web.Request], view.Json]) -> Callable[[web.Request], Awaitable[web.Response]]:
        """A handler that answers with `make`'s result. Requests without a query share one result a heartbeat."""

        async def handler(request: web.Request) -> web.Response:
            def text() -> bytes:
                return json.dumps(make(request), separators=(",", ":"), allow_nan=False).encode()

            headers = {"Cache-Control": "no-store", "Vary": "Accept-Encoding"}
            if request.query_string:
                return web.Response(body=text(), content_type="application/json", headers=headers)
            body = self._live.once_a_tick(request.path, text)
            if len(body) > PACKED_FROM and "gzip" in request.headers.get("Accept-Encoding", ""):
                plain = body
                body = self._live.once_a_tick(request.path + "#gzip", lambda: gzip.compress(plain, 4, mtime=0))
                headers["Content-Encoding"] = "gzip"
            return web.Response(body=body, content_type="application/json", headers=headers)

        return handler

    def _nodes(self) -> list[view.Json]:
        return [view.node_row(node) for node in self._live.board.nodes.values()]

    def _node(self, request: web.Request) -> view.Json:
        asked = PeerId(request.match_info["peer"])
        nodes = self._live.board.nodes
        node = nodes.get(asked) or next((nodes[peer] for peer in nodes if short(peer) == asked), None)
        if node is None:
            raise web.HTTPNotFound(text='{"error":"no such node is here now"}', content_type="application/json")
        return view.node_detail(self._live.board, node, self._live.now_s(), private=not self._public)

    def _receipts(self, request: web.Request) -> view.Json:
        return view.receipts(self._live.board, PeerId(request.match_info["peer"]))

    def _curves(self, request: web.Request) -> view.Json:
        most = _number(request, "points", 600, POINTS_MAX)
        return {
            **{key: self._run[key] for key in ("run_id", "name", "context")},
            "points": view.series(self._live.history.points, most),
            "validations": view.validation_series(self._live.board),
        }

    def _timeline(self, request: web.Request) -> view.Json:
        most = _number(request, "limit", 100, ENTRIES_MAX)
        before = _number(request, "before", 2**53, 2**53)
        return {"entries": [entry.to_json() for entry in self._live.history.entries_before(before, most)]}

    def _manifest(self, request: web.Request) -> view.Json:
        signed = self._signed
        return {
            "manifest": json.loads(signed.manifest) if signed.manifest else {},
            "owner": signed.owner.hex(),
            "signature": signed.signature.hex(),
        }

    def _archive(self, request: web.Request) -> view.Json:
        offer = self._live.offer
        return {"status": "no archive is kept here", "entries": []} if offer is None else offer.full()

    async def _urls(self, request: web.Request) -> web.Response:
        """The files of a model, one URL a line, for `wget -i`."""
        label = request.match_info["label"]
        offer = self._live.offer
        names = offer.names(label) if offer is not None else []
        if not names:
            raise web.HTTPNotFound(text="no such checkpoint is offered here now\n")
        return web.Response(text="".join(f"{request.url.origin()}/archive/{label}/{name}\n" for name in names))

    async def _download(self, request: web.Request) -> web.StreamResponse:
        offer = self._live.offer
        remote = request.remote or ""
        path = None if offer is None else offer.file(request.match_info["label"], request.match_info["name"])
        if path is None:
            raise web.HTTPNotFound(text="no such file is offered here now\n")
        if self._downloads.total() >= DOWNLOADS_MAX or self._downloads[remote] >= DOWNLOADS_PER_ADDRESS_MAX:
            raise web.HTTPServiceUnavailable(text="too many downloads\n", headers={"Retry-After": "30"})
        headers = {**HEADERS, "Cache-Control": "no-cache", "Content-Type": "application/octet-stream"}
        return _CountedFile(path, {**headers, "Content-Disposition": "attachment"}, self._downloads)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        headers = {**HEADERS, "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        response = web.StreamResponse(headers=headers)
        response.content_type = "text/event-stream"
        queue = self._live.subscribe()
        try:
            with contextlib.suppress(ConnectionError, TimeoutError):  # the page went away
                await response.prepare(request)
                await response.write(b"retry: 2000\n\n")
                while (message := await queue.get()) is not None:
                    async with asyncio.timeout(WRITE_TIMEOUT_S):
                        await response.write(message)
        finally:
            self._live.unsubscribe(queue)
        return response


class _CountedFile(web.FileResponse):
    """A response with a file or a range of it. It counts as a download while it is sent."""

    def __init__(self, path: Path, headers: Mapping[str, str], downloads: Counter[str]) -> None:
        super().__init__(path, headers=headers)
        self._downloads = downloads

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        remote = request.remote or ""
        self._downloads[remote] += 1
        try:
            return await super().prepare(request)
        finally:
            self._downloads[remote] -= 1
            if not self._downloads[remote]:
                del self._downloads[remote]


def has_token(request: web.Request, token: str) -> bool:
    """Whether `request` carries `token`, in a header that another site's page cannot send."""
    shown = request.headers.get("Authorization", "")
    return hmac.compare_digest(shown.encode(), f"Bearer {token}".encode())


def _host(header: str) -> str:
    """The host a request names, without port and brackets."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0] if header.count(":") == 1 else header


def _number(request: web.Request, key: str, default: int, most: int) -> int:
    text = request.query.get(key, str(default))
    if not text.isdecimal() or len(text) > 16:
        raise web.HTTPBadRequest(
            text=json.dumps({"error": f"{key}: a whole number up to {most}"}), content_type="application/json"
        )
    return max(1, min(int(text), most))

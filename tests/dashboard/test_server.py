"""The server over a crowd of made-up nodes: answers fit the OpenAPI document, streams live, nothing can be changed."""

import asyncio
import hashlib
import json
import re
import time
from importlib import resources
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from benchmarks.swarm.fake_fleet import FakeFleet
from swarmnode.app.dashboard import server
from swarmnode.app.dashboard.start import PageAddress, dashboard
from swarmnode.base.errors import UsageError
from swarmnode.base.wire.record_pb2 import SignedManifest
from tests.support.watched import DOCUMENT, RUN, TINY, fits, watched

STATIC = resources.files("swarmnode.app.dashboard") / "static"


def fake_fleet(nodes: int = 6) -> FakeFleet:
    made = FakeFleet(TINY, RUN, nodes)
    for _ in range(40):
        made.train(1.0)
    return made


async def messages(response: aiohttp.ClientResponse, count: int) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    event = ""
    async with asyncio.timeout(150):
        async for raw in response.content:
            line = raw.decode().rstrip("\n")
            if line.startswith("event: "):
                event = line[7:]
            elif line.startswith("data: "):
                found.append((event, json.loads(line[6:])))
                if len(found) == count:
                    break
    return found


async def test_every_answer_fits_the_document(tmp_path: Path) -> None:
    here = fake_fleet()
    await here.announce()
    async with watched(here, tmp_path) as w, aiohttp.ClientSession(w.board.url) as session:
        await w.everybody_answered()
        w.board.live.tick()
        peer = here.nodes[0].identity.peer_id
        for path, operations in DOCUMENT["paths"].items():
            assert set(operations) == {"get"}, "read-only"
            if path.endswith("/stream"):
                continue
            async with session.get(path.replace("{peer}", peer)) as answer:
                assert answer.status == 200, path
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                fits(
                    await answer.json(), operations["get"]["responses"]["200"]["content"]["application/json"]["schema"]
                )
        for path, code in (
            ("/api/v1/nodes/x", 404),
            ("/api/v1/curves?points=-1", 400),
            ("/api/v1/timeline?limit=a", 400),
        ):
            async with session.get(path) as answer:
                assert answer.status == code
                fits(await answer.json(), {"$ref": "#/components/schemas/Error"})
        async with session.get("/api/v1/summary") as answer:
            summary = await answer.json()
        assert summary["serving"] == 6 and summary["replicas"] == [3, 3]
        assert summary["samples"] == here.samples and 0 < summary["loss_train"] < 6
        assert summary["paired"] > 0 and summary["gossip_dense"] > 0


async def test_the_stream_begins_with_everything_and_goes_on_with_changes(tmp_path: Path) -> None:
    here = fake_fleet()
    await here.announce()
    async with watched(here, tmp_path) as w, aiohttp.ClientSession(w.board.url) as session:
        await w.everybody_answered()
        async with session.get("/api/v1/stream") as stream:
            assert stream.content_type == "text/event-stream"
            first, *rest = await messages(stream, 7)
        assert first[0] == "picture" and len(first[1]["nodes"]) == 6
        fits(first[1], {"$ref": "#/components/schemas/Picture"})
        for kind, change in rest:
            assert kind == "change"
            fits(change, {"$ref": "#/components/schemas/Change"})
        assert any("links" in change for _, change in rest) and any("point" in change for _, change in rest)
        await w.until(lambda: w.board.live.pages == 0, "the closed page is forgotten")


async def test_open_pages_do_not_delay_the_end(tmp_path: Path) -> None:
    async with aiohttp.ClientSession() as session:
        async with watched(fake_fleet(2), tmp_path) as w:
            streams = [await session.get(w.board.url + "api/v1/stream") for _ in range(5)]
            await asyncio.gather(*(messages(stream, 1) for stream in streams))
            begun_s = time.monotonic()
        # Without ending the streams aiohttp waits SHUTDOWN_S and more for them.
        assert time.monotonic() - begun_s < 20
        for stream in streams:
            await stream.content.read()
            assert stream.content.at_eof()


async def test_nothing_can_be_changed_and_strangers_read_nothing_local(tmp_path: Path) -> None:
    async with watched(fake_fleet(2), tmp_path) as w, aiohttp.ClientSession(w.board.url) as session:
        assert w.board.url.startswith("http://127.0.0.1:")
        for method in ("POST", "PUT", "PATCH", "DELETE"):
            for path in ("/", "/api/v1/run", "/api/v1/nodes/x", "/static/app.js"):
                async with session.request(method, path) as answer:
                    assert answer.status == 405, (method, path)
        for host, status in (("evil.example", 403), ("localhost", 200), ("127.0.0.1:9", 200), ("[::1]:9", 200)):
            async with session.get("/api/v1/run", headers={"Host": host}) as answer:
                assert answer.status == status, host
        for path in ("/static/../server.py", "/static/%2e%2e%2fserver.py", "/static/VENDOR.md", "/etc/passwd"):
            async with session.get(path) as answer:
                assert answer.status == 404, path


async def test_public_pages_answer_everybody_and_hide_addresses(tmp_path: Path) -> None:
    async def body(public: bool) -> list[str]:
        here = fake_fleet(2)
        await here.announce()
        home = tmp_path / str(public)
        home.mkdir()
        async with watched(here, home, public=public) as w, aiohttp.ClientSession(w.board.url) as session:
            await w.everybody_answered()
            host = {"Host": "swarm.example"} if public else {}
            async with session.get(f"/api/v1/nodes/{here.nodes[0].identity.peer_id[-8:]}", headers=host) as answer:
                return (await answer.json())["addresses"]

    assert (await body(False)) == ["/ip4/10.0.0.1/tcp/4001"]
    assert (await body(True)) == []


def test_assets_are_small_ours_and_unchanged() -> None:
    assets = server.load_assets()
    assert sum(len(asset.body) for asset in assets.values()) < 1_000_000
    page = assets["index.html"].body.decode()
    for wanted in re.findall(r'(?:src|href)="(/static/[^"]+)"', page):
        assert wanted.removeprefix("/static/") in assets, wanted
    for name, asset in assets.items():
        if name.endswith((".html", ".css", ".js")) and not name.startswith("uplot"):
            outside = re.findall(rb"https?://[^\s\"'<)]+", asset.body)
            assert not [url for url in outside if b"www.w3.org" not in url], name
    vendored = re.findall(r"^    ([0-9a-f]{64})  (uplot\.min\.\w+)$", (STATIC / "VENDOR.md").read_text(), re.M)
    assert len(vendored) == 2
    for digest, name in vendored:
        assert hashlib.sha256(assets[name].body).hexdigest() == digest
    assert b"MIT License" in assets["uplot.LICENSE.txt"].body


async def test_a_port_in_use_is_one_clear_error(tmp_path: Path) -> None:
    here = fake_fleet(1)
    async with watched(here, tmp_path) as w:
        port = int(w.board.url.rstrip("/").rpartition(":")[2])
        (tmp_path / "other").mkdir()
        with pytest.raises(UsageError, match=f"127.0.0.1:{port} is in use"):
            async with dashboard(
                TINY, RUN, SignedManifest(), tmp_path / "other", PageAddress(port=port),
                transport=here.nodes[0].transport, directory=here.directory, clock=here.clock, telemetry=w.quiet,
            ):  # fmt: skip
                pass

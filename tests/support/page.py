"""The dashboard's page, served to a real browser."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from benchmarks.swarm.dashboard import RUN, manifest_for, watched
from benchmarks.swarm.fake_fleet import FakeFleet

Opened = TypeVar("Opened")

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

# Screenshots are left there.
ARTEFACTS = Path(os.environ.get("SWARMNODE_ARTEFACTS", Path(__file__).parents[2] / "build" / "screenshots"))
SIZES = {"desktop": {"width": 1360, "height": 900}, "phone": {"width": 390, "height": 844}}
BOUND_MS = 90_000
HOSTILE = "<img src=x onerror=alert(1)>"


@dataclass
class Served:
    """A page served by a loop in a thread of its own; `do` runs there."""

    url: str
    fake_fleet: FakeFleet
    loop: asyncio.AbstractEventLoop

    def do(self, work: Any) -> None:
        done = threading.Event()
        self.loop.call_soon_threadsafe(lambda: (work(), done.set()))  # type: ignore[func-returns-value]
        assert done.wait(60)


@contextmanager
def in_loop(page: Callable[[], AbstractAsyncContextManager[Opened]]) -> Iterator[Opened]:
    """What `page` opens, in a loop of its own, for a browser's blocking calls."""
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    stop = asyncio.Event()
    made: list[Opened] = []

    async def serve() -> None:
        async with page() as opened:
            made.append(opened)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert ready.wait(60)
        yield made[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()


@contextmanager
def serving(home: Path) -> Iterator[Served]:
    """The page of a made-up swarm of 14 nodes."""
    ready = threading.Event()
    made: list[Served] = []
    stop: list[asyncio.Event] = []

    async def serve() -> None:
        fake_fleet = FakeFleet(manifest_for(14), RUN, 14)
        fake_fleet.nodes[3].name = HOSTILE
        for _ in range(40):
            fake_fleet.train(1.0)
        fake_fleet.nodes[1].recent("info", "stage.chosen", {"serves": 1, "reason": "stage 1 is the slowest"})
        fake_fleet.nodes[1].recent("info", "recovery.done", {"method": "replica", "seconds": 1.4, "nbytes": 8_000_000})
        fake_fleet.nodes[2].recent("info", "node.ready", {"serves": 2})
        async with watched(fake_fleet, home) as board:
            stop.append(asyncio.Event())
            made.append(Served(board.url, fake_fleet, asyncio.get_running_loop()))
            while len(board.live.history.points) < 12:
                await asyncio.sleep(0.1)
            ready.set()
            await stop[0].wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(60)
        yield made[0]
    finally:
        made[0].loop.call_soon_threadsafe(stop[0].set)
        thread.join(60)
    assert not thread.is_alive()


@contextmanager
def opened(browser: Browser, served: Served, scheme: str = "light", size: str = "desktop") -> Iterator[Page]:
    """A page that has shown its first curves. What it says on the console is in `page.said`: nothing, at the end."""
    context = browser.new_context(viewport=SIZES[size], color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
    page = context.new_page()
    page.set_default_timeout(BOUND_MS)
    page.said = []  # type: ignore[attr-defined]
    page.on("console", lambda message: page.said.append(message.text))  # type: ignore
    page.on("pageerror", lambda error: page.said.append(str(error)))  # type: ignore
    page.on("requestfailed", lambda request: failed(page, request.url))
    page.goto(served.url)
    until(page, "performance.getEntriesByName('swarmnode-update').length >= 3")
    try:
        yield page
    finally:
        context.close()
    assert page.said == []  # type: ignore[attr-defined]


def failed(page: Page, url: str) -> None:
    if not url.endswith("/stream"):  # which ends whenever its page is left
        page.said.append(url)  # type: ignore[attr-defined]


def until(page: Page, condition: str) -> None:
    """Wait for a condition. (The page's security policy forbids playwright's own way, which evaluates text there.)"""
    for _ in range(BOUND_MS // 100):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"not within {BOUND_MS / 1000:g} s: {condition}")

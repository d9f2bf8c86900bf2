"""The page in Debian's Chromium: looks right and says nothing on the console, in light and dark, on desktop and phone.

Screenshots are left in build/screenshots ($SWARMNODE_ARTEFACTS moves them): look at them after changing the page.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from swarmnode.bench.crowd import Crowd
from swarmnode.bench.dashboard import CHROMIUM, FLAGS, RUN, manifest_for, no_browser, watched

if REASON := no_browser():
    pytest.skip(f"no browser to look at the page with: {REASON}", allow_module_level=True)

from playwright.sync_api import Browser, Page, sync_playwright

ARTEFACTS = Path(os.environ.get("SWARMNODE_ARTEFACTS", Path(__file__).parents[2] / "build" / "screenshots"))
SIZES = {"desktop": {"width": 1360, "height": 900}, "phone": {"width": 390, "height": 844}}
BOUND_MS = 90_000
HOSTILE = "<img src=x onerror=alert(1)>"


@dataclass
class Served:
    """A page served by a loop in a thread of its own; `do` runs there."""

    url: str
    crowd: Crowd
    loop: asyncio.AbstractEventLoop

    def do(self, work: Any) -> None:
        done = threading.Event()
        self.loop.call_soon_threadsafe(lambda: (work(), done.set()))
        assert done.wait(60)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("swarmnode.dashboard.live.TICK_S", 0.25)  # four times as fast: curves have points sooner
        patch.setattr("swarmnode.bench.dashboard.STEP_S", 0.5)
        yield from serving(tmp_path_factory)


def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("page")
    ready = threading.Event()
    made: list[Served] = []
    stop: list[asyncio.Event] = []

    async def serve() -> None:
        crowd = Crowd(manifest_for(14), RUN, 14)
        crowd.people[3].name = HOSTILE
        for _ in range(40):
            crowd.train(1.0)
        crowd.people[1].recent("info", "stage.chosen", {"serves": 1, "reason": "stage 1 is the slowest"})
        crowd.people[1].recent("info", "recovery.done", {"method": "replica", "seconds": 1.4, "nbytes": 8_000_000})
        crowd.people[2].recent("info", "node.ready", {"serves": 2})
        async with watched(crowd, home) as board:
            stop.append(asyncio.Event())
            made.append(Served(board.url, crowd, asyncio.get_running_loop()))
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


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as p:
        opened = p.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS), timeout=BOUND_MS)
        yield opened
        opened.close()


def opened(browser: Browser, served: Served, scheme: str = "light", size: str = "desktop", path: str = "") -> Page:
    """A page that has shown its first curves; whatever it says on the console is in `page.said`."""
    context = browser.new_context(viewport=SIZES[size], color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
    page = context.new_page()
    page.set_default_timeout(BOUND_MS)
    page.said = []  # type: ignore[attr-defined]
    page.on("console", lambda message: page.said.append(message.text))  # type: ignore[attr-defined]
    page.on("pageerror", lambda error: page.said.append(str(error)))  # type: ignore[attr-defined]
    page.on("requestfailed", lambda request: failed(page, request.url))
    page.goto(served.url + path)
    until(page, "performance.getEntriesByName('swarmnode-update').length >= 3")
    return page


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


# Every text against what is behind it: WCAG 2.1 AA, 4.5 to 1, or 3 to 1 from 24 px.
CONTRAST = """() => {
  const parse = (text) => {
    const part = text.match(/-?[\\d.]+(e-?\\d+)?/g).map(Number);
    const scale = text.startsWith('color(') ? 255 : 1;
    return [part[0] * scale, part[1] * scale, part[2] * scale, part[3] === undefined ? 1 : part[3]];
  };
  const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3])).concat([1]);
  const behind = (node) => {
    const layers = [];
    for (let at = node; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255, 1]);
  };
  const light = (c) => [0, 1, 2].map((i) => c[i] / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const bad = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || ['SCRIPT', 'NOSCRIPT', 'STYLE'].includes(node.tagName)) continue;
    if (!node.checkVisibility() || !node.getClientRects().length || node.closest('.skip')) continue;
    const style = getComputedStyle(node), under = behind(node);
    const [a, b] = [light(over(parse(style.color), under)), light(under)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < (parseFloat(style.fontSize) >= 24 ? 3 : 4.5)) bad.push(`${ratio.toFixed(2)} ${node.className || node.tagName}: ${walker.currentNode.textContent.trim().slice(0, 40)}`);
  }
  return [...new Set(bad)];
}"""  # noqa: E501


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_legible_and_silent(browser: Browser, served: Served, scheme: str, size: str) -> None:
    page = opened(browser, served, scheme, size)
    try:
        assert page.title().endswith("meadow") and "14 nodes training" in page.inner_text("#phrase")
        assert page.locator("a.node").count() == 14
        assert page.locator(".uplot canvas").count() == 2
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out sideways"
        assert page.evaluate(CONTRAST) == []
        ARTEFACTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=ARTEFACTS / f"run-{scheme}-{size}.png", full_page=True)
        peer = served.crowd.people[1].identity.peer_id
        page.goto(f"{served.url}node/{peer}")
        page.wait_for_selector("#view-node h1 .pill")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.evaluate(CONTRAST) == []
        page.screenshot(path=ARTEFACTS / f"node-{scheme}-{size}.png", full_page=True)
        assert page.said == []  # type: ignore[attr-defined]
    finally:
        page.context.close()


def test_everything_can_be_reached_by_keyboard(browser: Browser, served: Served) -> None:
    page = opened(browser, served)
    try:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        reached = []
        for _ in range(24):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("(at => at.id || at.className || at.name)(document.activeElement)"))
        for wanted in ("theme", "axis", "node state-training", "kind", "timeline"):
            assert wanted in reached, reached
        assert reached.count("node state-training") == 1, "one stop for all nodes"
        page.focus('a.node[tabindex="0"]')
        first = page.evaluate("document.activeElement.href")
        page.keyboard.press("ArrowRight")
        second = page.evaluate("document.activeElement.href")
        assert first != second
        page.keyboard.press("Enter")
        page.wait_for_selector("#view-node h1 .pill")
        assert page.url == second and page.evaluate("document.activeElement.id") == "main"
        page.go_back()
        page.wait_for_selector("#view-run:not([hidden])")
        before = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.focus("#theme")
        page.keyboard.press("Enter")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
        assert page.said == []  # type: ignore[attr-defined]
    finally:
        page.context.close()


def test_names_are_text_whatever_strangers_put_there(browser: Browser, served: Served) -> None:
    page = opened(browser, served)
    try:
        assert page.locator("a.node b", has_text=HOSTILE).count() == 1
        assert page.locator("main img").count() == 0
        assert page.said == []  # type: ignore[attr-defined]
    finally:
        page.context.close()


def test_what_happens_is_seen_without_a_reload(browser: Browser, served: Served) -> None:
    page = opened(browser, served)
    try:
        samples = page.inner_text("#n-left")
        until(page, f"document.getElementById('n-left').textContent !== {samples!r}")
        person = served.crowd.people[5]
        served.do(lambda: served.crowd.network.nodes.pop(person.identity.peer_id))
        page.wait_for_selector(f'a.node.state-silent[href="/node/{person.identity.peer_id}"]')
        page.wait_for_selector(".alarm b")
        assert "not answering" in page.inner_text("#alarms")
        page.wait_for_selector(f'#timeline li.kind-departure a[href="/node/{person.identity.peer_id}"]')
        served.do(lambda: served.crowd.network.nodes.update({person.identity.peer_id: person.transport}))
        page.wait_for_selector(f'a.node.state-training[href="/node/{person.identity.peer_id}"]')
        assert page.said == []  # type: ignore[attr-defined]
    finally:
        page.context.close()

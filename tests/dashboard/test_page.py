"""The page in Debian's Chromium: looks right and says nothing on the console, in light and dark, on desktop and phone.

Screenshots are left in build/screenshots ($SWARMNODE_ARTEFACTS moves them): look at them after changing the page.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.page import ARTEFACTS, HOSTILE, SIZES, Served, opened, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser

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
        peer = served.fake_fleet.nodes[1].identity.peer_id
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


def test_curves_by_tokens_smoothed_beside_another_run_and_as_files(
    browser: Browser, served: Served, tmp_path: Path
) -> None:
    page = opened(browser, served)
    try:
        page.check('input[name="axis"][value="tokens"]', force=True)
        page.check("#log")
        page.fill("#smooth", "0.9")
        with page.expect_download() as saved:
            page.click("text=JSON")
        saved.value.save_as(tmp_path / "other.json")
        with page.expect_download() as saved:
            page.click("#csv")
        saved.value.save_as(tmp_path / "table.csv")
        table = (tmp_path / "table.csv").read_text().splitlines()
        assert table[0].startswith("unix_s,samples,tokens,") and len(table) > 12
        told = json.loads((tmp_path / "other.json").read_text())
        (tmp_path / "other.json").write_text(json.dumps({**told, "name": HOSTILE}))
        page.set_input_files("#compare", tmp_path / "other.json")
        until(page, "document.getElementById('other-name').textContent.includes('<img src=x')")
        page.set_input_files("#compare", {"name": "x.json", "mimeType": "text/json", "buffer": b'{"points": [["a"]]}'})
        until(page, "document.getElementById('other-name').textContent.includes('cannot be shown')")
        page.click("#alone")
        assert page.locator("#other").is_hidden() and page.locator("main img").count() == 0
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


def test_the_page_follows_events_without_a_reload(browser: Browser, served: Served) -> None:
    page = opened(browser, served)
    try:
        samples = page.inner_text("#n-left")
        until(page, f"document.getElementById('n-left').textContent !== {samples!r}")
        fake_node = served.fake_fleet.nodes[5]
        served.do(lambda: served.fake_fleet.network.nodes.pop(fake_node.identity.peer_id))
        page.wait_for_selector(f'a.node.state-silent[href="/node/{fake_node.identity.peer_id}"]')
        page.wait_for_selector(".alarm b")
        assert "not answering" in page.inner_text("#alarms")
        page.wait_for_selector(f'#timeline li.kind-departure a[href="/node/{fake_node.identity.peer_id}"]')
        served.do(lambda: served.fake_fleet.network.nodes.update({fake_node.identity.peer_id: fake_node.transport}))
        page.wait_for_selector(f'a.node.state-training[href="/node/{fake_node.identity.peer_id}"]')
        assert page.said == []  # type: ignore[attr-defined]
    finally:
        page.context.close()

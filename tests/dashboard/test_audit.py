"""What Lighthouse would say of the page: axe-core's rules (its accessibility audits), a keyboard focus that goes
everywhere and is seen, and its best practices, in light and dark, on desktop and phone."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.page import SIZES, Served, opened

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytest.importorskip("axe_playwright_python", reason="axe-core is missing: pip install axe-playwright-python")

AXE = (resources.files("axe_playwright_python") / "axe.min.js").read_text()
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]

# What can be seen of the focus: an outline of its own, or of what stands in for it (a radio's label).
FOCUS = """() => {
  const at = document.activeElement;
  if (!at || at === document.body) return null;
  const shown = [at, at.nextElementSibling, at.parentElement].filter(Boolean).some((one) => {
    const style = getComputedStyle(one);
    const seen = parseFloat(style.outlineWidth) >= 2 && style.outlineColor !== 'rgba(0, 0, 0, 0)';
    return style.outlineStyle !== 'none' && seen;
  });
  const box = (at.offsetWidth || at.offsetHeight ? at : at.parentElement).getBoundingClientRect();
  return {
    what: `${at.tagName.toLowerCase()}#${at.id}.${at.className} ${(at.textContent || '').trim().slice(0, 20)}`,
    shown, top: box.top + scrollY, left: box.left, wide: box.width, high: box.height, index: at.tabIndex,
    seen: box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth,
  };
}"""


def violations(page: Page) -> list[str]:
    """What axe-core finds wrong, one line a rule and element."""
    page.evaluate(AXE)
    found: Any = page.evaluate(
        "tags => axe.run(document, {runOnly: {type: 'tag', values: tags}, resultTypes: ['violations']})", RULES
    )
    return [
        f"{rule['id']} ({rule['impact']}): {rule['help']}: {' '.join(node['target'])}: {node['html'][:120]}"
        for rule in found["violations"]
        for node in rule["nodes"]
    ]


def paths(served: Served) -> list[str]:
    return ["", f"node/{served.fake_fleet.nodes[1].identity.peer_id}", "node/nobody"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser: Browser, served: Served, scheme: str, size: str) -> None:
    page = opened(browser, served, scheme, size)
    try:
        for path in paths(served):
            if path:
                page.goto(served.url + path)
                page.wait_for_selector("#view-node h1")
            page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
            assert violations(page) == [], path
    finally:
        page.context.close()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("path", [0, 1])
def test_tab_goes_everywhere_in_order_and_is_seen(browser: Browser, served: Served, size: str, path: int) -> None:
    page = opened(browser, served, "light", size)
    try:
        if path:
            page.goto(served.url + paths(served)[path])
            page.wait_for_selector("#view-node h1 .pill")
        stops = []
        for _ in range(80):
            page.keyboard.press("Tab")
            stop = page.evaluate(FOCUS)
            if stop is None:
                break
            stops.append(stop)
        else:
            raise AssertionError("Tab never comes to the end of the page")
        assert len(stops) >= (8 if path else 12), stops
        assert [stop["what"] for stop in stops if not stop["shown"]] == [], "focus that is not seen"
        assert [stop["what"] for stop in stops if not stop["seen"]] == [], "focus outside the window"
        assert all(stop["index"] == 0 for stop in stops)
    finally:
        page.context.close()


def test_the_page_asks_nobody_else_and_says_what_it_is(browser: Browser, served: Served) -> None:
    page = opened(browser, served)
    try:
        asked = page.evaluate("performance.getEntriesByType('resource').map((one) => [one.name, one.transferSize])")
        assert all(name.startswith(served.url) for name, _ in asked)
        assert sum(size for _, size in asked) < 1_000_000
        for selector in ("html[lang]", "meta[name=viewport]", "meta[name=description]", "link[rel=icon]"):
            assert page.locator(selector).count() == 1, selector
        assert page.locator("img:not([alt])").count() == 0
    finally:
        page.context.close()

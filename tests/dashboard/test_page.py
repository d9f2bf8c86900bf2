"""The page in Debian's Chromium: looks right, is accessible by axe-core's rules and says nothing on the console: in
light and in dark, on desktop and phone.

Screenshots are left in build/screenshots ($SWARMNODE_ARTEFACTS moves them): look at them after changing the page.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.page import ARTEFACTS, HOSTILE, Served, opened, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

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
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    page.evaluate(AXE)
    found: Any = page.evaluate(
        "tags => axe.run(document, {runOnly: {type: 'tag', values: tags}, resultTypes: ['violations']})", RULES
    )
    return [
        f"{rule['id']} ({rule['impact']}): {rule['help']}: {' '.join(node['target'])}: {node['html'][:120]}"
        for rule in found["violations"]
        for node in rule["nodes"]
    ]


@pytest.mark.parametrize(
    ("scheme", "size"),
    [
        ("light", "desktop"),
        ("dark", "phone"),
        pytest.param("dark", "desktop", marks=pytest.mark.nightly),
        pytest.param("light", "phone", marks=pytest.mark.nightly),
    ],
)
def test_the_page_is_legible_and_silent(browser: Browser, served: Served, scheme: str, size: str) -> None:
    """By axe-core's rules, contrast among them, which are Lighthouse's audits of accessibility."""
    with opened(browser, served, scheme, size) as page:
        assert page.title().endswith("meadow") and "14 nodes training" in page.inner_text("#phrase")
        assert page.locator("a.node").count() == 14
        assert page.locator(".uplot canvas").count() == 2
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out sideways"
        assert violations(page) == []
        ARTEFACTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=ARTEFACTS / f"run-{scheme}-{size}.png", full_page=True)
        assert page.said == []  # type: ignore[attr-defined]
        for name in ("nobody", served.fake_fleet.nodes[1].identity.peer_id):
            page.goto(f"{served.url}node/{name}")
            page.wait_for_selector("#view-node h1" if name == "nobody" else "#view-node h1 .pill")
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert violations(page) == [], name
            page.screenshot(path=ARTEFACTS / f"node-{name[-6:]}-{scheme}-{size}.png", full_page=True)
        # The answer to the question for nobody is 404, as it should be.
        page.said[:] = [said for said in page.said if "404" not in said and "nobody" not in said]  # type: ignore


@pytest.mark.parametrize(("size", "path"), [("desktop", 0), ("phone", 1)], ids=["run", "node"])
def test_tab_goes_everywhere_in_order_and_is_seen(browser: Browser, served: Served, size: str, path: int) -> None:
    with opened(browser, served, "light", size) as page:
        if path:
            page.goto(f"{served.url}node/{served.fake_fleet.nodes[1].identity.peer_id}")
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


def test_everything_can_be_reached_by_keyboard(browser: Browser, served: Served) -> None:
    with opened(browser, served) as page:
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


def test_curves_by_tokens_smoothed_beside_another_run_and_as_files(
    browser: Browser, served: Served, tmp_path: Path
) -> None:
    with opened(browser, served) as page:
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


def test_names_are_text_and_nobody_else_is_asked(browser: Browser, served: Served) -> None:
    with opened(browser, served) as page:
        assert page.locator("a.node b", has_text=HOSTILE).count() == 1
        assert page.locator("main img").count() == 0
        asked = page.evaluate("performance.getEntriesByType('resource').map((one) => [one.name, one.transferSize])")
        assert all(name.startswith(served.url) for name, _ in asked)
        assert sum(size for _, size in asked) < 1_000_000
        for selector in ("html[lang]", "meta[name=viewport]", "meta[name=description]", "link[rel=icon]"):
            assert page.locator(selector).count() == 1, selector


def test_the_page_follows_events_without_a_reload(browser: Browser, served: Served) -> None:
    with opened(browser, served) as page:
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

"""The page of `swarmnode ui`: what it tells and does with its token, nothing without; clean by axe-core."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from benchmarks.swarm.screenshots import TOKEN, OwnNode, own_page
from swarmnode.app.local.node_page import NodePage, record
from tests.dashboard.test_page import AXE, RULES
from tests.support.page import ARTEFACTS, BOUND_MS, SIZES, in_loop, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser


async def post(url: str, verb: str, token: str = TOKEN, body: Any = None, **more: Any) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {token}", **more}
    data = body if isinstance(body, bytes) else json.dumps(body or {})
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}v1/{verb}", data=data, headers=headers) as answer,
    ):
        return answer.status, await answer.json() if answer.content_type == "application/json" else None


async def test_it_tells_and_does_what_the_verbs_do() -> None:
    async with own_page() as (address, node):
        url = address.partition("#")[0]
        assert url.startswith("http://127.0.0.1:")
        code, now = await post(url, "status")
        assert (code, now["headline"], now["paused"]) == (200, "stage 3 of 4; every stage has a machine", "")
        assert now["page"].startswith("http://192.0.2.7:7070/node/")
        code, paused = await post(url, "pause", body={"for_s": 3600, "reason": "snoozed"})
        assert (code, paused["running"], paused["reason"]) == (200, False, "snoozed")
        assert (await post(url, "status"))[1]["paused"].startswith("snoozed; until ")
        assert (await post(url, "resume"))[1]["running"]
        changed = {"max-up": "5Mbit", "hours": "none"}
        assert (await post(url, "limit", body={"changed": changed}))[1]["limits"] == {
            "max-up": "5Mbit",
            "quota": "50GB/day",
        }
        code, refused = await post(url, "limit", body={"changed": {"max-up": "fast"}})
        assert code == 400 and "--max-up 'fast': say 20Mbit" in refused["error"]
        assert (await post(url, "finish", body={"reason": "swarmnode ui"}))[0] == 200
        assert node.told == ["finish: swarmnode ui"]
        code, kept = await post(url, "record")
        assert code == 200 and kept["samples"] > 0 and len(kept["days"]) == 28
        assert [entry["text"] for entry in kept["entries"]][:3] == [
            "has moved to stage 3",
            "works again: within its limits",
            "pauses: steam runs",
        ]


async def test_without_its_token_or_for_another_host_it_says_nothing() -> None:
    async with own_page() as (address, node):
        url = address.partition("#")[0]
        for token in ("", "5" * 32, TOKEN[:-1]):
            assert (await post(url, "status", token))[0] == 401
        assert (await post(url, "status", Host="evil.example:80"))[0] == 403
        for verb in ("drain", "config", "copy", "record/x"):
            assert (await post(url, verb))[0] == (404 if "/" in verb else 400)
        assert (await post(url, "limit", body=b" " * 5000))[0] == 413
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{url}v1/finish", headers={"Authorization": f"Bearer {TOKEN}"}) as answer:
                assert answer.status == 405
            async with session.options(f"{url}v1/finish", headers={"Origin": "http://evil.example"}) as answer:
                assert answer.status == 405 and "Access-Control-Allow-Origin" not in answer.headers
            async with session.get(url) as answer:
                assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
                assert TOKEN not in await answer.text()
        assert node.told == [] and node.asked_times == 0


async def test_the_page_of_a_home_without_a_node_shows_its_past(tmp_path: Path) -> None:
    node = OwnNode(tmp_path)
    await node.write_past()
    log = tmp_path / "events.jsonl"
    log.write_text(log.read_text() + 'not json\n[1]\n{"event": 1}\n')
    page = NodePage(tmp_path, TOKEN, tmp_path / "config.toml")
    url = await page.start("127.0.0.1", 0)
    try:
        code, missing = await post(url, "status")
        assert code == 404 and "swarmnode join" in missing["error"]
        assert (await post(url, "record"))[1]["clients"] > 1
        log.unlink()
    finally:
        await page.close()
    empty = record(tmp_path / "nothing")
    assert empty["receipts"] == empty["entries"] == empty["days"] == []


@pytest.mark.parametrize(
    ("scheme", "size"), [pytest.param("light", "desktop", marks=pytest.mark.nightly), ("dark", "phone")]
)
def test_a_person_pauses_and_sets_limits_by_keyboard_and_pointer(browser: Browser, scheme: Any, size: str) -> None:
    with in_loop(own_page) as (address, node):
        context = browser.new_context(viewport=SIZES[size], color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
        page = context.new_page()
        page.set_default_timeout(BOUND_MS)
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(address)
        until(page, "document.querySelectorAll('#receipts tbody tr').length > 4")
        until(page, "!document.getElementById('rules').hidden")
        assert TOKEN not in page.url
        assert page.locator("#title").inner_text() == "Stage 3 of 4; every stage has a machine"
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out"
        page.screenshot(path=ARTEFACTS / f"ui-{scheme}-{size}.png", full_page=True)
        page.evaluate(AXE)
        found = page.evaluate("rules => axe.run({ runOnly: rules })", RULES)
        assert [(one["id"], [node["target"] for node in one["nodes"]]) for one in found["violations"]] == []
        page.focus("#pause")
        page.keyboard.press("Enter")
        until(page, "document.getElementById('title').textContent === 'Paused'")
        page.click("#resume")
        until(page, "!document.getElementById('pause').hidden")
        page.fill("#limit-max-up", "5Mbit")
        page.check("#limit-on-ac-only")
        page.keyboard.press("Enter")
        until(page, "document.getElementById('toml').textContent.includes('on-ac-only = true')")
        page.fill("#limit-max-up", "quick")
        page.click("text=Apply")
        until(page, "document.getElementById('said').textContent.includes('say 20Mbit')")
        assert page.input_value("#limit-max-up") == "quick", "what was typed stays"
        page.click("#finish")
        assert node.told == []
        page.click("#finish")
        until(page, "document.getElementById('said').textContent.startsWith('It finishes')")
        assert node.told == ["finish: swarmnode ui"]
        assert [text for text in said if "400" not in text] == []  # Chromium tells of the refused limit
        context.close()

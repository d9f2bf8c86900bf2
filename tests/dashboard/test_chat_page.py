"""The page of `swarmnode chat --page`: it answers piece by piece, to its token alone, and shows no model's markup."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from swarmnode.app.local.chat_page import MESSAGES_MAX, ChatPage, ChatSettings, asked_of
from swarmnode.app.local.conversation import Speaker
from swarmnode.base.errors import UsageError
from tests.dashboard.test_page import AXE, RULES
from tests.support.left_session import left_session
from tests.support.page import ARTEFACTS, BOUND_MS, HOSTILE, SIZES, in_loop, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from swarmnode.data.chat_template import ChatTemplate

TOKEN = "a" * 32
ASKED = {"messages": [{"role": "user", "content": "hello"}], "tokens": 20, "temperature": 0.0, "seed": 0}


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with ThreadPoolExecutor(1) as thread:  # a browser's loop may run in this one
        return thread.submit(left_session, tmp_path_factory.mktemp("run")).result()


class Talked(Speaker):
    """The real model of a small run; after its own words it says `HOSTILE`, as a model might."""

    __slots__ = ()

    def answer(self, template: ChatTemplate, messages: Any, count: int, sampling: Any) -> Iterator[str]:
        yield from super().answer(template, messages, count, sampling)
        yield HOSTILE


@asynccontextmanager
async def chat_page(session: Path, kind: type[Speaker] = Speaker, *, changes: bool = False) -> AsyncIterator[list[Any]]:
    """[address without the token, how often the model was read]"""
    seen: list[Any] = ["", 0]

    def read() -> Speaker:
        seen[1] += 1
        return kind.of(str(session), "stages", session.parent, lambda line: None)

    page = ChatPage(read, TOKEN, ChatSettings("", 24, 0.0, 1.0), changes=changes)
    seen[0] = await page.start("127.0.0.1", 0)
    try:
        yield seen
    finally:
        await page.close()


async def post(url: str, verb: str, body: Any, token: str = TOKEN, **more: str) -> tuple[int, str]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {token}", **more}
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{url}v1/{verb}", data=data, headers=headers) as answer,
    ):
        return answer.status, await answer.text()


async def test_it_says_what_the_model_says_at_the_command_line(session: Path) -> None:
    from swarmnode.model.text_generation import Sampling

    speaker = Speaker.of(str(session), "stages", session.parent, lambda line: None)
    wanted = "".join(speaker.answer(speaker.template(), ASKED["messages"], 20, Sampling(0.0, 0, 1.0, 0)))  # type: ignore[arg-type]
    async with chat_page(session) as seen:
        assert await post(seen[0], "say", ASKED) == (200, wanted) and wanted
        code, text = await post(seen[0], "begin", {})
        about = json.loads(text)
        assert (code, about["run"], about["samples"], about["tokens"]) == (200, "left", 512, 24)
        assert seen[1] == 1, "the model is read once"


async def test_two_that_ask_at_once_are_answered_one_after_the_other(session: Path) -> None:
    async with chat_page(session) as seen:
        answers = await asyncio.gather(*(post(seen[0], "say", ASKED) for _ in range(3)))
        assert len(set(answers)) == 1 and answers[0][0] == 200


async def test_each_conversation_takes_the_model_of_now_of_a_run_that_goes_on(session: Path) -> None:
    async with chat_page(session, changes=True) as seen:
        for times in (1, 2, 3):
            assert (await post(seen[0], "begin", {}))[0] == 200
            assert (await post(seen[0], "say", ASKED))[0] == 200
            assert seen[1] == times


async def test_without_its_token_or_for_another_host_it_says_nothing(session: Path) -> None:
    async with chat_page(session) as seen:
        for token in ("", TOKEN[:-1], "b" * 32):
            for verb in ("say", "begin"):
                assert (await post(seen[0], verb, ASKED, token))[0] == 401
        assert (await post(seen[0], "say", ASKED, Host="evil.example:80"))[0] == 403
        assert (await post(seen[0], "say", b" " * (1 << 21)))[0] == 413
        assert seen[1] == 0


@pytest.mark.parametrize(
    "changed",
    [
        {"messages": []},
        {"messages": "hello"},
        {"messages": None},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "owner", "content": "hello"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "assistant", "content": "hello"}]},
        {"messages": ASKED["messages"] * (MESSAGES_MAX + 1)},  # type: ignore[operator]
        {"tokens": 0},
        {"tokens": 10**6},
        {"tokens": "many"},
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"seed": -1},
        {"seed": 1 << 60},
        {"tokens": float("inf")},
    ],
)
def test_a_request_that_the_page_does_not_send_is_refused_with_one_line(changed: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as raised:
        asked_of(json.dumps(ASKED | changed).encode())
    assert "\n" not in str(raised.value)
    with pytest.raises(UsageError):
        asked_of(b"[" * 100_000)


@pytest.mark.parametrize(
    ("scheme", "size"), [pytest.param("light", "desktop", marks=pytest.mark.nightly), ("dark", "phone")]
)
def test_a_person_talks_by_keyboard_and_begins_anew(browser: Browser, session: Path, scheme: Any, size: str) -> None:
    with in_loop(lambda: chat_page(session, Talked)) as seen:
        context = browser.new_context(viewport=SIZES[size], color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
        page = context.new_page()
        page.set_default_timeout(BOUND_MS)
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(f"{seen[0]}#{TOKEN}")
        until(page, "document.getElementById('facts').textContent !== ''")
        assert TOKEN not in page.url
        for number in (1, 2):
            page.fill("#message", f"Say something <b>{number}</b>.")
            page.keyboard.press("Enter")
            until(page, f"document.querySelectorAll('#talk li').length === {2 * number}")
            until(page, "document.getElementById('stop').hidden")
        lines = page.locator("#talk p").all_inner_texts()
        assert lines[0] == "Say something <b>1</b>." and lines[1].endswith(HOSTILE) and lines[3].endswith(HOSTILE)
        assert page.locator("#talk b b, #talk img").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out"
        page.screenshot(path=ARTEFACTS / f"chat-{scheme}-{size}.png", full_page=True)
        page.evaluate(AXE)
        found = page.evaluate("rules => axe.run({ runOnly: rules })", RULES)
        assert [(one["id"], [node["target"] for node in one["nodes"]]) for one in found["violations"]] == []
        page.fill("#tokens", "0")
        page.evaluate("document.getElementById('form').noValidate = true")
        page.fill("#message", "too few")
        page.keyboard.press("Enter")
        until(page, "document.getElementById('wrong').textContent.includes('allowed are 1 to 4096 tokens')")
        page.click("#again")
        until(page, "document.querySelectorAll('#talk li').length === 0")
        assert [text for text in said if "400" not in text] == []  # Chromium tells of the refused request
        context.close()

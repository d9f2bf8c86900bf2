"""`--notify`: alarms that last, by a webhook and on the desktop; what fails is an event, or one line."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarmnode.app.cli.join import JoinScreen
from swarmnode.app.dashboard import start
from swarmnode.app.dashboard.alarm import Alarm
from swarmnode.base.wire.record_pb2 import NODE_STATE_JOINING, NODE_STATE_TRAINING
from swarmnode.base.wire.report_pb2 import LimitsReply, StatusReply
from tests.support.fake_telemetry import Quiet
from tests.support.web_folder import web_server

EMPTY = Alarm("stage_empty", "error", "Nobody serves stage 1", "One more volunteer is needed.")
SLOW = Alarm("slow", "warning", "Slow", "It waits.")


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[dict[str, str]]]]:
    """(URL, what was posted there)."""
    posted: list[dict[str, str]] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        posted.append(json.loads(handler.rfile.read(int(handler.headers["Content-Length"]))))
        handler.send_response(204)
        handler.end_headers()

    with web_server(answer) as url:
        yield f"{url}/hook", posted


async def test_an_alarm_that_lasts_is_told_once_and_so_is_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [[EMPTY, SLOW], [EMPTY], [EMPTY], [], [SLOW], [], []]
    live = SimpleNamespace(alarms=[])
    told = list[str]()
    telemetry = Quiet()

    class Over(Exception):
        pass

    async def sleep(_: float) -> None:
        if not looks:
            raise Over
        live.alarms = looks.pop(0)

    def notify(where: str, title: str, text: str) -> None:
        told.append(f"{where} {title} {text}")
        if text.startswith("over"):
            raise OSError("no route")

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(start, "notify", notify)
    with pytest.raises(Over):
        await start.notify_of_alarms("http://x", cast(Any, live), "meadow", telemetry)
    assert told == [
        "http://x meadow Nobody serves stage 1. One more volunteer is needed.",
        "http://x meadow over: Nobody serves stage 1",
    ]
    assert [event for event, _ in telemetry.events] == ["dashboard.notify_failed"]


def status(state: int, reason: str = "within its limits") -> StatusReply:
    limits = LimitsReply(running=reason == "within its limits", reason=reason)
    return StatusReply(run_name="meadow", state=state, stage=1, stages=3, limits=limits)  # type: ignore[arg-type]


async def test_a_volunteer_hears_that_it_trains_pauses_and_ends(
    webhook: tuple[str, list[dict[str, str]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, posted = webhook
    looks = [
        status(NODE_STATE_JOINING),
        status(NODE_STATE_TRAINING),
        status(NODE_STATE_TRAINING),
        status(NODE_STATE_TRAINING, "steam runs"),
        status(NODE_STATE_TRAINING),
    ]

    async def watch(home: Path, every_s: float) -> AsyncIterator[StatusReply]:
        while looks:
            yield looks.pop(0)

    monkeypatch.setattr("swarmnode.app.control.watch.watch", watch)
    screen = JoinScreen(tmp_path, url)
    async with aclosing(screen._statuses()) as statuses:
        for _ in range(5):
            await anext(statuses)
    screen.thank()
    said = [one["text"] for one in posted]
    assert said[:3] == ["meadow: trains stage 2 of 3", "meadow: paused: steam runs", "meadow: trains stage 2 of 3"]
    assert len(said) == 4 and said[3].startswith("meadow: thank you") and posted[0]["content"] == said[0]
    assert "--notify" not in capsys.readouterr().err

    tool = tmp_path / "notify-send"
    tool.write_text(f'#!/bin/sh\nprintf "%s|" "$@" > {tmp_path}/told\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(sys, "platform", "linux")
    start.notify("desktop", "meadow", "<b>eve</b> & co")
    assert (tmp_path / "told").read_text() == "--app-name=swarmnode|--|meadow|&lt;b&gt;eve&lt;/b&gt; &amp; co|"
    tool.unlink()
    looks += [status(NODE_STATE_TRAINING), status(NODE_STATE_TRAINING, "steam runs")]
    silent = JoinScreen(tmp_path, "desktop")
    async with aclosing(silent._statuses()) as statuses:
        for _ in range(2):
            await anext(statuses)
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert line.startswith("swarmnode: --notify desktop: ") and "notify-send" in line, "said once, and it goes on"


@pytest.mark.parametrize(
    "name",
    [
        "<!channel> all",
        "<@U1>",
        "<https://a.example|b>",
        "[b](https://a.example)",
        "@everyone",
        "https://a.b",
        "*b*",
        "evil.example",
        "www.evil.example",
        "mailto:a",
        "$m$",
    ],
)
def test_a_node_is_named_in_a_chat_without_markup(name: str, webhook: tuple[str, list[dict[str, Any]]]) -> None:
    url, posted = webhook
    start.notify(url, "meadow", f"Node {name} is slow")
    (body,) = posted
    for said in (body["text"], body["content"]):
        assert not set(said) & set("<>&*_~`[]|@#$") and "://" not in said
        assert not re.search(r"\w[.:][a-z]", said), "a link is made of a bare name, too"
    assert body["allowed_mentions"] == {"parse": []}

"""The page of `swarmnode chat --page`: a conversation with a model on this machine, answered piece by piece.

It listens on this machine only, and answers only requests for this machine as host that carry the token of the printed
address (as app/local/node_page.py). Nothing is kept: the browser holds the conversation and sends it with each message.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from swarmnode.app.daemon.clock import SystemClock
from swarmnode.app.dashboard.server import HEADERS, PageServer, has_token
from swarmnode.app.local.conversation import Speaker
from swarmnode.app.local.model_source import facts
from swarmnode.base.errors import SwarmnodeError, UsageError
from swarmnode.data.chat_template import ANSWERS, ChatTemplate
from swarmnode.data.message import Message
from swarmnode.run.manifest.recipe import parameters_of

MESSAGES_MAX = 400  # guess: no person writes more in a conversation
REQUEST_BYTES_MAX = 1 << 20  # derived: more text than any context holds that answers within a minute
TOKENS_MAX = 4096  # guess
TEMPERATURE_MAX = 100.0  # as `chat`
ROLES = ("system", "user", ANSWERS)


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """The first values of the page's controls. `system`: the system message, "" for none."""

    system: str = ""
    tokens: int = 256
    temperature: float = 0.7
    top_p: float = 0.95


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for an answer to the last of `messages`."""

    messages: tuple[Message, ...]
    tokens: int
    temperature: float
    seed: int


class ChatPage(PageServer):
    """Serves a conversation with the model that `read` opens: at first, and again when a conversation begins if
    `changes` (a run that still trains)."""

    def __init__(self, read: Callable[[], Speaker], token: str, settings: ChatSettings, *, changes: bool) -> None:
        super().__init__("chat.html", public=False, request_bytes_max=REQUEST_BYTES_MAX)
        self._read = read
        self._token = token
        self._settings = settings
        self._changes = changes
        self._opened: tuple[Speaker, ChatTemplate] | None = None
        self._turn = asyncio.Lock()

    def app(self) -> web.Application:
        """The routes; each POST needs the token."""
        app = super().app()
        app.router.add_post("/v1/begin", self._begin)
        app.router.add_post("/v1/say", self._say)
        return app

    async def _begin(self, request: web.Request) -> web.StreamResponse:
        """Which model talks: the newest, if the run goes on."""
        if not has_token(request, self._token):
            return _refused()
        try:
            async with self._turn:
                speaker, _ = await self._speaker(anew=self._changes)
        except SwarmnodeError as error:
            return web.json_response({"error": str(error)}, status=503)
        manifest = speaker.gathered.manifest
        about = {
            "run": manifest.name,
            "kind": speaker.gathered.kind,
            "parameters": parameters_of(manifest.model),
            "context": manifest.model.context,
            "changes": self._changes,
            **facts(speaker.gathered, SystemClock().unix_s()),
            **dataclasses.asdict(self._settings),
        }
        return web.json_response(about, headers={"Cache-Control": "no-store"})

    async def _say(self, request: web.Request) -> web.StreamResponse:
        """The answer as text, sent as it is made. A browser that goes away ends it."""
        if not has_token(request, self._token):
            return _refused()
        try:
            asked = asked_of(await request.read())
            async with self._turn:
                speaker, template = await self._speaker(anew=False)
                return await self._streamed(request, self._pieces(speaker, template, asked))
        except UsageError as error:
            return web.json_response({"error": str(error)}, status=400)
        except SwarmnodeError as error:
            return web.json_response({"error": str(error)}, status=503)

    def _pieces(self, speaker: Speaker, template: ChatTemplate, asked: Asked) -> Iterator[str]:
        from swarmnode.model.text_generation import Sampling

        sampling = Sampling(asked.temperature, 0, self._settings.top_p, asked.seed)
        return speaker.answer(template, asked.messages, asked.tokens, sampling)

    async def _streamed(self, request: web.Request, made: Iterator[str]) -> web.StreamResponse:
        """Raises SwarmnodeError if there is no first piece because of one."""
        first = await asyncio.to_thread(next, made, "")
        response = web.StreamResponse(headers={**HEADERS, "Cache-Control": "no-store"})
        response.content_type = "text/plain"
        response.charset = "utf-8"
        with contextlib.suppress(ConnectionError):  # the browser went away
            await response.prepare(request)
            piece = first
            while piece:
                await response.write(piece.encode(errors="replace"))
                piece = await asyncio.to_thread(next, made, "")
            await response.write_eof()
        return response

    async def _speaker(self, *, anew: bool) -> tuple[Speaker, ChatTemplate]:
        if self._opened is None or anew:
            speaker = await asyncio.to_thread(self._read)
            self._opened = (speaker, await asyncio.to_thread(speaker.template))
        return self._opened


def asked_of(body: bytes) -> Asked:
    """The request in `body`. Raises UsageError for anything that the page does not send."""
    try:
        tree = json.loads(body)
        messages = tuple(_message(each) for each in tree["messages"][: MESSAGES_MAX + 1])
        asked = Asked(messages, int(tree["tokens"]), float(tree["temperature"]), int(tree["seed"]))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        raise UsageError("not a conversation: reload the page") from None
    if not messages or messages[-1]["role"] != "user":
        raise UsageError("the last message is not the person's: reload the page")
    if len(messages) > MESSAGES_MAX:
        raise UsageError(f"more than {MESSAGES_MAX} messages: begin a new conversation")
    in_range = 1 <= asked.tokens <= TOKENS_MAX and 0 <= asked.temperature <= TEMPERATURE_MAX
    if not in_range or not 0 <= asked.seed < 1 << 53:
        raise UsageError(f"allowed are 1 to {TOKENS_MAX} tokens and a temperature of 0 to {TEMPERATURE_MAX:g}")
    return asked


def _message(value: Any) -> Message:
    role = value["role"]
    content = value["content"]
    if role not in ROLES or not isinstance(content, str):
        raise ValueError(role)
    return {"role": role, "content": content}


def _refused() -> web.Response:
    return web.json_response({"error": "open the address that `swarmnode chat` printed"}, status=401)

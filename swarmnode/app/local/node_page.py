"""The page of `swarmnode ui`: the node on this machine, for the person who runs it.

It listens on this machine only, and answers only requests for this machine as host. What it tells and does needs the
token, in a header that another site's page cannot send: no cookie, so nothing to forge a request with. The token is in
the address behind #, which browsers send nowhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

from aiohttp import web

from swarmnode.app.control import client
from swarmnode.app.control.verb import VERBS, arguments, to_json
from swarmnode.app.control.watch import watch
from swarmnode.app.daemon.empty_stages import empty_stages
from swarmnode.app.daemon.ready_file import page_here
from swarmnode.app.dashboard.server import HEADERS, PageServer, has_token
from swarmnode.app.dashboard.timeline import sentence
from swarmnode.app.local.swarm_view import headline, paused_text, trains, wait_text, with_us
from swarmnode.app.machine.receipt_store import checked
from swarmnode.base.errors import NoDaemon, SwarmnodeError, UsageError
from swarmnode.base.ids import PeerId, short
from swarmnode.base.metrics.events import tail
from swarmnode.base.untrusted_text import printable
from swarmnode.base.wire.report_pb2 import StatusReply
from swarmnode.train.node.limits import LIMIT_KINDS

BUTTONS = ("pause", "resume", "limit", "finish", "leave")
EVERY_S = 2.0
ENTRIES_MAX = 60
RECEIPTS_MAX = 100
OWN_WORDS = {"node.paused": "pauses", "node.resumed": "works again", "limits.changed": "has new limits"}


class NodePage(PageServer):
    """Serves the page of the node in `home`, which need not run. `config` is the path of its user's config file."""

    def __init__(self, home: Path, token: str, config: Path) -> None:
        super().__init__("ui.html", public=False)
        self._home = home
        self._token = token
        self._config = config

    def app(self) -> web.Application:
        """The routes; each POST needs the token."""
        app = super().app()
        app.router.add_post("/v1/{verb}", self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if not has_token(request, self._token):
            return web.json_response({"error": "open the address that `swarmnode ui` printed"}, status=401)
        verb = request.match_info["verb"]
        try:
            if verb == "watch":
                return await self._push(request)
            elif verb == "status":
                answer = self._shown(await asyncio.to_thread(client.status, self._home))
            elif verb == "record":
                answer = await asyncio.to_thread(record, self._home)
            elif verb in BUTTONS:
                given = arguments(VERBS[verb].from_json(await request.read()))
                answer = await asyncio.to_thread(client.ask, self._home, verb, **given)
            else:
                raise UsageError("no such verb")
        except SwarmnodeError as error:
            status = 404 if isinstance(error, NoDaemon) else 400 if isinstance(error, UsageError) else 503
            return web.json_response({"error": str(error)}, status=status)
        return web.json_response(answer, headers={"Cache-Control": "no-store"})

    async def _push(self, request: web.Request) -> web.StreamResponse:
        """A line of JSON for each status that the daemon pushes, until it ends or the browser goes. Raises as `watch`
        where none comes."""
        async with contextlib.aclosing(watch(self._home, EVERY_S)) as statuses:
            first = await anext(statuses)
            response = web.StreamResponse(headers={**HEADERS, "Content-Type": "application/x-ndjson"})
            await response.prepare(request)
            with contextlib.suppress(SwarmnodeError, ConnectionError):  # the browser asks again, and is told why
                await response.write(_line(self._shown(first)))
                async for status in statuses:
                    await response.write(_line(self._shown(status)))
        return response

    def _shown(self, reply: StatusReply) -> dict[str, Any]:
        """The daemon's status as JSON, with what `status` says of it in words, and speeds."""
        page = page_here(reply.run_id) or reply.page
        kinds = [{"name": name, "example": kind.example, "help": kind.help} for name, kind in LIMIT_KINDS.items()]
        return {
            **to_json(reply),
            "headline": "a meeting point of the run" if reply.trains_nothing else headline(reply),
            "paused": "" if reply.limits.running or not reply.limits.reason else paused_text(reply),
            "empty": empty_stages(reply),
            "trains": trains(reply),
            "waits": [wait_text(wait) for wait in reply.waits],
            "speed": {
                "tokens_total": reply.run_tokens_per_second,
                "tokens_given": with_us(reply),
            },
            "page": f"{page}node/{short(PeerId(reply.peer_id))}" if page else "",
            "kinds": kinds,
            "home": str(self._home),
            "config": str(self._config),
        }


def _line(shown: dict[str, Any]) -> bytes:
    return json.dumps(shown).encode() + b"\n"


def record(home: Path) -> dict[str, Any]:
    """The receipts of `home`, newest first, samples by day of their end, and what its log says. Raises LocalFault."""
    receipts = [receipt for receipt, fault in checked(home) if not fault]
    days = Counter[int]()
    for one in receipts:
        days[one.until_unix_s // 86_400] += one.samples
    newest = sorted(receipts, key=lambda one: -one.until_unix_s)[:RECEIPTS_MAX]
    rows = [{"client": r.client, "run": r.run_id, "samples": r.samples, "until": r.until_unix_s} for r in newest]
    return {
        "receipts": rows,
        "clients": len({one.client for one in receipts}),
        "samples": sum(days.values()),
        "days": sorted(days.items()),
        "entries": list(filter(None, map(_entry, reversed(tail(home / "events.jsonl")))))[:ENTRIES_MAX],
    }


def _entry(line: str) -> dict[str, str] | None:
    """A line of the log as the page shows it; None for one that it does not show."""
    try:
        row = json.loads(line)
        event = str(row["event"])
        level = str(row["level"])
        fields = row.get("fields") or {}
        if isinstance(changed := fields.get("changed"), dict):
            fields = {"changed": ", ".join(f"{key} {value}" for key, value in changed.items())}
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in fields.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    if event in OWN_WORDS:
        said = texts.get("reason") or texts.get("changed") or ""
        kind = "move"
        text = OWN_WORDS[event] + (f": {said}" if said else "")
    else:
        kind, text = sentence(event, level, texts) or ("", "")
    return {"ts": str(row.get("ts", "")), "kind": kind, "level": level, "text": printable(text)} if text else None

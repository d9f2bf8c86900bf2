"""A fake metadata service that imitates AWS, GCP and Azure at once, follows commands, and fails as they do."""

from __future__ import annotations

import asyncio
import datetime
import email.utils
import json
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web

from swarmnode.app.cloud.watch import GCP_INSTANCE
from swarmnode.base.errors import UsageError
from swarmnode.base.ids import digest
from swarmnode.base.ports import Clock

MACHINE = "node-0"
TOKEN_TTL_MAX_S = 21_600  # AWS
HANG_S = 3600.0
SAYINGS = {
    "preempt": "the machine will be taken away after --notice",
    "rebalance": "AWS: it is at elevated risk",
    "migrate": "GCP: it moves to another host, live",
    "maintenance": "GCP: it is stopped for maintenance",
    "freeze": "Azure: it freezes for some seconds",
    "other": "Azure: another machine of the scale set will be taken away",
    "rubbish": "from now on answer nonsense",
    "forbid": "from now on answer 403",
    "hang": "from now on answer nothing",
    "recover": "answer properly again",
}


@dataclass(slots=True)
class CloudState:
    """The current state of the fake clouds. `at` is the Unix time at which the machine is taken away."""

    at: float | None = None
    rebalance_at: float | None = None
    maintenance: str = "NONE"
    events: list[dict[str, object]] = field(default_factory=list)
    incarnation: int = 1
    trouble: str = ""
    tokens: dict[str, float] = field(default_factory=dict)  # token -> Unix time of expiry
    approved: list[str] = field(default_factory=list)
    asked: int = 0


class FakeMetadata:
    """Serve with `start`, then change its behaviour with `say`; `close` at the end."""

    def __init__(self, clock: Clock, machine: str = MACHINE, notice_s: float = 120.0) -> None:
        self.played = CloudState()
        self.machine = machine
        self.notice_s = notice_s
        self.note: Callable[[str], None] = lambda text: None
        self._clock = clock
        self._changed = asyncio.Condition()
        self._runner: web.AppRunner | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Start serving; return the base URL. Raises UsageError if the port is not available."""
        application = web.Application()
        application.router.add_put("/latest/api/token", self._token)
        application.router.add_get("/latest/meta-data/spot/instance-action", self._aws_action)
        application.router.add_get("/latest/meta-data/events/recommendations/rebalance", self._aws_rebalance)
        application.router.add_get(f"/{GCP_INSTANCE}/preempted", self._gcp_preempted)
        application.router.add_get(f"/{GCP_INSTANCE}/maintenance-event", self._gcp_maintenance)
        application.router.add_get("/metadata/instance/compute/name", self._azure_name)
        application.router.add_get("/metadata/scheduledevents", self._azure_events)
        application.router.add_post("/metadata/scheduledevents", self._azure_start)
        application.router.add_post("/say/{what}", self._say)
        application.middlewares.append(self._trouble)
        self._runner = web.AppRunner(application, shutdown_timeout=0.5)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            await self.close()
            raise UsageError(f"--port {port}: {host}:{port} is not available: {error.strerror}") from None
        bound = self._runner.addresses[0]
        return f"http://{bound[0]}:{bound[1]}"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def say(self, what: str) -> None:
        """Apply one of SAYINGS from now on."""
        played = self.played
        now = self._clock.unix_s()
        match what:
            case "preempt":
                played.at = now + self.notice_s
                self._event("Preempt", self.machine, played.at)
            case "rebalance":
                played.rebalance_at = now
            case "migrate":
                played.maintenance = "MIGRATE_ON_HOST_MAINTENANCE"
            case "maintenance":
                played.maintenance = "TERMINATE_ON_HOST_MAINTENANCE"
            case "freeze":
                self._event("Freeze", self.machine, now + 900.0)
            case "other":
                self._event("Preempt", f"another-than-{self.machine}", now + self.notice_s)
            case "rubbish" | "forbid" | "hang":
                played.trouble = what
            case "recover":
                played.trouble = ""
            case _:
                raise UsageError(f"unknown command {what[:40]!r}; use one of {', '.join(SAYINGS)}")
        self.note(f"says {what}: {SAYINGS[what]}")
        async with self._changed:
            self._changed.notify_all()

    def _event(self, kind: str, machine: str, at: float) -> None:
        serial = len(self.played.events)
        self.played.incarnation += 1
        self.played.events.append(
            {
                "EventId": digest("event", machine, serial).hex()[:32].upper(),
                "EventStatus": "Scheduled",
                "EventType": kind,
                "ResourceType": "VirtualMachine",
                "Resources": [machine],
                "NotBefore": email.utils.formatdate(at, usegmt=True),
                "Description": "",
                "EventSource": "Platform",
                "DurationInSeconds": -1,
            }
        )

    # ---- requests

    @web.middleware
    async def _trouble(self, request: web.Request, handler: Callable[[web.Request], object]) -> web.StreamResponse:
        if not request.path.startswith("/say/"):
            self.played.asked += 1
            match self.played.trouble:
                case "rubbish":
                    return web.Response(text="<html>captive portal</html>", content_type="text/html")
                case "forbid":
                    return web.Response(status=403, text="Forbidden")
                case "hang":
                    await self._changes(lambda: self.played.trouble != "hang", HANG_S)
        answer = await handler(request)  # type: ignore[misc]
        assert isinstance(answer, web.StreamResponse)
        return answer

    async def _say(self, request: web.Request) -> web.Response:
        try:
            await self.say(request.match_info["what"])
        except UsageError as error:
            return web.Response(status=400, text=f"{error}\n")
        return web.Response(text="said\n")

    async def _changes(self, condition: Callable[[], bool], timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            pass

    async def _token(self, request: web.Request) -> web.Response:
        ttl = request.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
        if "X-Forwarded-For" in request.headers:
            return web.Response(status=403)
        if not ttl.isdigit() or not 1 <= int(ttl) <= TOKEN_TTL_MAX_S:
            return web.Response(status=400)
        token = digest("token", len(self.played.tokens)).hex()
        self.played.tokens[token] = self._clock.unix_s() + int(ttl)
        return web.Response(text=token)

    def _admitted(self, request: web.Request) -> bool:
        token = request.headers.get("X-aws-ec2-metadata-token", "")
        return self.played.tokens.get(token, 0.0) > self._clock.unix_s()

    async def _aws_action(self, request: web.Request) -> web.Response:
        if not self._admitted(request):
            return web.Response(status=401)
        if self.played.at is None:
            return web.Response(status=404)
        return web.json_response({"action": "terminate", "time": iso(self.played.at)})

    async def _aws_rebalance(self, request: web.Request) -> web.Response:
        if not self._admitted(request):
            return web.Response(status=401)
        if self.played.rebalance_at is None:
            return web.Response(status=404)
        return web.json_response({"noticeTime": iso(self.played.rebalance_at)})

    async def _gcp_preempted(self, request: web.Request) -> web.Response:
        return await self._gcp(request, lambda: "FALSE" if self.played.at is None else "TRUE")

    async def _gcp_maintenance(self, request: web.Request) -> web.Response:
        return await self._gcp(request, lambda: self.played.maintenance)

    async def _gcp(self, request: web.Request, value: Callable[[], str]) -> web.Response:
        headers = {"Metadata-Flavor": "Google"}
        if request.headers.get("Metadata-Flavor") != "Google":
            return web.Response(status=403, text="Missing Metadata-Flavor:Google header.", headers=headers)
        if request.query.get("wait_for_change", "").lower() == "true":
            known = request.query.get("last_etag") or _etag(value())
            timeout_s = float(request.query.get("timeout_sec", HANG_S))
            await self._changes(lambda: _etag(value()) != known, timeout_s)
        return web.Response(text=value(), headers={**headers, "ETag": _etag(value())})

    async def _azure_name(self, request: web.Request) -> web.Response:
        if request.headers.get("Metadata", "").lower() != "true":
            return web.Response(status=400)
        return web.Response(text=self.machine)

    async def _azure_events(self, request: web.Request) -> web.Response:
        if request.headers.get("Metadata", "").lower() != "true" or "api-version" not in request.query:
            return web.json_response({"error": "Bad request. Required metadata header not specified"}, status=400)
        return web.json_response({"DocumentIncarnation": self.played.incarnation, "Events": self.played.events})

    async def _azure_start(self, request: web.Request) -> web.Response:
        try:
            wanted = [start["EventId"] for start in json.loads(await request.text())["StartRequests"]]
        except (ValueError, KeyError, TypeError):
            return web.Response(status=400)
        self.played.approved += wanted
        for event in self.played.events:
            if event["EventId"] in wanted:
                event["EventStatus"] = "Started"
                event["NotBefore"] = ""
                self.note(f"Azure is told that {event['EventId']} may begin")
        return web.Response()


def iso(unix_s: float) -> str:
    """A time in AWS's format: 2026-01-02T03:04:05Z."""
    return datetime.datetime.fromtimestamp(unix_s, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _etag(value: str) -> str:
    return digest("etag", value).hex()[:16]

"""Watch a cloud for notices that this machine will be taken away; train/node/notice.py interprets them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from swarmnode.app.cloud.metadata_client import Metadata, Response
from swarmnode.base.errors import RemoteFault, Unavailable
from swarmnode.base.ports import Clock, Telemetry
from swarmnode.net.membership.liveness import AGAIN_S, SMALL_CALL_S
from swarmnode.train.node import notice
from swarmnode.train.node.notice import Notice

TIMEOUT_S = SMALL_CALL_S  # these services answer in milliseconds
PAUSE_MAX_S = AGAIN_S  # longest pause between requests to a failing service
PAUSE_GROWTH = 2.0

AWS_PERIOD_S = 5.0  # AWS: "we recommend that you check every 5 seconds"
AWS_TOKEN_TTL_S = 300  # of 1 to 21600
AWS_TOKEN_SHARE = 0.75  # share of its time to live after which a new token is fetched
GCP_HANG_S = 60.0  # how long one request waits for a change
GCP_PERIOD_S = 1.0  # between two requests: an emulator may answer at once
AZURE_PERIOD_S = 1.0  # Azure: "once per second"
AZURE_FIRST_S = 130.0  # Azure: the first answer may take two minutes
AZURE_EVENTS = "metadata/scheduledevents?api-version=2020-07-01"
AZURE_NAME = "metadata/instance/compute/name?api-version=2021-02-01&format=text"
AZURE_MACHINE = re.compile(r"[\w.-]{1,128}\Z")
AZURE_HEADERS = {"Metadata": "true"}
GCP_HEADERS = {"Metadata-Flavor": "Google"}
GCP_INSTANCE = "computeMetadata/v1/instance"

Give = Callable[[Notice], object]


@dataclass
class Watcher:
    """Watches one cloud's metadata service, which is asked every `period_s` seconds."""

    metadata: Metadata
    clock: Clock
    telemetry: Telemetry
    period_s: float
    source: ClassVar[str]

    async def run(self, give: Give) -> None:
        """Give every notice to `give`, until cancelled."""
        await asking(lambda: self._look(give), self.period_s, self.telemetry, self.source)

    async def acknowledge(self, told: Notice) -> bool:
        """Tell the cloud that this machine is ready to go now; return whether it takes such a word."""
        return False

    async def _look(self, give: Give) -> None:
        """Ask once."""


@dataclass
class Aws(Watcher):
    """EC2 spot: the interruption notice and the rebalance recommendation, with IMDSv2 tokens."""

    period_s: float = AWS_PERIOD_S
    source = "aws"
    _token: str = ""
    _token_until: float = 0.0

    async def _look(self, give: Give) -> None:
        action = await self._get("latest/meta-data/spot/instance-action")
        event = notice.aws_action(action.status, action.body, self.clock.unix_s())
        if event is None:
            advice = await self._get("latest/meta-data/events/recommendations/rebalance")
            event = notice.aws_rebalance(advice.status, advice.body)
        if event is not None:
            give(event)

    async def _get(self, path: str) -> Response:
        for _ in range(2):
            token = await self.token()
            headers = {"X-aws-ec2-metadata-token": token}
            answer = await self.metadata.ask("GET", path, headers, timeout_s=TIMEOUT_S)
            if answer.status != 401:
                break
            self._token = ""  # expired early
        return answer

    async def token(self) -> str:
        """A session token, kept for part of its time to live. Raises RemoteFault if none is given."""
        now = asyncio.get_running_loop().time()
        if not self._token or now >= self._token_until:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(AWS_TOKEN_TTL_S)}
            answer = await self.metadata.ask("PUT", "latest/api/token", headers, timeout_s=TIMEOUT_S)
            token = answer.body.strip()
            if answer.status != 200 or not token.isascii() or not token.isprintable() or not token:
                raise RemoteFault(f"api/token answers HTTP {answer.status} and no token: is IMDS switched off?")
            self._token = token
            self._token_until = now + AWS_TOKEN_SHARE * AWS_TOKEN_TTL_S
        return self._token


@dataclass
class Gcp(Watcher):
    """Compute Engine: `preempted` and `maintenance-event`, each by a request that waits up to `hang_s` for a change."""

    period_s: float = GCP_PERIOD_S
    hang_s: float = GCP_HANG_S
    source = "gcp"

    async def run(self, give: Give) -> None:
        async with asyncio.TaskGroup() as tasks:
            for key, read in (("preempted", notice.gcp_preempted), ("maintenance-event", notice.gcp_maintenance)):
                tasks.create_task(self._watch(key, read, give))

    async def _watch(self, key: str, read: Callable[[int, str], Notice | None], give: Give) -> None:
        etag = ""

        async def look() -> None:
            nonlocal etag
            # The first request is answered at once, later ones when the value no longer matches `etag`.
            wait = f"?wait_for_change=true&timeout_sec={self.hang_s:.0f}&last_etag={etag}" if etag else ""
            timeout_s = TIMEOUT_S + (self.hang_s if etag else 0.0)
            known = etag
            etag = ""  # after a failure ask again without waiting
            answer = await self.metadata.ask("GET", f"{GCP_INSTANCE}/{key}{wait}", GCP_HEADERS, timeout_s=timeout_s)
            if answer.headers.get("metadata-flavor") != "Google":
                raise RemoteFault(f"instance/{key} is not answered by Google's metadata service")
            event = read(answer.status, answer.body)
            if event is not None and answer.headers.get("etag", "") != known:
                give(event)
            etag = answer.headers.get("etag", "")
            if not etag.isascii() or not etag.replace("-", "").replace("_", "").isalnum():
                etag = ""

        await asking(look, self.period_s, self.telemetry, self.source)


@dataclass
class Azure(Watcher):
    """Scheduled Events, filtered for this machine: a scale set announces the events of all its machines."""

    period_s: float = AZURE_PERIOD_S
    source = "azure"
    _machine: str = ""
    _first: bool = True

    async def acknowledge(self, told: Notice) -> bool:
        if not told.id:
            return False
        body = json.dumps({"StartRequests": [{"EventId": told.id}]})
        answer = await self.metadata.ask("POST", AZURE_EVENTS, AZURE_HEADERS, timeout_s=TIMEOUT_S, body=body)
        if answer.status != 200:
            raise RemoteFault(f"scheduledevents answers HTTP {answer.status} to our readiness")
        return True

    async def _look(self, give: Give) -> None:
        if not self._machine:
            answer = await self.metadata.ask("GET", AZURE_NAME, AZURE_HEADERS, timeout_s=TIMEOUT_S)
            if answer.status != 200 or not AZURE_MACHINE.match(answer.body.strip()):
                raise RemoteFault(f"compute/name answers HTTP {answer.status}: this machine's name is unknown")
            self._machine = answer.body.strip()
        timeout_s = AZURE_FIRST_S if self._first else TIMEOUT_S
        answer = await self.metadata.ask("GET", AZURE_EVENTS, AZURE_HEADERS, timeout_s=timeout_s)
        self._first = False
        event, _ = notice.azure_events(answer.status, answer.body, self._machine, self.clock.unix_s())
        if event is not None:
            give(event)


async def asking(look: Callable[[], Awaitable[None]], period_s: float, telemetry: Telemetry, source: str) -> None:
    """Call `look` every `period_s` until cancelled. A failing service is asked ever more rarely; each reason is logged
    once."""
    pause_s = period_s
    told = ""
    while True:
        try:
            await look()
        except (RemoteFault, Unavailable) as error:
            if str(error) != told:
                told = str(error)
                telemetry.event("notice.unreadable", level="warning", source=source, reason=told)
            pause_s = min(PAUSE_MAX_S, PAUSE_GROWTH * pause_s)
        else:
            pause_s = period_s
        await asyncio.sleep(pause_s)


DMI = Path("/sys/class/dmi/id")
DMI_FIELDS = ("sys_vendor", "bios_vendor", "board_vendor", "product_name", "chassis_asset_tag")
AZURE_ASSET_TAG = "7783-7084-3265-9085-8269-3286-77"  # Hyper-V at home has Microsoft's name but not this tag
CLOUDS = ("aws", "gcp", "azure")


def read_dmi(folder: Path = DMI) -> dict[str, str]:
    """The firmware's description of the machine; empty if the system offers none."""
    dmi = {}
    for field in DMI_FIELDS:
        try:
            dmi[field] = (folder / field).read_text(errors="replace").strip()
        except OSError:
            continue
    return dmi


def by_dmi(dmi: Mapping[str, str]) -> str | None:
    """The cloud named by the firmware, or None."""
    if dmi.get("chassis_asset_tag") == AZURE_ASSET_TAG:
        return "azure"
    vendors = [dmi.get(field, "").lower() for field in DMI_FIELDS]
    if any(vendor.startswith("amazon") for vendor in vendors):
        return "aws"
    if any(vendor.startswith("google") for vendor in vendors):
        return "gcp"
    return None


async def by_asking(metadata: Metadata) -> str | None:
    """The first of CLOUDS that answers at `metadata` within TIMEOUT_S, or None."""
    async with asyncio.TaskGroup() as tasks:
        asked = [(cloud, tasks.create_task(_answers(metadata, cloud))) for cloud in CLOUDS]
    return next((cloud for cloud, answer in asked if answer.result()), None)


async def _answers(metadata: Metadata, cloud: str) -> bool:
    method, path, headers = {
        "aws": ("PUT", "latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}),
        "gcp": ("GET", f"{GCP_INSTANCE}/preempted", GCP_HEADERS),
        "azure": ("GET", AZURE_NAME, AZURE_HEADERS),
    }[cloud]
    try:
        answer = await metadata.ask(method, path, headers, timeout_s=TIMEOUT_S)
    except (RemoteFault, Unavailable):
        return False
    return answer.status == 200


def watcher_of(cloud: str, metadata: Metadata, clock: Clock, telemetry: Telemetry) -> Watcher:
    """The watcher for one of CLOUDS."""
    kinds: Mapping[str, Callable[[Metadata, Clock, Telemetry], Watcher]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}
    return kinds[cloud](metadata, clock, telemetry)

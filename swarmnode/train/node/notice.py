"""Notices that this node must go: parsers for each source, and the inbox that collects the notices.

Pure but for the inbox, which waits. Formats: AWS EC2 user guide (spot interruption notices, rebalance recommendations),
Google Compute Engine (metadata `preempted` and `maintenance-event`), Azure (Scheduled Events 2020-07-01), SLURM
(`--signal`, preemption), Kubernetes (termination of pods).
"""

from __future__ import annotations

import asyncio
import datetime
import email.utils
import enum
import json
import math
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from swarmnode.base.errors import RemoteFault

GRACE_S = 30.0  # Kubernetes' terminationGracePeriodSeconds and SLURM's KillWait by default; systemd gives 90
AWS_NOTICE_S = 120.0  # AWS: two minutes, best effort
GCP_NOTICE_S = 30.0  # GCP: up to 30 s between the notice and the machine's end
GCP_MAINTENANCE_S = 60.0  # GCP: 60 s before the event (an hour for machines with GPUs)
AZURE_NOTICE_S = 30.0  # Azure: Preempt events are announced at least 30 s before
BATCH_NOTICE_S = 60.0  # SLURM's --signal without a time
STARTED_S = 5.0  # guess: what is left when the event has begun already
SAME_S = 0.5  # guess: the same event asked about again gives a deadline that differs by so much at most
EARLY_S = AWS_NOTICE_S  # derived: a machine that goes later than by the longest such notice trains on until then
TEXT_CHARS_MAX = 120


class NoticeKind(enum.StrEnum):
    """The action that a notice asks for."""

    ADVICE = "advice"  # the machine may go soon: be ready, train on
    LEAVE = "leave"  # somebody wants this node to leave; the machine stays
    STOP = "stop"  # the whole run stops here: nobody is left to hand anything to
    PREEMPT = "preempt"  # the machine or the process will be taken away


@dataclass(frozen=True, slots=True)
class Notice:
    """`deadline_s` is how long from now this process has; `id` is what the source calls the event, to acknowledge."""

    source: str
    kind: NoticeKind
    deadline_s: float
    reason: str
    id: str = ""


class Notices:
    """The inbox. The first notice that says go begins the leaving; later ones can only shorten what is left of it."""

    def __init__(self) -> None:
        self.told: Notice | None = None
        self.until = math.inf  # loop time at which this process may be gone
        self._advised: Callable[[Notice], None] = lambda notice: None
        self._advice: set[tuple[str, str]] = set()
        self._changed = asyncio.Event()
        self._limits: list[asyncio.Timeout] = []
        self._followers: list[Notices] = []

    def follower(self) -> Notices:
        """An inbox that gets what this one gets: of a part of this machine."""
        follower = Notices()
        self._followers.append(follower)
        if self.told is not None:
            follower.give(replace(self.told, deadline_s=self.left_s()))
        return follower

    def on_advice(self, advised: Callable[[Notice], None]) -> None:
        """Call `advised` with each new notice that this machine may be taken away."""
        self._advised = advised

    def give(self, notice: Notice) -> bool:
        """Take in a notice; True when it changes what this node does."""
        for follower in self._followers:
            follower.give(notice)
        if notice.kind is NoticeKind.ADVICE:
            new = self.told is None and (notice.source, notice.reason) not in self._advice
            if new:
                self._advice.add((notice.source, notice.reason))
                self._advised(notice)
            return new
        until = asyncio.get_running_loop().time() + notice.deadline_s
        worse = self.told is None or (self.told.kind is not NoticeKind.PREEMPT and notice.kind is NoticeKind.PREEMPT)
        if not worse and until > self.until - SAME_S:
            return False
        self.until = min(self.until, until)
        if worse:
            self.told = notice
        for limit in self._limits:
            limit.reschedule(min(limit.when() or math.inf, self.until))
        self._changed.set()
        return True

    def leave(self, reason: str = "told to go", kind: NoticeKind = NoticeKind.LEAVE) -> None:
        """Take in a request that this node leave."""
        self.give(Notice("control", kind, GRACE_S, reason))

    async def wait(self) -> Notice:
        """The notice to leave by, returned when it is time to begin."""
        loop = asyncio.get_running_loop()
        while True:
            begin_s = self.until - EARLY_S - loop.time()
            if self.told is not None and begin_s <= 0.0:
                return self.told
            self._changed.clear()
            try:
                async with asyncio.timeout(None if math.isinf(begin_s) else begin_s):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def left_s(self) -> float:
        """Seconds this process has, 0 at least."""
        return max(0.0, self.until - asyncio.get_running_loop().time())

    def limit(self, seconds: float) -> _Limit:
        """`async with notices.limit(s)`: raises TimeoutError after `seconds`, or when a later notice says sooner."""
        return _Limit(self._limits, min(asyncio.get_running_loop().time() + seconds, self.until))


class _Limit:
    """An asyncio.timeout that a new notice shortens."""

    def __init__(self, limits: list[asyncio.Timeout], until: float) -> None:
        self._limits = limits
        self._timeout = asyncio.timeout_at(until)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._limits.append(self._timeout)

    async def __aexit__(self, *failure: Any) -> None:
        self._limits.remove(self._timeout)
        await self._timeout.__aexit__(*failure)


# ---- AWS


def aws_action(status: int, body: str, now_unix_s: float) -> Notice | None:
    """Parse the answer to GET latest/meta-data/spot/instance-action; None when there is no notice. Raises RemoteFault
    for a malformed answer."""
    if status == 404:
        return None
    table = _table(status, body, "spot/instance-action")
    action = _text(table, "action", "spot/instance-action")
    if action == "hibernate":  # begins with the notice itself
        return Notice("aws", NoticeKind.PREEMPT, STARTED_S, "spot instance hibernates now")
    if action not in ("terminate", "stop"):
        raise RemoteFault(f"spot/instance-action says {_cut(action)}; terminate, stop or hibernate belongs there")
    left_s = _moment(_text(table, "time", "spot/instance-action")) - now_unix_s
    left_s = min(left_s, AWS_NOTICE_S) if left_s >= 0.0 else STARTED_S  # a clock that is slow gives no more time
    return Notice("aws", NoticeKind.PREEMPT, left_s, f"spot instance: {action} at {table['time']}")


def aws_rebalance(status: int, body: str) -> Notice | None:
    """Parse the answer to GET latest/meta-data/events/recommendations/rebalance; None when there is no recommendation.
    Raises RemoteFault for a malformed answer."""
    if status == 404:
        return None
    table = _table(status, body, "recommendations/rebalance")
    at = _text(table, "noticeTime", "recommendations/rebalance")
    _moment(at)
    return Notice("aws", NoticeKind.ADVICE, AWS_NOTICE_S, f"spot instance at elevated risk since {at}")


# ---- Google Compute Engine


def gcp_preempted(status: int, body: str) -> Notice | None:
    """Parse the answer to GET instance/preempted, TRUE or FALSE; None for FALSE. Raises RemoteFault for a malformed
    answer."""
    match _plain(status, body, "instance/preempted"):
        case "FALSE":
            return None
        case "TRUE":
            return Notice("gcp", NoticeKind.PREEMPT, GCP_NOTICE_S, "instance is being preempted")
        case other:
            raise RemoteFault(f"instance/preempted says {_cut(other)}; TRUE or FALSE belongs there")


def gcp_maintenance(status: int, body: str) -> Notice | None:
    """Parse the answer to GET instance/maintenance-event. A live migration requires no action and gives advice only.
    Raises RemoteFault for a malformed answer."""
    match _plain(status, body, "instance/maintenance-event"):
        case "NONE":
            return None
        case "MIGRATE_ON_HOST_MAINTENANCE":
            return Notice("gcp", NoticeKind.ADVICE, GCP_MAINTENANCE_S, "instance migrates to another host")
        case "TERMINATE_ON_HOST_MAINTENANCE":
            return Notice("gcp", NoticeKind.PREEMPT, GCP_MAINTENANCE_S, "instance is stopped for host maintenance")
        case other:
            raise RemoteFault(f"instance/maintenance-event says {_cut(other)}; NONE, MIGRATE_… or TERMINATE_… is due")


# ---- Azure


def azure_events(status: int, body: str, machine: str, now_unix_s: float) -> tuple[Notice | None, int]:
    """Parse the answer to GET metadata/scheduledevents.

    Returns the most urgent event of `machine`, and the number of events for other machines. Raises RemoteFault for a
    malformed answer.
    """
    events = _table(status, body, "scheduledevents").get("Events")
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise RemoteFault("scheduledevents without a list of Events")
    ours = [event for event in events if _is_ours(event, machine)]
    notices = [notice for event in ours if (notice := _azure_event(event, now_unix_s)) is not None]
    notices.sort(key=lambda notice: (notice.kind is not NoticeKind.PREEMPT, notice.deadline_s, notice.id))
    return (notices[0] if notices else None), len(events) - len(ours)


def _is_ours(event: Mapping[str, Any], machine: str) -> bool:
    resources = event.get("Resources")
    if not isinstance(resources, list):
        raise RemoteFault("scheduled event without a list of Resources")
    return any(isinstance(name, str) and name.lower() == machine.lower() for name in resources)


def _azure_event(event: Mapping[str, Any], now_unix_s: float) -> Notice | None:
    what = _text(event, "EventType", "scheduled event")
    state = _text(event, "EventStatus", "scheduled event")
    if state not in ("Scheduled", "Started"):  # completed, canceled
        return None
    left_s = STARTED_S
    if state == "Scheduled":
        left_s = AZURE_NOTICE_S
        if not_before := str(event.get("NotBefore") or ""):
            left_s = max(STARTED_S, _moment(not_before, email.utils.parsedate_to_datetime) - now_unix_s)
    kind = NoticeKind.ADVICE if what == "Freeze" else NoticeKind.PREEMPT
    return Notice("azure", kind, left_s, f"scheduled event: {_cut(what)}, {state}", str(event.get("EventId", "")))


# ---- signals


def of_signal(number: int, environment: Mapping[str, str], grace_s: float, now_unix_s: float) -> Notice:
    """The notice for signal `number`. `grace_s`: the seconds between SIGTERM and SIGKILL."""
    name = signal.Signals(number).name
    if number == signal.SIGINT:
        return Notice("signal", NoticeKind.LEAVE, grace_s, "Ctrl-C")
    if "SLURM_JOB_ID" in environment:
        if number == signal.SIGTERM:
            return Notice("slurm", NoticeKind.PREEMPT, grace_s, f"{name}: job is preempted, cancelled or out of time")
        return Notice("slurm", NoticeKind.PREEMPT, _slurm_left_s(environment, now_unix_s), f"{name}: job ends soon")
    if number == signal.SIGUSR1:
        return Notice("signal", NoticeKind.PREEMPT, BATCH_NOTICE_S, name)
    if "KUBERNETES_SERVICE_HOST" in environment:
        return Notice("kubernetes", NoticeKind.PREEMPT, grace_s, f"{name}: the pod is terminated")
    return Notice("signal", NoticeKind.LEAVE, grace_s, name)


def _slurm_left_s(environment: Mapping[str, str], now_unix_s: float) -> float:
    """Seconds until SLURM_JOB_END_TIME (23.02 and later), or the default of --signal without a time."""
    try:
        left_s = float(environment["SLURM_JOB_END_TIME"]) - now_unix_s
    except (KeyError, ValueError):
        return BATCH_NOTICE_S
    return left_s if 0.0 < left_s < 86_400.0 else BATCH_NOTICE_S


# ---- what is read


def _plain(status: int, body: str, what: str) -> str:
    if status != 200:
        raise RemoteFault(f"{what} answers HTTP {status}")
    return body.strip()


def _table(status: int, body: str, what: str) -> Mapping[str, Any]:
    try:
        table = json.loads(_plain(status, body, what))
    except (ValueError, RecursionError):
        raise RemoteFault(f"{what} says {_cut(body)}; JSON belongs there") from None
    if not isinstance(table, dict):
        raise RemoteFault(f"{what} says {_cut(body)}; a JSON object belongs there")
    return table


def _text(table: Mapping[str, Any], key: str, what: str) -> str:
    value = table.get(key)
    if not isinstance(value, str):
        raise RemoteFault(f"{what} without {key}")
    return value


def _moment(text: str, read: Callable[[str], datetime.datetime] = datetime.datetime.fromisoformat) -> float:
    """A time in UTC as Unix seconds: ISO 8601, unless `read` reads something else."""
    try:
        moment = read(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()
    except (ValueError, OverflowError):
        raise RemoteFault(f"{_cut(text)} is not a time") from None


def _cut(text: str) -> str:
    return repr(text if len(text) <= TEXT_CHARS_MAX else text[:TEXT_CHARS_MAX] + "…")

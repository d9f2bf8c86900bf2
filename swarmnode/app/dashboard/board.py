"""The coordinator's current state: nodes, rounds, timeline, totals. Plain bookkeeping that never waits.

`Board` takes verified records and nodes' reports, whose sizes, numbers and texts base/bounds/table.py has bounded when
they came. A report is its node's own claim. `take_changes` returns what is new since its last call, to send to
the page and to write to the history.
"""

from __future__ import annotations

import contextlib
import re
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from swarmnode.app.dashboard.timeline import TEXT_CHARS_MAX, TimelineEntry, sentence
from swarmnode.app.dashboard.totals import CREDITED, KEYS, Contribution, Ledger, counts_of
from swarmnode.base.errors import RemoteFault
from swarmnode.base.identity import friendly_name
from swarmnode.base.ids import PeerId, RunId, machine_of, short
from swarmnode.base.metrics.event import LEVELS
from swarmnode.base.token_rate import RATE_SPAN_S
from swarmnode.base.wire import call_pb2, record_pb2, report_pb2
from swarmnode.base.wire.report_pb2 import StatusReply
from swarmnode.model.split import stages_of
from swarmnode.net.membership.liveness import TRIES
from swarmnode.run.manifest import Manifest
from swarmnode.train.pipeline.feeder import VALIDATORS

_ID = re.compile(r"\b(12D3Koo[1-9A-HJ-NP-Za-km-z]{45}|[1-9A-HJ-NP-Za-km-z]{8})\b")
_ADDRESS = re.compile(r"/(?:ip4|ip6|dns[46]?)/\S+")


def named(text: str, name_of: Callable[[str], str | None]) -> str:
    """Replace peer ids in `text`, whole or their last eight characters, by names. Unknown ids are shortened."""
    return _ID.sub(lambda match: name_of(match[0]) or match[0][-8:], text)


def brief(reason: str) -> str:
    """Shorten an error's text: without addresses and the details of failed dials, which only its node can use."""
    return _ADDRESS.sub("its address", reason.partition(": failed to dial")[0])


def number(text: str | None) -> float | None:
    """Parse a finite number. None when `text` is not one."""
    try:
        value = float(text) if text is not None else None
    except ValueError:
        return None
    return value if value is not None and abs(value) != float("inf") and value == value else None


NODES_MAX = 20_000  # derived: members and those remembered as gone: 1 GB at 51 kB of a full report (measured)
NEWS_S = 60.0  # guess: what is older is no news: a node that left, a fault of the same kind, a report
ENTRIES_SHOWN = 120  # of the timeline; the history has more
ROUNDS_KEPT = 400
CURVE_POINTS = 1920  # one for each column of a full-HD screen
AGREEING_MIN = 3  # the fewest of which one may be wrong
NEAR_VALIDATIONS = -(-AGREEING_MIN // VALIDATORS)  # derived: periods in which so many nodes report a loss
NAME_CHARS_MAX = 40
LATE_S = 86_400.0  # an event first reported later than this is shown with this age
SILENT_AFTER = TRIES  # failed calls in a row
LOSS_MAX = 1e4
NO_RUN = RunId("")  # no receipt belongs to it

LIVING = (
    record_pb2.NODE_STATE_JOINING,
    record_pb2.NODE_STATE_SYNCING,
    record_pb2.NODE_STATE_TRAINING,
    record_pb2.NODE_STATE_DRAINING,
    record_pb2.NODE_STATE_PAUSED,
)


@dataclass(slots=True)
class NodeView:
    """The coordinator's view of one node. Times are Unix seconds; `heard_s` is when its newest record came."""

    peer: PeerId
    stage: int = 0
    state: int = record_pb2.NODE_STATE_UNSPECIFIED
    sequence: int = -1
    speed: float = 0.0
    queue: int = 0
    round: int = 0
    samples: int = 0
    version: str = ""
    text: str = ""  # digest of its copy of the run's text, hex; empty: it has none
    joined_s: float = 0.0
    expires_s: float = 0.0
    heard_s: float = 0.0
    addresses: tuple[str, ...] = ()
    name: str = ""
    incarnation: int = 0
    cursor: int = 0
    receipts_after: int = 0
    status: StatusReply | None = None
    answered_s: float = 0.0
    failures: int = 0
    rtt_s: float | None = None
    busy: float | None = None  # share of the time between its last two reports in which it computed
    skew_s: float | None = None
    links: tuple[report_pb2.LinkReport, ...] = ()
    why: str = ""
    resumes_s: float = 0.0  # while it is paused: when it expects to come back; 0: not known
    gone_s: float | None = None
    gone_why: str = ""

    @property
    def living(self) -> bool:
        return self.gone_s is None and self.state in LIVING

    @property
    def serving(self) -> bool:
        return self.gone_s is None and self.state == record_pb2.NODE_STATE_TRAINING

    @property
    def asleep(self) -> bool:
        """Whether it is paused, and answers."""
        paused = self.state == record_pb2.NODE_STATE_PAUSED
        return self.gone_s is None and paused and self.failures < SILENT_AFTER

    @property
    def label(self) -> str:
        return self.name or friendly_name(machine_of(self.peer))

    def take_record(self, record: record_pb2.Record, now_s: float) -> None:
        """Take in its newest record. A node that was gone is back, unless the record says that it left."""
        left = record.state == record_pb2.NODE_STATE_LEFT
        if left and self.gone_s is None:
            self.gone_s = now_s
            self.gone_why = "left"
        elif not left and self.gone_s is not None:
            self.gone_s = None
            self.gone_why = ""
            self.failures = 0
        self.sequence = record.sequence
        self.heard_s = now_s
        self.stage = record.stage
        self.state = record.state
        self.speed = record.samples_per_second
        self.queue = record.queue
        self.round = record.round
        self.samples = record.progress.total
        self.text = record.data_digest.hex()
        self.resumes_s = float(record.allowance.resumes_unix_s)
        self.version = record.version
        self.joined_s = record.joined_unix_ms / 1000.0
        self.expires_s = record.expires_unix_ms / 1000.0
        self.addresses = tuple(one for one in record.addresses if not one.startswith("/dns"))

    def take_report(self, report: report_pb2.Report, now_s: float, rtt_s: float) -> None:
        """Take in its report, which came `rtt_s` after the request."""
        if report.incarnation != self.incarnation:
            self.incarnation = report.incarnation
            self.cursor = 0
            self.receipts_after = 0
        if self.gone_s is not None and self.gone_why != "left":
            self.gone_s = None
            self.gone_why = ""
        self.name = report.name.strip()[:NAME_CHARS_MAX]
        self.answered_s = now_s
        self.status = report.status
        self.failures = 0
        self.rtt_s = rtt_s
        self.skew_s = report.unix_ms / 1000.0 - (now_s - rtt_s / 2)
        self.links = tuple(report.links)


@dataclass(slots=True)
class Round:
    """Outer steps of one round. Each partner of a pair counts its own."""

    index: int
    unix_s: float
    paired: int = 0
    lone: int = 0
    refused: int = 0
    seconds: float = 0.0
    single: int = 0  # steps of a stage's only replica, which has nobody to meet

    def to_json(self) -> dict[str, object]:
        steps = self.paired + self.lone + self.single
        return {
            "round": self.index,
            "t": round(self.unix_s, 3),
            "paired": self.paired,
            "lone": self.lone,
            "refused": self.refused,
            "single": self.single,
            "mean_s": round(self.seconds / steps, 4) if steps else None,
        }


class RoundTable(dict[int, Round]):
    """The last ROUNDS_KEPT rounds, by number."""

    def at(self, index: int, unix_s: float) -> Round | None:
        """The round `index`, which begins at `unix_s` if it is new; None if it is older than those kept."""
        if index not in self:
            if len(self) >= ROUNDS_KEPT and index < min(self):
                return None
            self[index] = Round(index, unix_s)
            if len(self) > ROUNDS_KEPT:
                del self[min(self)]
        return self[index]

    def count(self, index: int, outcome: str, seconds: float | None, unix_s: float) -> bool:
        """Count an exchange of round `index` with this `outcome`, told at `unix_s`; False if the round is too old."""
        found = self.at(index, unix_s)
        if found is None:
            return False
        setattr(found, outcome, getattr(found, outcome) + 1)
        found.seconds += seconds if seconds is not None and 0 <= seconds < 1e6 else 0.0
        return True


class FaultNews:
    """The faults that were told of late, so that each node's are told at most every NEWS_S."""

    def __init__(self) -> None:
        self._told = dict[tuple[PeerId, str], float]()

    def is_new(self, peer: PeerId, event: str, now_s: float) -> bool:
        """Whether to tell of the fault `event` at `peer` now; it counts as told then."""
        key = (peer, event)
        if now_s - self._told.get(key, -NEWS_S) < NEWS_S:
            return False
        if len(self._told) > NODES_MAX:
            self._told.clear()
        self._told[key] = now_s
        return True


class SampleRate:
    """The speed of the whole run over the last RATE_SPAN_S."""

    def __init__(self) -> None:
        self._counts = deque[tuple[float, int]]()  # (time, samples of the run), a second apart at least

    def add(self, now_s: float, samples: int) -> None:
        """Note that the run has trained `samples`."""
        if not self._counts or now_s - self._counts[-1][0] >= 1.0:
            self._counts.append((now_s, samples))
        while len(self._counts) > 2 and now_s - self._counts[0][0] > RATE_SPAN_S:
            self._counts.popleft()

    def forget(self) -> None:
        """Count no samples that were trained until now."""
        self._counts.clear()

    def samples_per_s(self) -> float:
        """0 where nothing is known."""
        if len(self._counts) < 2:
            return 0.0
        t0, s0 = self._counts[0]
        t1, s1 = self._counts[-1]
        return (s1 - s0) / (t1 - t0) if t1 > t0 else 0.0


class Validations(dict[int, tuple[float, float]]):
    """Validations of the run: (Unix seconds, nats per token) by samples."""

    def __init__(self, every_samples: int) -> None:
        super().__init__()
        self._reach = NEAR_VALIDATIONS * every_samples
        self._validators: dict[int, PeerId] = {}  # who reported it, in this life of the coordinator

    def add(self, peer: PeerId, samples: int, unix_s: float, loss: float) -> None:
        """Note what `peer` reported. Of many, every second one of the older half is dropped."""
        self[samples] = (unix_s, loss)
        self._validators[samples] = peer
        if len(self._validators) > CURVE_POINTS:
            self._validators = {at: peer for at, peer in self._validators.items() if at in self}
        if len(self) > CURVE_POINTS:
            for old in sorted(self)[1 : CURVE_POINTS // 2 : 2]:
                del self[old]

    def last(self) -> tuple[int, float] | None:
        """Returns (samples, nats per token) of the newest validation, whose loss is by the word of several nodes where
        several report."""
        if not self:
            return None
        samples = max(self)
        return samples, self._agreed(samples)

    def near(self, samples: int) -> float | None:
        """The validation loss in nats per token that was measured nearest to `samples`, as `last`."""
        return self._agreed(min(self, key=lambda at: (abs(at - samples), at))) if self else None

    def _agreed(self, samples: int) -> float:
        """The loss of the validation at `samples`; where AGREEING_MIN nodes reported one within NEAR_VALIDATIONS
        periods, the median of each one's nearest."""
        nearest: dict[PeerId, int] = {}
        for at, peer in self._validators.items():
            if abs(at - samples) <= self._reach and at in self:
                other = nearest.setdefault(peer, at)
                nearest[peer] = min(at, other, key=lambda one: abs(one - samples))
        if len(nearest) < AGREEING_MIN:
            return self[samples][1]
        return statistics.median(self[at][1] for at in nearest.values())


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes to send to pages and to store. `forgotten` are peers no longer shown."""

    nodes: list[NodeView]
    forgotten: list[PeerId]
    entries: list[TimelineEntry]
    rounds: list[Round]
    validations: list[tuple[int, float, float]]
    contributions: list[tuple[PeerId, Contribution]]
    receipts: list[call_pb2.Receipt]
    days: list[tuple[PeerId, int, int]] = field(default_factory=list)  # (who, day since 1970, samples signed that day)


@dataclass(slots=True)
class PendingChanges:
    """Changes of a board since they were taken last: what is new, and the keys of what is other than before."""

    nodes: set[PeerId] = field(default_factory=set)
    rounds: set[int] = field(default_factory=set)
    contributions: set[PeerId] = field(default_factory=set)
    forgotten: list[PeerId] = field(default_factory=list)
    entries: list[TimelineEntry] = field(default_factory=list)
    validations: list[tuple[int, float, float]] = field(default_factory=list)
    receipts: list[call_pb2.Receipt] = field(default_factory=list)


@dataclass(slots=True)
class Board:
    """The whole picture of one run."""

    manifest: Manifest
    run_id: RunId = NO_RUN
    nodes: dict[PeerId, NodeView] = field(default_factory=dict)
    rounds: RoundTable = field(default_factory=RoundTable)
    timeline: deque[TimelineEntry] = field(default_factory=lambda: deque(maxlen=ENTRIES_SHOWN))
    contributions: dict[PeerId, Contribution] = field(default_factory=dict)
    totals: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(KEYS, 0)))
    validations: Validations = field(init=False)
    samples: int = 0
    grew_s: float = 0.0  # when `samples` last grew, or could not for want of a replica, or first was looked at
    trained_s: float = 0.0  # when `samples` last grew, also in an earlier life of the coordinator; 0: never
    entry_serial: int = 0
    cursors: dict[PeerId, tuple[int, int]] = field(default_factory=dict)  # (incarnation, last event read) of nodes gone
    began_s: float = 0.0  # when the board was looked at first, in this life of the coordinator
    _speed: SampleRate = field(default_factory=SampleRate)
    parameters: tuple[int, ...] = ()
    amendments: Callable[[int], list[str]] = lambda round_index: []  # the owner's, by the round that is done
    ledger: Ledger = field(init=False)
    _faults: FaultNews = field(default_factory=FaultNews)
    _pending: PendingChanges = field(default_factory=PendingChanges)

    def __post_init__(self) -> None:
        self.validations = Validations(self.manifest.pipeline.validation_every_samples)
        self.ledger = Ledger(self.run_id, alone=self.manifest.pipeline.stages == 1)
        self.parameters = tuple(part.parameters for part in stages_of(self.manifest))

    # Input.

    def resume(self, samples: int, trained_s: float) -> None:
        """Go on from `samples`, which an earlier life of the coordinator saw trained at `trained_s`."""
        self.samples = samples
        self.trained_s = trained_s

    def observe_record(self, record: record_pb2.Record, now_s: float) -> None:
        """Take in a verified record, unless a newer one is known."""
        peer = PeerId(record.peer_id)
        node = self.nodes.get(peer)
        if node is None:
            if len(self.nodes) >= NODES_MAX or record.state == record_pb2.NODE_STATE_LEFT:
                return
            node = self.nodes[peer] = NodeView(peer)
            node.incarnation, node.cursor = self.cursors.pop(peer, (0, 0))
        if record.sequence <= node.sequence:
            return
        node.take_record(record, now_s)
        self._pending.nodes.add(peer)

    def reported(self, peer: PeerId, report: report_pb2.Report, now_s: float, rtt_s: float) -> None:
        """Take in the report that `peer` sent `rtt_s` after the request."""
        node = self.nodes.get(peer)
        if node is None:
            return
        before_s = node.answered_s
        node.take_report(report, now_s, rtt_s)
        worked_s = self._count(node, report, now_s)
        if before_s and now_s > before_s:
            node.busy = min(1.0, worked_s / (now_s - before_s))
        self._thanked(node, report, now_s)
        for event in report.events:
            if event.serial > node.cursor:
                node.cursor = event.serial
                self._happened(node, event, now_s)
        self._pending.nodes.add(peer)

    def silent(self, peer: PeerId, why: str, now_s: float) -> None:
        """Count a failed call to `peer`. The timeline shows it after SILENT_AFTER failures in a row."""
        node = self.nodes.get(peer)
        if node is None or node.gone_s is not None:
            return
        node.failures += 1
        if node.failures == SILENT_AFTER:
            reason = brief(why).removeprefix(short(peer)).strip()
            self.tell(now_s, node, "departure", "warning", self._named(f"does not answer: {reason}"))
        self._pending.nodes.add(peer)

    def expire(self, now_s: float) -> None:
        """Mark nodes whose record ran out as gone, and forget those gone for NEWS_S."""
        for peer, node in list(self.nodes.items()):
            if node.gone_s is None and node.expires_s <= now_s:
                node.gone_s = now_s
                node.gone_why = "its record ran out"
                if node.failures < SILENT_AFTER:
                    self.tell(now_s, node, "departure", "warning", "is gone without a word: its record ran out")
                self._pending.nodes.add(peer)
            elif node.gone_s is not None and now_s - node.gone_s > NEWS_S:
                del self.nodes[peer]
                if len(self.cursors) < NODES_MAX:
                    self.cursors[peer] = (node.incarnation, node.cursor)
                self._pending.nodes.discard(peer)
                self._pending.forgotten.append(peer)

    def tell(self, now_s: float, node: NodeView | None, kind: str, level: str, text: str) -> None:
        """Add an entry to the timeline. With `node` None it is about the whole run."""
        self.entry_serial += 1
        peer, name, stage = ("", "", None) if node is None else (node.peer, node.label, node.stage)
        entry = TimelineEntry(self.entry_serial, now_s, peer, name, stage, kind, level, text[:TEXT_CHARS_MAX])
        self.timeline.append(entry)
        self._pending.entries.append(entry)

    # Current state.

    def living(self) -> list[NodeView]:
        return [node for node in self.nodes.values() if node.living]

    def settle(self, now_s: float) -> None:
        """Bring the run's sample count and speed up to `now_s`.

        The count is the median of the nodes' counts, from records and reports, and never falls. A single node cannot
        change it much. New nodes that report zero are left out.
        """
        said = [
            max(node.samples, node.status.samples_total if node.status is not None and self._fresh(node, now_s) else 0)
            for node in self.living()
        ]
        total = self._median_of(said)
        served = {node.stage for node in self.living() if node.serving and node.failures < SILENT_AFTER}
        if total > self.samples:
            self.samples = total
            self.trained_s = now_s
            self.grew_s = now_s
        elif not self.grew_s or not served.issuperset(range(self.manifest.pipeline.stages)):
            self.grew_s = now_s
        self.began_s = self.began_s or now_s
        if now_s - self.began_s < self.manifest.limits.record_ttl_s:  # by then every node's record was read
            self._speed.forget()  # samples trained before the coordinator started are not speed
        if not self.living():
            self._speed.forget()  # a run that has stopped
        self._speed.add(now_s, self.samples)

    def samples_per_s(self) -> float:
        """The speed of the whole run; 0 where nobody is here."""
        return self._speed.samples_per_s()

    def loss_train(self, now_s: float) -> float | None:
        """The training loss in nats per token: the median over the nodes that report one."""
        said = [status.loss_train for status in self._reports(now_s) if 0 < status.loss_train < LOSS_MAX]
        return statistics.median(said) if said else None

    def meets_every_steps(self, now_s: float) -> float | None:
        """Inner steps between two meetings of a replica: the median over the nodes that report it."""
        said = [status.meets_every_steps for status in self._reports(now_s) if status.meets_every_steps > 0]
        return statistics.median_low(said) if said else None

    def _reports(self, now_s: float) -> list[StatusReply]:
        """The fresh reports of nodes that are here."""
        return [n.status for n in self.living() if n.status is not None and self._fresh(n, now_s)]

    def round_last(self) -> int:
        return statistics.median_low([node.round for node in self.living()] or [0])

    def take_changes(self) -> Changes:
        """Return and clear all changes since the last call."""
        pending = self._pending
        self._pending = PendingChanges()
        return Changes(
            nodes=[self.nodes[peer] for peer in sorted(pending.nodes) if peer in self.nodes],
            forgotten=pending.forgotten,
            entries=pending.entries,
            rounds=[self.rounds[index] for index in sorted(pending.rounds) if index in self.rounds],
            validations=pending.validations,
            contributions=[(peer, self.contributions[peer]) for peer in sorted(pending.contributions)],
            receipts=pending.receipts,
            days=self.ledger.take_days(),
        )

    # Internals.

    def _fresh(self, node: NodeView, now_s: float) -> bool:
        return now_s - node.answered_s <= max(NEWS_S, len(self.nodes) / 5.0)

    def _count(self, node: NodeView, report: report_pb2.Report, now_s: float) -> float:
        """Add what the report counts to what `node` gave. Returns the seconds that it computed since its last one."""
        contribution = self.contributions.get(node.peer)
        if contribution is None:
            if len(self.contributions) >= NODES_MAX:
                return 0.0
            contribution = self.contributions[node.peer] = Contribution(first_unix_s=now_s)
        contribution.name = node.label
        contribution.last_unix_s = now_s
        parameters = self.parameters[node.stage] if node.stage < len(self.parameters) else 0
        grown = contribution.tell(report.incarnation, counts_of(report.status.counters), parameters, report.watts)
        contribution.lives[report.incarnation][CREDITED] = float(report.credited)
        self.totals.update({key: value for key, value in grown.items() if value})
        self._pending.contributions.add(node.peer)
        return grown["worked_s"]

    def _thanked(self, node: NodeView, report: report_pb2.Report, now_s: float) -> None:
        node.receipts_after = report.receipts_serial
        for raw in report.receipts:
            with contextlib.suppress(RemoteFault):  # an invalid receipt is ignored
                if (new := self.ledger.take(node.peer, raw, self.contributions, now_s)) is not None:
                    self._pending.receipts.append(new)

    def _happened(self, node: NodeView, event: report_pb2.EventReport, now_s: float) -> None:
        fields = {key: brief(value) for key, value in event.fields.items()}
        when = max(now_s - LATE_S, min(event.unix_ms / 1000.0 - (node.skew_s or 0.0), now_s))
        match event.event:
            case "exchange.paired" | "exchange.lone" | "exchange.refused":
                self._exchanged(node, event.event.partition(".")[2], fields, when)
            case "validation.done":
                self._validated(node.peer, fields, when)
            case "stage.chosen" | "stage.moved":
                node.why = fields.get("reason", "")[:TEXT_CHARS_MAX]
        level = event.level if event.level in LEVELS else "info"
        text = sentence(event.event, level, fields)
        if text is None:
            return
        if text[0] == "fault" and not self._faults.is_new(node.peer, event.event, now_s):
            return
        self.tell(when, node, text[0], level, self._named(text[1]))

    def _named(self, text: str) -> str:
        """Replace node ids in `text`, whole or short, by node names."""
        return named(text, lambda end: next((n.label for peer, n in self.nodes.items() if peer.endswith(end)), None))

    def _exchanged(self, node: NodeView, outcome: str, fields: dict[str, str], when: float) -> None:
        index = number(fields.get("round"))
        seconds = number(fields.get("seconds"))
        ahead = 1 + self._ahead_max() / self.manifest.gossip.round_samples
        if index is None or not 0 <= index <= self.round_last() + ahead:
            return
        if outcome == "lone" and sum(other.serving and other.stage == node.stage for other in self.nodes.values()) < 2:
            outcome = "single"
        if self.rounds.count(int(index), outcome, seconds, when):
            self._pending.rounds.add(int(index))

    def _median_of(self, said: Iterable[int]) -> int:
        """The median of what nodes `said` of the run's samples, without zeros, and at least what was settled on."""
        known = list(filter(None, said))
        return max(self.samples, statistics.median_low(known) if known else 0)

    def _ahead_max(self) -> float:
        """Samples that a node may be ahead of the median of the records: what the run trains while a record lives, and
        a validation's period."""
        limits = self.manifest.limits
        pipeline = self.manifest.pipeline
        return self.samples_per_s() * limits.record_ttl_s + pipeline.validation_every_samples

    def _validated(self, peer: PeerId, fields: dict[str, str], when: float) -> None:
        loss = number(fields.get("loss"))
        samples = number(fields.get("samples_total"))
        if loss is None or samples is None or not 0 < loss < LOSS_MAX:
            return
        if not 0 <= samples <= self._median_of(node.samples for node in self.living()) + self._ahead_max():
            return  # one node's word that the run is further than the others know
        self.validations.add(peer, int(samples), when, loss)
        self._pending.validations.append((int(samples), when, loss))

"""The samples that the run has trained, as far as this node believes other nodes (net/membership/clock.py)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from swarmnode.base.errors import RemoteFault
from swarmnode.base.ids import PeerId, digest64
from swarmnode.base.ports import Clock, Telemetry
from swarmnode.base.remembered import REMEMBERED_MAX
from swarmnode.base.wire import record_pb2
from swarmnode.net.membership.clock import HEARD_S, RunClock, Supposed
from swarmnode.net.membership.liveness import PINGED_MAX
from swarmnode.net.membership.peer_table import PeerTable
from swarmnode.net.membership.progress import Progress, ProgressOverclaim
from swarmnode.run.manifest import Manifest

SLACK_ROUNDS = 4  # guess: rounds' worth of samples that are believed whatever machines announce
AHEAD_PERIODS = 2.0  # announce periods; there is a look in each
BOASTERS_MAX = PINGED_MAX  # peers named in one event
NOBODY = -1.0  # as `Progress.top`: nobody is believed yet
APART_ROUNDS = 16  # guess: rounds that parts of a swarm train apart only where they were cut off from each other

Feeding = tuple[PeerId, float]
"""A feeder, and since when it is a member: a process that begins again knows no debts of its former life."""


# Parts of one swarm that trained apart: which one has less progress, and what its feeders trained in vain.
#
# The run's counter has an entry for each feeder and only grows (progress.py). While a network is cut, entries of the
# other part's feeders stand still; once it heals, they jump. What jumps is what the others trained; what all the other
# entries grew by since then is what this part did. The part that did less takes the other one's state, and what it did
# is in no weights any more. It stays counted, as no node can take back what others may have merged: each of its
# feeders, or its heir, trains as many samples again that it does not count. So the count is what the weights have
# learned, and nodes of earlier versions need not know of it.
#
# Pure: times and entries are arguments.

PERIOD_S = 5.0  # guess: between two looks; what is trained meanwhile is what two parts may err by about each other
WINDOW_S = HEARD_S  # entries of the other part arrive within it, with a few feeders' in each call


@dataclass(frozen=True, slots=True)
class TrainedApart:
    """Samples that two parts of the swarm trained apart: `here` and `there`, and of those here the ones that this
    node's feeder counted."""

    here: int
    there: int
    own: int

    @property
    def reason(self) -> str:
        return f"{self.here} samples were trained here and {self.there} by others, apart from each other"


class PartitionWatch:
    """Finds out at each look, by the feeders' counts and by their presence, whether parts of the swarm trained apart.

    Parts that differ by `least` samples or fewer merge by rounds alone. In a partition an entry stands still, or a
    record is missing, for `apart_s` seconds."""

    def __init__(self, me: PeerId, least: int, apart_s: float) -> None:
        self._me = me
        self._least = least
        self._apart_s = apart_s
        self._entries: dict[str, int] = {}
        self._still: dict[str, float] = {}  # entries that do not grow, since when
        self._marks: deque[tuple[float, int, int]] = deque(maxlen=REMEMBERED_MAX)  # when, sum of entries, own entry
        self._present = frozenset[PeerId]()
        self._total = 0  # of the run, at the last look
        self._came: dict[PeerId, float] = {}  # peers that came, or came back, when
        self._jumped: dict[str, tuple[int, float, float]] = {}  # entry before, since when, when it jumped
        self.back: Collection[PeerId] = ()
        """Peers that came within WINDOW_S: those of another part are among them."""
        self.merging = False
        """Whether more than `least` samples of another part came within WINDOW_S."""

    def due(self, now_s: float, total: int) -> bool:
        """Whether to `look` now, at `total` samples of the run: it is time, or they jumped."""
        if not self._marks:
            return True
        return now_s - self._marks[-1][0] >= PERIOD_S or total - self._total > self._least

    def look(
        self, now_s: float, total: int, entries: Mapping[str, int], present: Collection[PeerId]
    ) -> TrainedApart | None:
        """The work that this part of the swarm did in vain, if another part is back that has trained more."""
        summed = sum(entries.values())
        own = entries.get(self._me, 0)
        first = not self._marks
        self._see(now_s, frozenset(present), first)
        self._total = total
        grown = {feeder for feeder, _ in entries.items() - self._entries.items()} - {self._me}
        before_s = now_s if first else self._marks[-1][0]
        for feeder in grown & self._still.keys():
            since_s = self._still.pop(feeder)
            if now_s - since_s >= self._apart_s:
                self._jumped.setdefault(feeder, (self._entries[feeder], since_s, now_s))
        if self._jumped and not first:  # feeders that came to the other part meanwhile
            for feeder in grown - self._entries.keys():
                self._jumped.setdefault(feeder, (0, now_s, now_s))
        for feeder in entries.keys() - grown - self._still.keys():
            self._still[feeder] = before_s
        self._entries = dict(entries)
        self._marks.append((now_s, summed, own))
        self._jumped = {feeder: jump for feeder, jump in self._jumped.items() if now_s - jump[2] <= WINDOW_S}
        return self._compare(summed, own)

    def _compare(self, summed: int, own: int) -> TrainedApart | None:
        others = [f for f in self._jumped if f in self._came or f not in self._present]
        sizes = {feeder: self._entries[feeder] - self._jumped[feeder][0] for feeder in others}
        there = sum(sizes.values())
        self.merging = there > self._least
        if not self.merging:
            return None
        _, since_s, _ = self._jumped[max(others, key=lambda feeder: (sizes[feeder], feeder))]
        _, summed_then, own_then = next((m for m in reversed(self._marks) if m[0] <= since_s), self._marks[0])
        here = max(0, summed - summed_then - there)
        if not self._gives_way(here, there, others):
            return None
        self._jumped.clear()
        return TrainedApart(here, there, own - own_then)

    def _gives_way(self, here: int, there: int, others: Collection[str]) -> bool:
        """Whether this part trained less. Each part knows its own work sooner than the other's. Parts that differ by
        `least` or less therefore go by the name of their first feeder, which both see alike."""
        ours = (feeder for feeder in self._entries.keys() & {*self._present, self._me} if feeder not in others)
        if abs(here - there) > self._least:
            return here < there
        return min(ours, default="") > min(others)

    def _see(self, now_s: float, present: frozenset[PeerId], first: bool) -> None:
        if not first:
            self._came.update(dict.fromkeys(present - self._present, now_s))
        self._came = {peer: at_s for peer, at_s in self._came.items() if now_s - at_s <= WINDOW_S and peer in present}
        self.back = self._came.keys()
        self._present = present


class RunProgress:
    """Keeps `progress.top`, the bound up to which others are believed. `refused` is called with the fault of a
    claim above it, `progressed` when the count of samples grows."""

    def __init__(
        self,
        manifest: Manifest,
        me: PeerId,
        peer_table: PeerTable,
        progress: Progress,
        clock: Clock,
        telemetry: Telemetry,
        refused: Callable[[RemoteFault], None],
        progressed: Callable[[], None],
    ) -> None:
        self._me = me
        self._peer_table = peer_table
        self._progress = progress
        self._wall = clock
        self._telemetry = telemetry
        self._refused = refused
        self._progressed = progressed
        self._stages = manifest.pipeline.stages
        self._round_samples = manifest.gossip.round_samples
        slack = SLACK_ROUNDS * self._round_samples
        self.clock = RunClock(slack, AHEAD_PERIODS * manifest.limits.announce_period_s)
        self._supposed = Supposed()
        self._unheard: dict[PeerId, int] = {}  # what feeders told before anybody was believed
        self._overclaimers: dict[PeerId, None] = {}  # told of more samples since the last look than were believed
        self.watch = PartitionWatch(me, APART_ROUNDS * self._round_samples, manifest.limits.record_ttl_s)
        self.in_vain: TrainedApart | None = None
        """The samples that this part of the swarm trained before it last met a part with more."""
        self.owed = 0  # samples that this node is to train again without counting them
        self._debts: dict[Feeding, int] = {}  # what feeders owed last of what was trained here in vain
        self._inherited = 0  # of what was trained here in vain
        progress.believe_up_to(NOBODY)

    @property
    def begun(self) -> bool:
        """True once this node has a state, and with it a count of its own against which others are measured."""
        return self._progress.top != NOBODY

    @property
    def samples_max(self) -> float:
        """Samples that the run can have trained until the next look."""
        if self.begun:
            return max(self._progress.top, self._progress.total)
        return max(self._supposed.middle, self._progress.total) + self.clock.margin(self._peer_table.swarm())

    @property
    def rounds_max(self) -> int:
        """The number of rounds in `samples_max`, with the round under way."""
        return int(self.samples_max) // self._round_samples + 1

    def trust(self, progress: Progress) -> None:
        """Believe `progress` without a bound: it is of this node's checkpoint, or of a majority."""
        top = self._progress.top
        self._progress.believe_up_to(math.inf)
        self._progress.merge(progress)
        self._progress.believe_up_to(top)

    def suppose(self, answered: Collection[PeerId]) -> Supposed:
        """The run's samples as a node without a state knows them from the peers that `answered`."""
        if not self.begun:
            self._supposed = self.clock.suppose(self._peer_table.swarm(), answered)
        total = self._progress.total
        return Supposed(max(self._supposed.least, total), max(self._supposed.middle, total))

    def begin(self, total: int) -> None:
        """Begin to believe others in bounds: this node holds a state, in a run of `total` samples."""
        if not self.begun:
            self.trust(Progress.from_wire(record_pb2.Progress(total=total)))
            self._progress.believe_up_to(self._progress.total)
            self.judge()

    def begin_at_most(self, total: int) -> int:
        """`begin` at the `total` that a state's donor and a confirming peer told, or, where the run cannot have trained
        so much, at what most peers that answered say: the two may be liars of a small stage. Returns the run's
        samples."""
        middle = self.suppose(()).middle  # records came during the download
        total = total if total <= self.samples_max else middle
        self.begin(total)
        return total

    def judge(self) -> None:
        """Set the bound up to which others are believed until the next look."""
        if not self.begun:
            return
        total = self._progress.total
        if self._overclaimers:
            self._telemetry.event(
                "progress.doubted", level="warning", peers=list(self._overclaimers), top=self._progress.top
            )
        self._overclaimers.clear()
        verdict = self.clock.look(self._wall.unix_s(), total, self._peer_table.member, self._stages, self._me)
        if verdict.raised is not None:
            self.trust(Progress.from_wire(record_pb2.Progress(total=verdict.raised)))
            self._telemetry.event("progress.raised", samples=verdict.raised, reason=verdict.reason)
        self._progress.believe_up_to(verdict.top)
        unheard = self._unheard
        self._unheard = {}
        self.hear(unheard)
        self.compare_parts()
        self._inherit()
        if self._progress.total > total:
            self._progressed()

    def entry(self) -> record_pb2.Progress:
        """The count as this node's record tells it: its own entry, and what it owes."""
        entry = self._progress.entry(self._me)
        entry.owed = self.owed
        return entry

    def record_fed(self, samples: int) -> None:
        """Count `samples` that this node fed, except those that it counted before and trains again."""
        again = min(self.owed, samples)
        self.owed -= again
        self._progress.add(self._me, samples - again)

    def compare_parts(self) -> None:
        """Note that a part of the swarm which trained more than this one is back."""
        now = self._wall.unix_s()
        total = self._progress.total
        if not self.begun or not self.watch.due(now, total):
            return
        present = [member.peer for member in self._peer_table.swarm().members()]
        split = self.watch.look(now, total, self._progress.feeders, present)
        if split is not None:
            self.in_vain = split
            self._inherited = 0
            self.owed += split.own
            self._telemetry.event(
                "progress.in_vain",
                level="warning",
                here=split.here,
                there=split.there,
                again=split.own,
                reason=split.reason,
            )

    def _inherit(self) -> None:
        """Take over the debt of a feeder that stopped, if this node is its heir among those that owed with it. Debts
        count together up to the samples that others trained in vain here: a key costs nothing, and may owe and vanish.
        """
        if self.in_vain is None:
            return
        here = {(m.peer, m.joined_unix_s): m.owed for m in self._peer_table.swarm().members() if m.feeds}
        self._debts |= {feeding: owed for feeding, owed in here.items() if owed or feeding in self._debts}
        for gone in sorted(self._debts.keys() - here.keys()):
            owed = min(self._debts.pop(gone), self.in_vain.here - self.in_vain.own - self._inherited)
            heirs = sorted(peer for peer, _ in self._debts.keys() & here.keys())
            if not owed or not heirs:
                continue
            if heirs[digest64("heir", *gone) % len(heirs)] == self._me:
                self.owed += owed
                self._inherited += owed
            elif gone[0] == self._me:
                self.owed = 0

    def hear(self, told: Mapping[PeerId, int]) -> None:
        """Records of feeders tell how many samples each fed."""
        if not self.begun:
            self._unheard |= told
            return
        before = self._progress.total
        try:
            self._progress.merge_entries(told)
        except RemoteFault:  # one of them is wrong, or they are too many together
            for feeder, samples in told.items():
                try:
                    self._progress.merge_entries({feeder: samples})
                except RemoteFault as fault:
                    if isinstance(fault, ProgressOverclaim):
                        self.report_overclaim(feeder)
                    self._refused(fault)
        if self._progress.total > before:
            self._progressed()

    def report_overclaim(self, peer: PeerId) -> None:
        """Note that `peer` tells of more samples than are believed."""
        if self.begun and len(self._overclaimers) < BOASTERS_MAX:
            self._overclaimers[peer] = None


class MembershipView(Protocol):
    """A node's knowledge of the swarm and of the run's progress. `look` refreshes it."""

    @property
    def me(self) -> PeerId: ...

    @property
    def peer_table(self) -> PeerTable: ...

    @property
    def progress(self) -> Progress: ...

    @property
    def run_progress(self) -> RunProgress: ...

    async def look(self, stages: Iterable[int]) -> None:
        """Read the directory's records of `stages` once."""
        ...

    async def claimed(self) -> int:
        """Samples of the run that the directory's meeting points remember. Raises Unavailable when none answers."""
        ...

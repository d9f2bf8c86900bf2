"""A node's own observations of its peers, and a bound on how far peers that it never saw at work are believed.

Keys cost nothing, so records alone prove no machine. A machine was seen at work if it answered a microbatch with a
gradient that passed every check, or gave a packet that was believed. A machine that only sent a microbatch which was
trained here was seen, too: it counts as an ordinary machine, and has no vote.

While most of the strangers that are tried work, records are believed as they are. Else a stage counts as many replicas
as were seen at work (`BelievedSwarm`), and those that never answered get a small share of the choices together, however
many they are (`UnknownPeers`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from swarmnode.base.ema import ENOUGH, Ema, EmaStart
from swarmnode.base.ids import PeerId
from swarmnode.base.remembered import REMEMBERED_MAX
from swarmnode.net.membership.swarm import Member, Swarm

STRANGERS_SHARE = 0.05  # guess: of bytes that are given; so training keeps .95 of a quota
MOSTLY = 0.5  # guess: strangers are treated as others while so many of about the last ten tried did their work
FLOOD = ENOUGH  # of so many tries most were in vain; one newcomer with a bad line is no flood
SHARE = 0.25  # guess: of choices, times the share that answered
SHARE_LEAST = 1.0 / 64.0  # guess: of choices


@dataclass(slots=True)
class Trials:
    """Outcomes of tries with strangers: FLOOD of them tell."""

    _worked: Ema = field(default_factory=lambda: Ema(start=EmaStart.MEAN))

    def add(self, worked: bool) -> None:
        """Record a try."""
        self._worked.add(float(worked))

    @property
    def enough(self) -> bool:
        """Whether so many were made that they tell."""
        return self._worked.count >= FLOOD

    @property
    def share(self) -> float:
        """The share of the last tries that worked; 1 before the first."""
        return self._worked.value if self._worked.known else 1.0

    @property
    def mostly_vain(self) -> bool:
        """Whether most of many tries were in vain."""
        return self._worked.count >= FLOOD and self._worked.value < MOSTLY


class PeerHistory:
    """The machines seen since this node started."""

    def __init__(self) -> None:
        self.times: OrderedDict[PeerId, int] = OrderedDict()  # the number of times each machine was seen
        self.at_work: set[PeerId] = set()  # of these

    def record_work(self, peer: PeerId) -> None:
        """Record that `peer` was seen at work."""
        self.record_request(peer)
        self.at_work.add(peer)

    def record_request(self, peer: PeerId) -> None:
        """Record that `peer` sent a microbatch that was trained here."""
        self.times[peer] = self.times.pop(peer, 0) + 1
        if len(self.times) > REMEMBERED_MAX:
            oldest, _ = self.times.popitem(last=False)
            self.at_work.discard(oldest)

    def forget(self, peer: PeerId) -> None:
        """Drop `peer`, which was found to lie."""
        self.times.pop(peer, None)
        self.at_work.discard(peer)


def machines(times: Iterable[int]) -> float:
    """Estimated number of machines, from how often each known one was seen: in a large stage one node sees only a part.

    With D seen, f1 of them once and f2 twice, there are about D + f1 (f1 - 1) / (2 (f2 + 1)) (Chao 1984, "Nonparametric
    estimation of the number of classes in a population"). At most 2 D are believed: ten keys that do one piece of work
    each would count as 55 machines. A machine that does no work adds nothing, however many keys it has.
    """
    seen = list(times)
    once = seen.count(1)
    twice = seen.count(2)
    return len(seen) + min(float(len(seen)), once * (once - 1) / (2 * (twice + 1)))


class BelievedSwarm:
    """Makes `Swarm` views of the members that count.

    How many replicas a stage has decides the size of microbatches, how many are in flight, and which node moves to
    which stage; an attacker who announces hundreds of keys would decide all of it. While strangers do not work, a stage
    whose work this node looks at counts the replicas seen at work, and no other stage more than the largest of these.
    """

    def __init__(
        self, me: PeerId, seen: Collection[PeerId], strangers_work: Callable[[], bool], *, stages: int
    ) -> None:
        """`seen`: peers seen at work here. `strangers_work` tells whether most strangers do each kind of work in which
        they are tried."""
        self._me = me
        self._seen = seen
        self._strangers_work = strangers_work
        self._stages = stages
        self._last: tuple[Swarm, int, Swarm] | None = None  # of which view, with how many seen at work: the answer

    @property
    def doubtful(self) -> bool:
        """Whether most strangers that were tried did nothing."""
        return not self._strangers_work()

    def of(self, swarm: Swarm, own: int | None, sends_to: Collection[int]) -> Swarm:
        """The view of `swarm` for a node of stage `own` that sends microbatches to the stages `sends_to`. It sees the
        work of these, of its own stage, and of the one before; without a stage, that of the first."""
        if not self.doubtful:
            return swarm
        if self._last is None or self._last[0] is not swarm or self._last[1] != len(self._seen):
            self._last = swarm, len(self._seen), self._of(swarm, own, sends_to)
        return self._last[2]

    def _of(self, swarm: Swarm, own: int | None, sends_to: Collection[int]) -> Swarm:
        looks_at = {*sends_to, *((own - 1, own) if own is not None and own < self._stages else (0,))}
        known = [self._known(members) if stage in looks_at else () for stage, members in enumerate(swarm.stages)]
        most = max(map(len, known))
        stages = [
            known_members or (members if stage in looks_at or not most else members[:most])
            for stage, (known_members, members) in enumerate(zip(known, swarm.stages, strict=True))
        ]
        return Swarm.frozen(stages)

    def _known(self, members: Sequence[Member]) -> tuple[Member, ...]:
        return tuple([member for member in members if member.peer == self._me or member.peer in self._seen])


@dataclass(slots=True)
class UnknownPeers:
    """The replicas of a stage that never answered, and how those fared that were tried.

    An attacker can announce thousands of replicas that are none. Each would get a microbatch, which is late then. While
    most of those that were tried answered, there is no limit. Else the fewer answer and the longer a choice waits in
    vain, the smaller is their share: a try that takes ten times as long as an answer is made a tenth as often, so that
    the time lost does not depend on how slowly an attacker refuses.
    """

    peers: dict[PeerId, None] = field(default_factory=dict)
    _tries: Trials = field(default_factory=Trials)
    _lost_s: Ema = field(default_factory=lambda: Ema(start=EmaStart.MEAN))  # by a choice in vain
    _vain: int = 0  # requests refused since any replica of the stage answered
    _vain_since_s: float = 0.0  # loop time of the first of these

    def enter(self, peer: PeerId) -> None:
        """Note a replica that is new here."""
        self.peers[peer] = None

    def forget(self, peer: PeerId) -> None:
        """Note that `peer` is gone."""
        self.peers.pop(peer, None)

    def record_answer(self, peer: PeerId) -> None:
        """Note an answer of `peer`, which is known from now on."""
        self._vain = 0
        if peer in self.peers:
            del self.peers[peer]
            self._tries.add(True)

    def record_fault(self, peer: PeerId, lost_s: float = 0.0) -> None:
        """Note a fault of `peer`, which cost `lost_s`."""
        if peer in self.peers:
            self._tries.add(False)
            self._lost_s.add(lost_s)

    def record_stage_refusal(self, now: float) -> None:
        """Note at loop time `now` that a replica of the stage refused a request, for whatever reason."""
        self._vain_since_s = self._vain_since_s if self._vain else now
        self._vain += 1

    def in_vain(self, now: float, least_s: float) -> bool:
        """Whether many requests were refused and none answered, for `least_s` at least."""
        return self._vain >= FLOOD and now - self._vain_since_s >= least_s

    @property
    def flooded(self) -> bool:
        """Whether most of many that were tried did not answer."""
        return bool(self.peers) and self._tries.mostly_vain

    def share(self, usual_s: float) -> float:
        """The share of choices that unknown replicas may have, where an answer takes `usual_s`; 0: not known yet."""
        if not self.peers or self._tries.share >= MOSTLY:
            return 1.0
        share = max(SHARE_LEAST, SHARE * self._tries.share)
        lost_s = self._lost_s.value
        return share * usual_s / lost_s if lost_s > usual_s > 0.0 else share

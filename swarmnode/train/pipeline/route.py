"""Choose the replica of the next stage for a microbatch: interleaved weighted round robin with a little randomness.

Source: SWARM parallelism (arXiv 2301.11913, section 3.2 and appendix C): each client keeps a queue of peers ordered by
the virtual time at which they would be free, chooses the least and charges it before the call. A share `epsilon` of
choices is uniform, so that replicas mix through random routes (NoLoCo, arXiv 2506.10911, section 3.1). Where gradients
are averaged before each step all hold equal weights: nothing is to mix, and whoever gets more than its part of a step
holds up all. The believed speed of a peer is bounded by its stage's (believed_rate.py).
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from swarmnode.base.ema import Ema
from swarmnode.base.ids import PeerId, seeded
from swarmnode.base.remembered import Remembered
from swarmnode.net.membership.liveness import AGAIN_S, SMALL_CALL_S, TRIES
from swarmnode.net.membership.swarm import Member
from swarmnode.net.membership.trust import UnknownPeers
from swarmnode.run.manifest import Manifest, PipelineSpec
from swarmnode.run.manifest.gossip_compat import averages_gradients
from swarmnode.train.pipeline.believed_rate import (
    ANNOUNCED_MAX,
    FASTER_MAX,
    faster,
    lowest,
    median_speed,
    possible_s,
    usual,
)

EPSILON = PipelineSpec().epsilon
BAN_FIRST_S = 1.0  # guess; doubles with each fault in a row, so that a peer that accepts and never answers costs little
BAN_MAX_S = AGAIN_S


@dataclass(slots=True)
class _Peer:
    runtime: float  # virtual seconds of work given to it
    serial: int  # of its entry in the heap; older entries are void
    seconds_per_sample: Ema
    low_s: float = 0.0  # seconds a sample with little queued; 0 before the first answer
    not_before: float = 0.0  # loop time until which it reported to be busy
    banned_sequence: int = -1  # not chosen until its record is newer than this ...
    banned_until: float = 0.0  # ... and loop time is past this
    faults_in_row: int = 0
    charged: bool = False  # with any microbatch
    late: int = 0  # missed deadlines in a row
    answers: int = 0  # answers of all peers at its first missed deadline


@dataclass(eq=False)
class Router:
    """Chooses among the replicas of one stage. Pure: loop time is an argument, randomness comes from `rng`. `samples`:
    size of most microbatches. `possible_s`: least seconds per sample on any device. `confirmed` counts a peer's
    confirmed answers in a row; `on_ban` is called with each peer that is banned."""

    rng: random.Random
    epsilon: float = EPSILON
    samples: int = 1
    possible_s: float = 0.0
    faster_max: float = FASTER_MAX
    confirmed: Callable[[PeerId], int] = lambda peer: 0
    on_ban: Callable[[PeerId], object] = lambda peer: None

    def __post_init__(self) -> None:
        self._usual: tuple[int, float] = -1, 0.0  # (answers when computed, seconds a sample with little queued)
        self._median: float | None = None  # of announced samples per second; None: to be recomputed
        self._peers: dict[PeerId, _Peer] = {}
        self._members: dict[PeerId, Member] = {}  # the newest records of the same peers
        self._untold: dict[PeerId, None] = {}  # peers without an announced speed
        self._heap: list[tuple[float, float, int, PeerId]] = []
        self._serial = 0
        self._all = Ema()
        self._stretch = Ema()  # answer times relative to the peers' announced speeds
        self._coming_in = Ema()  # seconds a sample that our microbatches take to arrive at a peer
        self._answers = 0
        self._unix_ahead_s = 0.0  # Unix time minus loop time, for wall clock times in records
        self._pausing: dict[PeerId, None] = {}  # peers that announced a pause
        self.unknown = UnknownPeers()
        self._banned: dict[PeerId, None] = {}  # peers banned recently, oldest first
        # Peers that left the stage with faults in a row: who goes and comes again is banned as long as before.
        self._former = Remembered[PeerId, _Peer]()

    def set_unix_ahead(self, seconds: float) -> None:
        """Set Unix time minus loop time: records hold wall clock times, everything else here is loop time."""
        self._unix_ahead_s = seconds

    def update(self, members: Iterable[Member]) -> None:
        """Replace the members of the stage.

        A newcomer starts at the least virtual runtime, so it is neither flooded nor starved, plus a random part of one
        microbatch's time. If all started at the same point, each would get one microbatch before any got two, however
        slow: with a hundred replicas, routers would know no better in their first half hour (simulated: thousand, half
        of what the machines can do).
        """
        present = {member.peer: member for member in members}
        for peer in sorted(self._members.keys() - present.keys()):
            self.forget(peer)
        self._members = present
        self._median = None
        for peer in [*self._untold, *self._pausing]:
            if present[peer].plain:
                self._renew(peer, present[peer])
        for peer, member in present.items():
            if peer in self._peers and not member.plain:
                self._renew(peer, member)
        if len(self._peers) < len(present):
            least = self._least()
            for peer, member in present.items():
                if peer not in self._peers:
                    self._enter(member, least)

    def learn(self, member: Member) -> None:
        """Add or update one replica by its newest record."""
        if member.peer not in self._peers:
            self._enter(member, self._least())
        else:
            self._members[member.peer] = member
            self._median = None
            self._renew(member.peer, member)

    def forget(self, peer: PeerId) -> None:
        """Remove a peer that no longer serves the stage."""
        if self._members.pop(peer, None) is not None:
            if self._peers[peer].faults_in_row:
                self._former[peer] = self._peers[peer]
            self._median = None
            self.unknown.forget(peer)
            for known in (self._peers, self._untold, self._pausing):
                known.pop(peer, None)

    def due(self, now: float, limit: int) -> list[PeerId]:
        """At most `limit` peers whose ban time is over but that published no newer record. A ping finds out whether
        they live (train/node/failure_detector.py)."""
        if not self._banned:
            return []
        over = self.overdue(now)
        self._banned = {peer: None for peer in self._banned if peer in self._peers and self.banned(peer, now)}
        return over[:limit]

    @property
    def ban_ends(self) -> float:
        """Loop time at which the first peer will be `due`; infinite if none is banned."""
        known = [(peer, self._peers[peer]) for peer in self._banned if peer in self._peers]
        return min([one.banned_until for peer, one in known if self._silent(peer, one)], default=math.inf)

    def unban(self, peer: PeerId) -> None:
        """Lift the ban of a peer that answered a ping. Its next ban will be twice as long."""
        known = self._peers.get(peer)
        if known is not None:
            known.banned_sequence = -1

    def _least(self) -> float:
        return min((entry.runtime for entry in self._peers.values()), default=0.0)

    def _enter(self, member: Member, least: float) -> None:
        known = _Peer(least, 0, Ema())
        if (former := self._former.pop(member.peer, None)) is not None:
            known.faults_in_row = former.faults_in_row
            known.banned_until = former.banned_until
        self._peers[member.peer] = known
        self._members[member.peer] = member
        self._median = None
        self.unknown.enter(member.peer)
        self._begin(member.peer, least)
        self._renew(member.peer, member)

    def _begin(self, peer: PeerId, least: float) -> None:
        self._peers[peer].runtime = least + self.rng.random() * self.samples * self._seconds(peer)
        self._push(peer)

    def _renew(self, peer: PeerId, member: Member) -> None:
        if not member.samples_per_second:
            self._untold[peer] = None
        elif peer in self._untold:
            del self._untold[peer]
            if not self._peers[peer].charged:
                self._begin(peer, self._least())
        if member.pauses_unix_s:
            self._pausing[peer] = None
        else:
            self._pausing.pop(peer, None)

    def pausing(self, now: float, samples: int) -> list[PeerId]:
        """Replicas that would not finish `samples` before their announced pause."""
        return [
            peer
            for peer in self._pausing
            if self._members[peer].pauses_unix_s < now + self._unix_ahead_s + self.seconds(peer, samples)
        ]

    def choose(self, now: float, samples: int, exclude: Collection[PeerId] = ()) -> tuple[PeerId | None, str]:
        """The replica for a microbatch of `samples`, charged at once; or None and why no replica can take it.

        A replica about to pause is chosen only as a last resort: it would still finish what it takes.
        """
        soon = self.pausing(now, samples) if self._pausing else ()
        if soon:
            peer, reason = self._choose(now, samples, {*exclude, *soon})
            if peer is not None:
                return peer, reason
        return self._choose(now, samples, exclude)

    def _choose(self, now: float, samples: int, exclude: Collection[PeerId]) -> tuple[PeerId | None, str]:
        if not self._peers:
            return None, "no replica of the stage is known"
        if (share := self.unknown_share()) < 1.0 and self.rng.random() >= share:
            without = {*exclude, *self.unknown.peers}
            exclude = without if self.able(now, without) else exclude
        if self.rng.random() < self.epsilon:
            able = [peer for peer in sorted(self._peers) if peer not in exclude and self._able(peer, now)]
            if able:
                return self._charge(self.rng.choice(able), samples), "uniform"
        passed: list[tuple[float, float, int, PeerId]] = []
        chosen: PeerId | None = None
        while self._heap and chosen is None:
            entry = heapq.heappop(self._heap)
            peer = entry[3]
            known = self._peers.get(peer)
            if known is None or known.serial != entry[2]:
                continue
            if peer in exclude or not self._able(peer, now):
                passed.append(entry)
                continue
            chosen = peer
        for entry in passed:
            heapq.heappush(self._heap, entry)
        if chosen is None:
            return None, f"all {len(self._peers)} replicas are busy, banned or tried"
        return self._charge(chosen, samples), "least virtual runtime"

    def unknown_share(self) -> float:
        """The share of choices that replicas which never answered may have together; 1.0: no limit."""
        return self.unknown.share(self.samples * (self._all.value if self._all.known else 0.0))

    def idle(self, now: float, least_s: float) -> bool:
        """Whether no replica here ever answered, and those asked for `least_s` or longer all refused."""
        return 0 < len(self._peers) == len(self.unknown.peers) and self.unknown.in_vain(now, least_s)

    def takes(self, peer: PeerId, now: float) -> bool:
        """Whether `peer` is a replica of the stage that could be chosen now."""
        return peer in self._peers and self._able(peer, now)

    def able(self, now: float, exclude: Collection[PeerId]) -> bool:
        """Whether a peer not in `exclude` could be chosen now."""
        for peer in self._peers:  # noqa: SIM110  a generator would be resumed for each
            if peer not in exclude and self._able(peer, now):
                return True
        return False

    def record_answer(self, peer: PeerId, samples: int, seconds: float, coming_in_s: float = 0.0) -> float:
        """Record an answer after `seconds` for `samples`, without later stages, of which the microbatch took
        `coming_in_s` to arrive.

        Returns the part of `coming_in_s` due to our own uplink: as much as with other peers of the stage. The rest is
        due to the peer's link and counts as its work. Our uplink is the same for all peers; if it counted and were
        slow, they would all look alike (simulated: home-8b).
        """
        usual_s = self._coming_in.value * samples if self._coming_in.known else coming_in_s
        self._coming_in.add(coming_in_s / samples)
        ours_s = min(coming_in_s, usual_s)
        seconds = max(0.0, seconds - ours_s)
        known = self._peers.get(peer)
        one_s = seconds / samples
        if one_s < self.possible_s:  # else it is a repeat, whose answer was kept
            one_s = max(self.possible_s, self._usual_s())
        self._all.add(one_s)
        self._answers += 1
        if known is not None:
            self.unknown.record_answer(peer)
            known.late = 0
            known.seconds_per_sample.add(one_s)
            known.low_s = lowest(known.low_s, one_s)
            if (announced := self._told(peer)) > 0.0:
                self._stretch.add(one_s * announced)
            known.faults_in_row = 0
        return ours_s

    def late(self, peer: PeerId) -> bool:
        """Record a missed deadline; return whether it is the fault of `peer`: one of TRIES in a row, while others
        answered."""
        known = self._peers.get(peer)
        if known is None:
            return False
        if not known.late:
            known.answers = self._answers
        known.late += 1
        return known.late >= TRIES and self._answers > known.answers

    def delay(self, peer: PeerId, until: float) -> None:
        """Do not choose `peer` before loop time `until`: it reported to be busy."""
        known = self._peers.get(peer)
        if known is not None:
            known.not_before = max(known.not_before, until)

    def record_refusal(self, peer: PeerId, lost_s: float) -> None:
        """Record that `peer` said no, which cost `lost_s`. Only a slow no counts, as honest peers are busy, too: slower
        than an answer usually is, or a small call before the first answer."""
        if lost_s > (self.typical_s(self.samples) or SMALL_CALL_S):
            self.unknown.record_fault(peer, lost_s)

    def ban(self, peer: PeerId, now: float, most_s: float = BAN_MAX_S, lost_s: float = 0.0) -> float:
        """Ban a faulty `peer`, which cost `lost_s`, until it publishes a newer record and the ban time is over; return
        the ban's seconds. The time doubles up to `most_s`."""
        known = self._peers.get(peer)
        if known is None:
            return 0.0
        seconds = min(most_s, BAN_FIRST_S * 2.0**known.faults_in_row)
        known.faults_in_row += 1
        self.unknown.record_fault(peer, lost_s)
        known.banned_sequence = self._members[peer].sequence
        known.banned_until = now + seconds
        self._banned[peer] = None
        self.on_ban(peer)
        return seconds

    def banned(self, peer: PeerId, now: float) -> bool:
        known = self._peers.get(peer)
        return known is not None and (self._silent(peer, known) or now < known.banned_until)

    def _silent(self, peer: PeerId, known: _Peer) -> bool:
        """Whether it has published nothing since it was banned."""
        return known.banned_sequence >= 0 and self._members[peer].sequence <= known.banned_sequence

    def overdue(self, now: float) -> list[PeerId]:
        """Peers whose ban time is over but that stay banned, as they published nothing new and answered no ping."""
        return [
            peer
            for peer in self._banned
            if (known := self._peers.get(peer)) is not None and self._silent(peer, known) and known.banned_until <= now
        ]

    def expected_s(self, peer: PeerId, samples: int) -> float | None:
        """Seconds `peer` is expected to need for `samples`; None before its first answer."""
        known = self._peers.get(peer)
        if known is None or not known.seconds_per_sample.known:
            return None
        return known.seconds_per_sample.value * samples

    def seconds(self, peer: PeerId, samples: int) -> float:
        """Estimated seconds that the present `peer` needs for `samples`: the amount that `choose` charges."""
        return samples * self._seconds(peer)

    def runtime(self, peer: PeerId) -> float:
        """Virtual seconds of work given to the present `peer`."""
        return self._peers[peer].runtime

    def refund(self, peer: PeerId, seconds: float) -> None:
        """Undo the charge of `seconds` for a microbatch that `peer` did not get."""
        if (known := self._peers.get(peer)) is not None:
            known.runtime -= seconds
            self._push(peer)

    def typical_s(self, samples: int) -> float:
        """Seconds that an average peer needs for `samples`; 0 before the first answer."""
        return self._all.value * samples

    def ready_in_s(self, now: float) -> float:
        """Seconds until time alone makes some replica choosable; 0 if one is now."""
        waits = [max(0.0, known.not_before - now) for peer, known in self._peers.items() if not self.banned(peer, now)]
        return min(waits, default=1.0)

    def __len__(self) -> int:
        return len(self._peers)

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._peers

    def _able(self, peer: PeerId, now: float) -> bool:
        return self._peers[peer].not_before <= now and not self.banned(peer, now)

    def _charge(self, peer: PeerId, samples: int) -> PeerId:
        known = self._peers[peer]
        known.charged = True
        known.runtime += self.seconds(peer, samples)
        self._push(peer)
        return peer

    def _seconds(self, peer: PeerId) -> float:
        """Seconds for one sample: by its answers, else its announcement, else others' answers or announcements; its own
        as far as they are believed (believed_rate.py).

        Answers take longer than announced, because they include queueing. So an announced time is scaled by the ratio
        seen with the others. Otherwise replicas never asked would look the best of a hundred, and the slow ones among
        them got twice as much as they could do (simulated: thousand-8b).
        """
        known = self._peers[peer]
        if known.seconds_per_sample.known:
            most = faster(self.faster_max, self.confirmed(peer))
            return max(known.seconds_per_sample.value, self._usual_s() / most)
        if (announced := self._told(peer)) > 0.0:
            return (self._stretch.value if self._stretch.known else 1.0) / announced
        if self._all.known:
            return self._all.value
        return 1.0 / self._median if self._median else self.possible_s

    def _told(self, peer: PeerId) -> float:
        """Believed part of the samples per second that `peer` announces; 0 if none."""
        if self._median is None:
            self._median = median_speed(member.samples_per_second for member in self._members.values())
        return min(self._members[peer].samples_per_second, ANNOUNCED_MAX * self._median)

    def _usual_s(self) -> float:
        """Seconds a sample of the stage's replicas with little queued; recomputed once each may have answered again."""
        as_of, usual_s = self._usual
        if as_of < 0 or self._answers - as_of > len(self._peers):
            usual_s = usual(known.low_s for known in self._peers.values())
            self._usual = self._answers, usual_s
        return usual_s

    def _push(self, peer: PeerId) -> None:
        known = self._peers[peer]
        self._serial += 1
        known.serial = self._serial
        heapq.heappush(self._heap, (known.runtime, self.rng.random(), self._serial, peer))


def routers(
    manifest: Manifest, me: PeerId, confirmed: Callable[[PeerId], int], on_ban: Callable[[PeerId], object]
) -> list[Router]:
    """A router per stage, for node `me`."""
    epsilon = 0.0 if averages_gradients(manifest) else manifest.pipeline.epsilon
    samples = manifest.inner.microbatch
    most = FASTER_MAX if manifest.pipeline.audit_share > 0.0 else math.inf  # without audits all are believed
    return [
        Router(
            seeded(manifest.seed, "route", me, stage),
            epsilon,
            samples,
            possible_s(manifest, stage),
            most,
            confirmed,
            on_ban,
        )
        for stage in range(manifest.pipeline.stages)
    ]

"""Which replica of the next stage gets a microbatch: interleaved weighted round robin with a little chance.

Source: SWARM parallelism (arXiv 2301.11913, section 3.2 and appendix C): each client keeps a queue of peers ordered by
the virtual time at which they would be free, chooses the least and charges it before the call. A share `epsilon` of
choices is uniform, so that replicas mix through random routes (NoLoCo, arXiv 2506.10911, section 3.1). How fast a peer
is believed to be is bounded by what the stage shows (credible.py).
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from swarmnode.ids import PeerId, seeded
from swarmnode.manifest import Manifest
from swarmnode.membership.swarm import Member
from swarmnode.pipeline.credible import ANNOUNCED_MAX, FASTER_MAX, faster, lowest, median_speed, possible_s, usual

EPSILON = 0.1  # guess (design section 3)
EMA_WEIGHT = 0.1  # SWARM's public code: weight of the newest observation
UNKNOWN_SECONDS_PER_SAMPLE = 1e-3  # guess: only until the first answer of any peer
BAN_FIRST_S = 1.0  # guess; doubles with each fault in a row, so that a peer that accepts and never answers costs little
BAN_MAX_S = 60.0  # guess
LATE_MAX = 2  # guess: microbatches in a row that a peer let pass while the others answered
USUAL_SHARE = 8  # guess: what is usual is found anew after answers of an eighth of the replicas
OTHERS_MIN = 4  # guess: answers of others meanwhile; where nobody answers, it is not the peer's fault


class Ema:
    """Exponential moving average without the bias of its start: mean of n equal observations is that value."""

    __slots__ = ("_sum", "_weight", "decay")

    def __init__(self, decay: float = EMA_WEIGHT) -> None:
        self.decay = decay
        self._sum = 0.0
        self._weight = 0.0

    def add(self, value: float) -> None:
        self._sum += self.decay * (value - self._sum)
        self._weight += self.decay * (1.0 - self._weight)

    @property
    def known(self) -> bool:
        return self._weight > 0.0

    @property
    def value(self) -> float:
        return self._sum / self._weight if self._weight > 0.0 else 0.0


@dataclass(slots=True)
class _Peer:
    runtime: float  # virtual seconds of work given to it
    serial: int  # of its entry in the heap; older entries are void
    seconds_per_sample: Ema
    low_s: float = 0.0  # for a sample, when little waits there; 0 before the first answer
    not_before: float = 0.0  # loop time: it said it was busy
    banned_sequence: int = -1  # no choice until its record is newer than this ...
    banned_until: float = 0.0  # ... and loop time is past this
    faults_in_row: int = 0
    charged: bool = False  # with any microbatch
    late: int = 0  # microbatches in a row that it had not done by their deadline
    answers: int = 0  # of all peers, when it was late first


class Router:
    """Chooses among the replicas of one stage. Pure: loop time comes as an argument, chance from `rng`."""

    def __init__(
        self,
        rng: random.Random,
        epsilon: float = EPSILON,
        samples: int = 1,
        possible_s: float = 0.0,
        faster_max: float = FASTER_MAX,
    ) -> None:
        """`samples` of most microbatches; no device does a sample in less than `possible_s`."""
        self._faster_max = faster_max
        self.confirmed: Callable[[PeerId], int] = lambda peer: 0  # answers in a row that were checked and right
        self._possible_s = possible_s
        self._usual: tuple[int, float] = -1, 0.0  # as of so many answers: seconds a sample where little waits
        self._median: float | None = None  # of announced samples per second; None: to be found anew
        self._rng = rng
        self._epsilon = epsilon
        self._samples = samples
        self._peers: dict[PeerId, _Peer] = {}
        self._members: dict[PeerId, Member] = {}  # the same peers, as their newest records tell them
        self._untold: dict[PeerId, None] = {}  # those that have not told their speed
        self._heap: list[tuple[float, float, int, PeerId]] = []
        self._serial = 0
        self._all = Ema()
        self._stretch = Ema()  # how many times as long an answer takes as its peer's record lets expect
        self._coming_in = Ema()  # seconds a sample of ours takes to come in at a peer
        self._answers = 0
        self.unix_ahead_s = 0.0  # Unix time less loop time, for what records say about wall clocks
        self._pausing: dict[PeerId, None] = {}  # those that announce when they will pause
        self._banned: dict[PeerId, None] = {}  # those banned not long ago, oldest first
        self.when_banned: Callable[[], object] = lambda: None

    def update(self, members: Iterable[Member]) -> None:
        """Learn who serves the stage now. A newcomer enters at the least virtual runtime: no flood, no famine; and as
        far into one microbatch's time of its own as chance has it. Were all to begin at the same point, each would get
        one microbatch before any gets two, however slow it is: of a hundred replicas routers knew no better in their
        first half hour (simulated: thousand, half of what the machines can do)."""
        present = {member.peer: member for member in members}
        self.renew(present, present)

    def renew(self, present: dict[PeerId, Member], special: Mapping[PeerId, Member]) -> None:
        """`update` to all that are `present`, of whom only those `special` may be about to pause, or have yet to tell
        their speed. Keeps `present`."""
        for peer in sorted(self._members.keys() - present.keys()):
            self.forget(peer)
        self._members, self._median = present, None
        for peer in [*self._untold, *self._pausing]:
            if peer not in special:
                self._renew(peer, present[peer])
        for peer, member in special.items():
            if peer in self._peers:
                self._renew(peer, member)
        if len(self._peers) < len(present):
            least = self._least()
            for peer, member in present.items():
                if peer not in self._peers:
                    self._enter(member, least)

    def learn(self, member: Member) -> None:
        """One replica that serves the stage, by its newest record."""
        if member.peer not in self._peers:
            self._enter(member, self._least())
        else:
            self._members[member.peer], self._median = member, None
            self._renew(member.peer, member)

    def forget(self, peer: PeerId) -> None:
        """It does not serve the stage any more."""
        if self._members.pop(peer, None) is not None:
            self._median = None
            for known in (self._peers, self._untold, self._pausing):
                known.pop(peer, None)

    def due(self, now: float, limit: int) -> list[PeerId]:
        """Peers, `limit` at most, whose ban is over by time and that have not published a newer record since: a ping
        finds out whether they live (`pardon`)."""
        if not self._banned:
            return []
        over = self.overdue(now)
        self._banned = {peer: None for peer in self._banned if peer in self._peers and self.banned(peer, now)}
        return over[:limit]

    @property
    def ban_ends(self) -> float:
        """When the first peer will be `due`, as far as is known now; infinite when nobody is banned."""
        known = [(peer, self._peers[peer]) for peer in self._banned if peer in self._peers]
        return min([one.banned_until for peer, one in known if self._silent(peer, one)], default=math.inf)

    def pardon(self, peer: PeerId) -> None:
        """It answered a ping: as good as a newer record. If it breaks again, the next ban is twice as long."""
        known = self._peers.get(peer)
        if known is not None:
            known.banned_sequence = -1

    def _least(self) -> float:
        return min((entry.runtime for entry in self._peers.values()), default=0.0)

    def _enter(self, member: Member, least: float) -> None:
        self._peers[member.peer], self._members[member.peer], self._median = _Peer(least, 0, Ema()), member, None
        self._begin(member.peer, least)
        self._renew(member.peer, member)

    def _begin(self, peer: PeerId, least: float) -> None:
        self._peers[peer].runtime = least + self._rng.random() * self._samples * self._seconds(peer)
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
        """Replicas that would not be done with `samples` before the pause they have announced."""
        return [
            peer
            for peer in self._pausing
            if self._members[peer].pauses_unix_s < now + self.unix_ahead_s + self.seconds(peer, samples)
        ]

    def choose(self, now: float, samples: int, exclude: Collection[PeerId] = ()) -> tuple[PeerId | None, str]:
        """The replica for a microbatch of `samples`, charged at once; or None and why nobody can take it.

        Who is about to pause is asked only when nobody else can: it would still finish what it takes.
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
        if self._rng.random() < self._epsilon:
            able = [peer for peer in sorted(self._peers) if peer not in exclude and self._able(peer, now)]
            if able:
                return self._charge(self._rng.choice(able), samples), "uniform"
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

    def able(self, now: float, exclude: Collection[PeerId]) -> bool:
        """Whether somebody not in `exclude` could be chosen now."""
        return any(peer not in exclude and self._able(peer, now) for peer in self._peers)

    def completed(self, peer: PeerId, samples: int, seconds: float, coming_in_s: float = 0.0) -> float:
        """It answered after `seconds` for `samples`, later stages left out; `coming_in_s` of them the microbatch took
        to come in. Returns how many of those our own line took: as many as with other peers of the stage. The rest is
        the peer's line, and counts as its work does: our line is the same for all, and where it is thin they would all
        look alike (simulated: home-8b)."""
        usual_s = self._coming_in.value * samples if self._coming_in.known else coming_in_s
        self._coming_in.add(coming_in_s / samples)
        ours_s = min(coming_in_s, usual_s)
        seconds = max(0.0, seconds - ours_s)
        known = self._peers.get(peer)
        one_s = seconds / samples
        if one_s < self._possible_s:  # or it is a repeat, whose answer was kept
            one_s = max(self._possible_s, self._usual_s())
        self._all.add(one_s)
        self._answers += 1
        if known is not None:
            known.late = 0
            known.seconds_per_sample.add(one_s)
            known.low_s = lowest(known.low_s, one_s)
            if (told := self._told(peer)) > 0.0:
                self._stretch.add(one_s * told)
            known.faults_in_row = 0
        return ours_s

    def late(self, peer: PeerId) -> bool:
        """A microbatch was not done there by its deadline; whether that is `peer`'s fault: not the first time in a row,
        while others answered."""
        known = self._peers.get(peer)
        if known is None:
            return False
        if not known.late:
            known.answers = self._answers
        known.late += 1
        return known.late >= LATE_MAX and self._answers >= known.answers + OTHERS_MIN

    def delay(self, peer: PeerId, until: float) -> None:
        """It said it was busy until (loop time) `until`."""
        known = self._peers.get(peer)
        if known is not None:
            known.not_before = max(known.not_before, until)

    def ban(self, peer: PeerId, now: float, most_s: float = BAN_MAX_S) -> float:
        """It broke: not chosen until it publishes a newer record and the ban (doubling up to `most_s`) is over; returns
        its seconds."""
        known = self._peers.get(peer)
        if known is None:
            return 0.0
        seconds = min(most_s, BAN_FIRST_S * 2.0**known.faults_in_row)
        known.faults_in_row += 1
        known.banned_sequence = self._members[peer].sequence
        known.banned_until = now + seconds
        self._banned[peer] = None
        self.when_banned()
        return seconds

    def banned(self, peer: PeerId, now: float) -> bool:
        known = self._peers.get(peer)
        return known is not None and (self._silent(peer, known) or now < known.banned_until)

    def _silent(self, peer: PeerId, known: _Peer) -> bool:
        """It has published nothing since it was banned."""
        return known.banned_sequence >= 0 and self._members[peer].sequence <= known.banned_sequence

    def overdue(self, now: float) -> list[PeerId]:
        """Peers still banned though the time of their ban is over: they said nothing new, and nobody pardoned them."""
        return [
            peer
            for peer in self._banned
            if (known := self._peers.get(peer)) is not None and self._silent(peer, known) and known.banned_until <= now
        ]

    def expected_s(self, peer: PeerId, samples: int) -> float | None:
        """Seconds `peer` is expected to need for `samples`, None before its first answer."""
        known = self._peers.get(peer)
        if known is None or not known.seconds_per_sample.known:
            return None
        return known.seconds_per_sample.value * samples

    def seconds(self, peer: PeerId, samples: int) -> float:
        """Seconds that `peer`, one of those present, needs for `samples` as far as is known: what `choose` charges."""
        return samples * self._seconds(peer)

    def runtime(self, peer: PeerId) -> float:
        """Virtual seconds of work given to `peer`, one of those present."""
        return self._peers[peer].runtime

    def refund(self, peer: PeerId, seconds: float) -> None:
        """It was chosen and charged `seconds`, and then did not get the microbatch."""
        if (known := self._peers.get(peer)) is not None:
            known.runtime -= seconds
            self._push(peer)

    def typical_s(self, samples: int) -> float:
        """Seconds that any peer needs for `samples`, 0 before the first answer."""
        return self._all.value * samples

    def ready_in_s(self, now: float) -> float:
        """Seconds until some replica may be chosen again by time alone; 0 when one can be now."""
        waits = [max(0.0, known.not_before - now) for peer, known in self._peers.items() if not self.banned(peer, now)]
        return min(waits, default=1.0)

    def __len__(self) -> int:
        return len(self._peers)

    def _able(self, peer: PeerId, now: float) -> bool:
        return self._peers[peer].not_before <= now and not self.banned(peer, now)

    def _charge(self, peer: PeerId, samples: int) -> PeerId:
        known = self._peers[peer]
        known.charged = True
        known.runtime += self.seconds(peer, samples)
        self._push(peer)
        return peer

    def _seconds(self, peer: PeerId) -> float:
        """For one sample: as it answered so far, else as it announces, else as others answered; the first two as far as
        they can be believed (credible.py).

        Answers take longer than what is announced, which is work alone, by the wait in queues: as many times as with
        the others. Were it not for that, of a hundred replicas those never asked would look the best, and the slow ones
        among them were given twice as much as they could do (simulated: thousand-8b)."""
        known = self._peers[peer]
        if known.seconds_per_sample.known:
            most = faster(self._faster_max, self.confirmed(peer))
            return max(known.seconds_per_sample.value, self._usual_s() / most)
        if (told := self._told(peer)) > 0.0:
            return (self._stretch.value if self._stretch.known else 1.0) / told
        return self._all.value if self._all.known else UNKNOWN_SECONDS_PER_SAMPLE

    def _told(self, peer: PeerId) -> float:
        """Samples a second that `peer` announces, as far as they are believed; 0: none."""
        if self._median is None:
            self._median = median_speed(member.samples_per_second for member in self._members.values())
        return min(self._members[peer].samples_per_second, ANNOUNCED_MAX * self._median)

    def _usual_s(self) -> float:
        """Seconds a sample that a replica takes when little waits there; found anew every few answers."""
        as_of, found = self._usual
        if as_of < 0 or self._answers - as_of > len(self._peers) // USUAL_SHARE:
            found = usual(known.low_s for known in self._peers.values())
            self._usual = self._answers, found
        return found

    def _push(self, peer: PeerId) -> None:
        known = self._peers[peer]
        self._serial += 1
        known.serial = self._serial
        heapq.heappush(self._heap, (known.runtime, self._rng.random(), self._serial, peer))


def routers(manifest: Manifest, me: PeerId) -> list[Router]:
    """One for each stage, of the node `me`."""
    epsilon, samples = manifest.pipeline.epsilon, manifest.inner.microbatch
    most = FASTER_MAX if manifest.pipeline.audit_share > 0.0 else math.inf  # else all are believed
    return [
        Router(seeded(manifest.seed, "route", me, stage), epsilon, samples, possible_s(manifest, stage), most)
        for stage in range(manifest.pipeline.stages)
    ]

"""The newest valid records that a node knows, within bounds that no flood of keys moves. Pure: it waits for nothing.

Keys cost nothing, and the check of a signature costs 0.14 ms (measured). So peers that were not seen at work here share
one budget of checks, of which new ones get the upper half only: a flood leaves room for those that are known, and
costs 1.4 % of a core however large it is. While most strangers that are tried do nothing, STRANGERS_MAX of a place
are shown, those known for longest: neither this node nor those that ask it work on more.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from swarmnode.base import bounds
from swarmnode.base.errors import RemoteFault
from swarmnode.base.ids import PeerId, RunId, digest64, machine_of
from swarmnode.base.token_bucket import TokenBucket
from swarmnode.base.wire import call_pb2
from swarmnode.base.wire import record_pb2 as wire
from swarmnode.net.membership.liveness import PING_TIMEOUT_S
from swarmnode.net.membership.peer_table import CROWD_MAX
from swarmnode.net.membership.record import CLOCK_SKEW_MAX_S, SIGNED_BYTES_MAX, check_record, pass_of
from swarmnode.run.admission.admission import Admission

RPC_TIMEOUT_S = PING_TIMEOUT_S  # the DHT's calls are as small
HOLDERS = 5  # hivemind's number of replicas
HOLDERS_ASKED = 2  # guess: one of them may be new here, or lie
NEAR_S = 120.0  # guess: a search for holders moves 26 kB; a dead one ends it sooner
PLACE_MAX = 2048  # guess: records of one place, as long as no amount of machines of one run is larger
STRANGERS_MAX = CROWD_MAX
CHECKS_PER_S = 100.0  # derived: 1.4 % of a core
CHECKS_BURST = 4096.0  # derived: the first picture of PLACE_MAX nodes
FIRST_MAX = 32  # measured: records of a holder's first answer (docs/measurements/simulated-swarms.md)
NEWS_MAX = 256  # derived: records of one answer, at most 330 kB, a third of what a header may have


@dataclass(frozen=True, slots=True)
class KnownRecord:
    """A valid record. `mark` stands for its peer in a digest."""

    signed: wire.SignedRecord
    expires_unix_ms: int
    mark: int


class RecordBook:
    """The records of one node, by place (a stage, or after the last one: nodes of older versions that only feed)."""

    def __init__(
        self,
        run_id: RunId,
        places: int,
        ttl_max_s: float,
        admission: Admission | None = None,
        taken: Callable[[wire.Record], None] = lambda record: None,
    ) -> None:
        """`taken` is called with each record that is new here."""
        self._run_id = run_id
        self._places: list[dict[PeerId, KnownRecord]] = [{} for _ in range(places)]
        self._ttl_max_s = ttl_max_s
        self._admission = admission
        self._taken = taken
        self._checks = TokenBucket.full(CHECKS_PER_S, CHECKS_BURST)
        self.works: Callable[[PeerId], bool] = lambda peer: False
        """Whether a peer was seen at work here."""
        self.doubtful: Callable[[], bool] = lambda: False
        """Whether most strangers that were tried did nothing."""

    def prefer(self, works: Callable[[PeerId], bool], doubtful: Callable[[], bool]) -> None:
        """Set who works and when strangers are doubtful."""
        self.works = works
        self.doubtful = doubtful

    @property
    def places(self) -> int:
        return len(self._places)

    def __len__(self) -> int:
        """Records kept here, of strangers too."""
        return sum(map(len, self._places))

    def take(self, place: int | None, signed: wire.SignedRecord, now_s: float, *, of: PeerId | None = None) -> bool:
        """Keep `signed` if it is valid, newer than the known one, and affordable at Unix time `now_s`; whether it is
        kept now. No signature is checked twice. `place` None: its own; `of`: only a record of this machine."""
        try:
            if signed.ByteSize() > SIGNED_BYTES_MAX:
                return False
            told = bounds.parse(wire.Record, signed.record, "record")
        except RemoteFault:
            return False
        peer = PeerId(told.peer_id)
        expires = told.expires_unix_ms
        place = told.stage if place is None else place
        if place >= len(self._places) or (of is not None and of != machine_of(peer)):
            return False
        here = self._places[place]
        known = here.get(peer)
        if known is not None and known.expires_unix_ms >= expires:
            return bool(known.signed == signed)
        left_s = expires / 1000.0 - now_s
        if told.stage != place or not 0.0 < left_s <= self._ttl_max_s + CLOCK_SKEW_MAX_S:
            return False
        if not self.works(peer) and not self._afford(place, known is None, now_s):
            return False
        try:
            record = check_record(signed, run_id=self._run_id)
        except RemoteFault:
            return False
        if self._admission is not None and not self._admission.judge(peer, pass_of(record))[0]:
            return False
        here[peer] = KnownRecord(signed, expires, known.mark if known is not None else mark_of(peer))
        self._taken(record)
        return True

    def standing(self, signed: wire.SignedRecord) -> KnownRecord | None:
        """The kept record of the peer and place of `signed`, whatever that one is worth."""
        with contextlib.suppress(RemoteFault):
            told = bounds.parse(wire.Record, signed.record, "record")
            if told.stage < len(self._places):
                return self._places[told.stage].get(PeerId(told.peer_id))
        return None

    def _afford(self, place: int, is_new: bool, now_s: float) -> bool:
        """Whether to check one more record of a peer that was not seen at work."""
        if self._checks.fill(now_s) < 1.0 + is_new * CHECKS_BURST / 2 or not self._checks.take(now_s):
            return False
        if is_new and len(self._places[place]) >= PLACE_MAX:
            self._expire(place, now_s)
        return not is_new or len(self._places[place]) < PLACE_MAX

    def known(self, place: int, now_s: float) -> dict[PeerId, KnownRecord]:
        """The unexpired records of `place`, by peer: those seen at work first, and no more strangers than bear it."""
        self._expire(place, now_s)
        here = self._places[place]
        at_work = {peer: record for peer, record in here.items() if self.works(peer)}
        strangers = [peer for peer in here if peer not in at_work]
        shown = strangers[: STRANGERS_MAX if self.doubtful() else None]
        return at_work | {peer: here[peer] for peer in shown}

    def news(
        self, place: int, had: Mapping[int, int], now_s: float, most: int, chance: random.Random
    ) -> list[wire.SignedRecord]:
        """At most `most` and NEWS_MAX records that a reader lacks who `had` for each mark one that expires at that time
        (ms). They are drawn, those of peers seen at work first: readers of a few ask different members next."""
        known = self.known(place, now_s)
        lacking = [peer for peer, one in known.items() if one.expires_unix_ms > had.get(one.mark, 0)]
        chance.shuffle(lacking)
        lacking.sort(key=lambda peer: not self.works(peer))
        return [known[peer].signed for peer in lacking[: min(most or NEWS_MAX, NEWS_MAX)]]

    def request(self, place: int, most: int, now_s: float) -> call_pb2.RecordsRequest:
        """A request for at most `most` records of `place` that are not known here."""
        known = self.known(place, now_s).values()
        return call_pb2.RecordsRequest(
            place=place,
            peers=[one.mark for one in known],
            expires_unix_ms=[one.expires_unix_ms for one in known],
            most=most,
        )

    def answer(
        self,
        peer: PeerId,
        record: wire.SignedRecord,
        request: call_pb2.RecordsRequest,
        now_s: float,
        chance: random.Random,
    ) -> call_pb2.Records:
        """The answer to the `request` of `peer`, which came with its `record`. Raises RemoteFault for a request that
        has another form."""
        if request.place >= self.places or len(request.peers) != len(request.expires_unix_ms):
            raise RemoteFault(f"records of place {request.place}, of {len(request.peers)} peers")
        before = self.standing(record)
        kept = self.take(None, record, now_s, of=peer)
        reply = call_pb2.Records(kept=kept, unix_ms=round(now_s * 1000))
        had = dict(zip(request.peers, request.expires_unix_ms, strict=True))
        if not request.announces:
            reply.records.extend(self.news(request.place, had, now_s, request.most, chance))
        elif before is not None and before.signed != record and before.expires_unix_ms != had.get(before.mark):
            reply.records.append(before.signed)
        return reply

    def take_all(self, place: int, records: Iterable[wire.SignedRecord], now_s: float) -> int:
        """`take` each of the `records`; the number that are kept."""
        return sum(self.take(place, signed, now_s) for signed in records)

    def _expire(self, place: int, now_s: float) -> None:
        now_ms = now_s * 1000.0
        for peer in [peer for peer, one in self._places[place].items() if one.expires_unix_ms <= now_ms]:
            del self._places[place][peer]


def mark_of(peer: PeerId) -> int:
    """32 bits that stand for `peer` in a digest: of 1,000 peers two share theirs once in 8,600 runs."""
    return digest64("record", peer) >> 32

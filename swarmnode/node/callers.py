"""Whose calls this node serves. Checked by the header alone: before a tensor is read, and before anything is computed.

A record is believed that its peer signed and that has not run out; it comes from the directory or rides on the call
(line.py). A caller must be where the call makes sense:

    process                                        a replica of the stage before ours in the microbatch's itinerary; one
                                                   of stage 0 feeds under its own name only
    reserve                                        a replica of a stage that sends microbatches to ours
    opening, redo                                  a replica of another stage: checks follow an answer to its end
    exchange, commit, standin, packet_receipt,
    bequest, suspicion                             a replica of our own stage
    handover                                       a replica of the stage after ours, which we keep
    snapshot, chunk                                any member of the run: joiners, keepers, neighbours that rebuild

A refusal is `Unavailable`: an honest caller whose record has not come here yet is not at fault, sends its record with
its next call, and asks another replica meanwhile. A record costs no more than a key. What a member with a false record
uses up is bounded by the places of one caller (pipeline/places.py) and its bytes under way (transport/budget.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection

from swarmnode.errors import RemoteFault, Unavailable
from swarmnode.ids import PeerId, short
from swarmnode.manifest import Manifest
from swarmnode.membership.swarm import Member
from swarmnode.node.presence import Presence
from swarmnode.pipeline.itinerary import successors
from swarmnode.ports import Admit, Clock
from swarmnode.wire import call_pb2 as wire
from swarmnode.wire import record_pb2

HEARD_MAX = 1024  # guess: callers remembered that the book has no room for: replicas of crowded stages
OWN_STAGE = frozenset({"exchange", "commit", "standin", "packet_receipt", "bequest", "suspicion"})
CHECKS = frozenset({"opening", "redo"})
MEMBERS = frozenset({"snapshot", "chunk"})


class Callers:
    """Of one node: `admit(method)` is what its transport asks before it serves a call of that method."""

    def __init__(self, manifest: Manifest, presence: Presence, clock: Clock, stage: Callable[[], int | None]) -> None:
        """`stage`: the one this node serves; None before it has chosen."""
        self._presence = presence
        self._clock = clock
        self._stage = stage
        self._stages = manifest.pipeline.stages
        self._before = [self._upstream(manifest, stage) for stage in range(self._stages)]
        self._heard: OrderedDict[PeerId, Member] = OrderedDict()

    @staticmethod
    def _upstream(manifest: Manifest, stage: int) -> Collection[int]:
        """The stages that send microbatches to `stage`."""
        stages, spec = manifest.pipeline.stages, manifest.recovery
        ways = {"swapped": spec.itinerary == "swapped", "skips": spec.while_lost == "skip"}
        return [other for other in range(stages) if stage in successors(other, stages, **ways)]

    def learn(self, signed: record_pb2.SignedRecord) -> None:
        """Take in a record that came with a call. Raises RemoteFault when it is forged, expired or of another run."""
        member = self._presence.learn(signed)
        if self._presence.book.member(member.peer) is None:  # of a crowd the book keeps some
            self._heard[member.peer] = member
            self._heard.move_to_end(member.peer)
            if len(self._heard) > HEARD_MAX:
                self._heard.popitem(last=False)

    def admit(self, method: str) -> Admit:
        """Raises Unavailable for callers whose business `method` is not, RemoteFault for a header that contradicts
        itself."""
        if method == "process":
            return self._process

        def admit(peer: PeerId, header: wire.Request) -> None:
            if method not in MEMBERS:
                self._serves(peer, method, self._of(method))
            elif self._member(peer) is None:
                raise Unavailable(f"{short(peer)} is no member of this run, as far as is known here")

        return admit

    def _of(self, method: str) -> Collection[int]:
        """The stages whose replicas may call `method`."""
        own = self._stage()
        if own is None:
            raise Unavailable("this node has no stage yet")
        if method in OWN_STAGE:
            return (own,)
        if method == "handover":
            return ((own + 1) % self._stages,)
        if method in CHECKS:
            return [stage for stage in range(self._stages) if stage != own]
        return self._before[own]

    def _process(self, peer: PeerId, header: wire.Request) -> None:
        process = header.process
        at, way = process.position, process.itinerary
        if not 0 < at < len(way):
            raise RemoteFault(f"position {at} of an itinerary of {len(way)} stages; 1 or a later one is due")
        self._serves(peer, "process", (way[at - 1],))
        if at == 1 and process.feeder != peer:
            raise RemoteFault(f"microbatch of feeder {process.feeder[-8:]!r} comes from {short(peer)}")

    def _serves(self, peer: PeerId, method: str, stages: Collection[int]) -> None:
        member = self._member(peer)
        if member is None or member.stage not in stages:
            where = "no stage" if member is None else f"stage {member.stage}"
            due = " or ".join(map(str, sorted(stages))) or "none"
            raise Unavailable(f"{method} is for replicas of stage {due}; {short(peer)} has {where}, as is known here")

    def _member(self, peer: PeerId) -> Member | None:
        """What `peer` told last, unless it has left or its record ran out."""
        member = self._presence.book.member(peer) or self._heard.get(peer)
        if member is None or member.state == record_pb2.NODE_STATE_LEFT:
            return None
        return member if member.expires_unix_s > self._clock.unix_s() else None

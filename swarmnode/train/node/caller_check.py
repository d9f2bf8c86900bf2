"""Checks callers by the header alone: before a tensor is read, and before anything is computed.

A record is believed that its peer signed and that has not run out; it comes from the directory or rides on the call
(piggyback.py). A caller must be where the call makes sense:

    process                                        a replica of the stage before ours in the microbatch's itinerary; one
                                                   of stage 0 feeds, under its own name
    reserve                                        a replica of a stage that sends microbatches to ours
    opening, recompute                             a replica of another stage: checks follow an answer to its end
    accusation                                     any replica: who found an answer false shows it to its server's stage
                                                   and to that server's other callers
    exchange, butterfly, commit, fallback, packet_receipt, silence
                                                   a replica of our own stage
    final_delta                                    a replica of our own stage that leaves
    step_end                                       a replica of the first stage, which feeds; one of our own stage
    handover                                       a replica of the stage after ours, which we keep
    table                                          a replica of the other end of the pipeline
    snapshot, chunk                                any member of the run: joiners, keepers, neighbours that rebuild; and
                                                   a machine with the owner's warrant, which archives the run

A refusal is `Unavailable`: an honest caller whose record has not come here yet is not at fault, sends its record with
its next call, and asks another replica meanwhile. A record costs no more than a key. What a member with a false record
uses up is bounded by the places of one caller (train/pipeline/backlog.py) and its bytes under way
(net/transport/serve.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from swarmnode.base.errors import RemoteFault, Unavailable
from swarmnode.base.ids import PeerId, RunId, short, stage_name
from swarmnode.base.ports import Admit, Clock
from swarmnode.base.remembered import Remembered
from swarmnode.base.wire import access_pb2, record_pb2
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.net.membership.swarm import Member
from swarmnode.run.admission.access import check_warrant, mark_of
from swarmnode.run.manifest import Manifest
from swarmnode.train.node.presence import Presence

OWN_STAGE = frozenset({"exchange", "butterfly", "commit", "fallback", "packet_receipt", "final_delta", "silence"})
CHECKS = frozenset({"opening", "recompute"})
MEMBERS = frozenset({"snapshot", "chunk"})


class CallerCheck:
    """Gives the transport of one node a check for each method, which it makes before it serves a call."""

    def __init__(self, manifest: Manifest, run_id: RunId, presence: Presence, clock: Clock, owner: bytes = b"") -> None:
        """`owner`: the key that signs warrants, where there is no admission; empty: nobody's."""
        self._run_id = run_id
        self._owner = owner
        self._archivists = Remembered[PeerId, access_pb2.Warrant]()
        self._presence = presence
        self._clock = clock
        self._stages = manifest.pipeline.stages
        self._heard = Remembered[PeerId, Member]()

    def learn(self, signed: record_pb2.SignedRecord) -> None:
        """Take in a record that came with a call. Raises RemoteFault when it is forged, expired or of another run."""
        member = self._presence.learn(signed)
        if self._presence.peer_table.member(member.peer) is None:  # of a crowd the book keeps some
            self._heard[member.peer] = member

    def admit(self, method: str) -> Admit:
        """The check for calls of `method`. It raises Unavailable for callers that may not make them, RemoteFault for a
        header that contradicts itself."""
        if method == "process":
            return self._process

        def admit(peer: PeerId, header: wire.Request) -> None:
            if method not in MEMBERS:
                self._serves(peer, method, self._of(method))
                if method == "final_delta":
                    self._leaves(peer)
            elif header.snapshot.HasField("warrant"):
                self._take_warrant(peer, header.snapshot.warrant)
            elif not (method == "chunk" and self.archives(peer)) and self._member(peer) is None:
                raise Unavailable(f"{short(peer)} is no member of this run, as far as is known here")

        return admit

    def archives(self, peer: PeerId) -> bool:
        """Whether `peer` has shown the owner's warrant, and it still holds."""
        shown = self._archivists.get(peer)
        return shown is not None and self.warranted(peer, shown)[0]

    def archivists(self) -> list[PeerId]:
        """The machines that have archived this node's stage for the owner, and still may."""
        return [peer for peer in self._archivists if self.archives(peer)]

    def warranted(self, peer: PeerId, warrant: access_pb2.Warrant) -> tuple[bool, str]:
        """(whether `peer` may archive the run for its owner, why or why not)."""
        owners = self._owners(warrant)
        now_s = self._clock.unix_s()
        return check_warrant(warrant, owners=owners, run_id=self._run_id, machine=peer, now_unix_s=now_s)

    def _take_warrant(self, peer: PeerId, warrant: access_pb2.Warrant) -> None:
        permit, reason = self.warranted(peer, warrant)
        if not permit:
            raise Unavailable(f"{short(peer)} may not archive this run: {reason}")
        kept = access_pb2.Warrant()
        kept.CopyFrom(warrant)
        self._archivists[peer] = kept

    def _owners(self, warrant: access_pb2.Warrant) -> Sequence[bytes]:
        """The keys that can have signed `warrant`."""
        admission = self._presence.admission
        return (self._owner,) if admission is None else admission.rules.keys.of(warrant.amendment, mark_of(warrant))

    def _of(self, method: str) -> Collection[int]:
        """The stages whose replicas may call `method`."""
        own = self._presence.own.status.stage
        if own is None:
            raise Unavailable("this node has no stage yet")
        if method in OWN_STAGE:
            return (own,)
        if method == "accusation":
            return range(self._stages)
        if method == "step_end":
            return (0, own) if own else ()
        if method == "handover":
            return ((own + 1) % self._stages,)
        if method == "table":
            return (self._stages - 1 - own,)
        if method in CHECKS:
            return [stage for stage in range(self._stages) if stage != own]
        return (own - 1,) if own else ()

    def _process(self, peer: PeerId, header: wire.Request) -> None:
        process = header.process
        at = process.position
        way = process.itinerary
        if not at < len(way):
            raise RemoteFault(f"position {at} of an itinerary of {len(way)} stages")
        if not at:
            raise Unavailable("a microbatch begins at its feeder's own replica of the first stage")
        self._serves(peer, "process", (way[at - 1],))
        if at == 1 and process.feeder != peer:  # as of an older version, whose feeders gave work to others of stage 0
            raise Unavailable(f"microbatch of feeder {process.feeder[-8:]!r} comes from {short(peer)}")

    def _leaves(self, peer: PeerId) -> None:
        member = self._member(peer)
        if member is None or member.state != record_pb2.NODE_STATE_DRAINING:
            raise Unavailable(f"final_delta is for replicas that leave; {short(peer)} stays, as is known here")

    def _serves(self, peer: PeerId, method: str, stages: Collection[int]) -> None:
        member = self._member(peer)
        if member is None or member.stage not in stages:
            where = "no stage" if member is None or member.stage >= self._stages else stage_name(member.stage)
            due = " or ".join(map(stage_name, sorted(stages))) or "no stage"
            raise Unavailable(f"{method} is for replicas of {due}; {short(peer)} has {where}, as is known here")

    def _member(self, peer: PeerId) -> Member | None:
        """The newest record of `peer`; None when it has left or the record has expired."""
        member = self._presence.peer_table.member(peer) or self._heard.get(peer)
        if member is None or member.state == record_pb2.NODE_STATE_LEFT:
            return None
        return member if member.expires_unix_s > self._clock.unix_s() else None

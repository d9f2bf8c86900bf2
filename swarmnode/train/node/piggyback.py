"""The transport as a node uses it. Every call and answer also carries news: the sender's progress, and its signed
record if the other side has not seen it yet. Routers and rounds so need not poll the directory."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace

from swarmnode.base import bounds
from swarmnode.base.errors import Busy, RemoteFault, Unavailable
from swarmnode.base.ids import PeerId, machine_of
from swarmnode.base.ports import Admit, Answer, Call, Handler, Transport
from swarmnode.base.remembered import Remembered
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.base.wire import record_pb2
from swarmnode.net.membership.progress import Progress, ProgressOverclaim
from swarmnode.net.membership.receipt import WorkBook
from swarmnode.train.gossip.outgoing_packet import METHODS

# Calls of these methods carry no news: other calls go the same way all the time. In rounds only
# those of packets do.
TELLING = frozenset({"exchange", "butterfly"})
SILENT = frozenset({*METHODS, "reserve"}) - TELLING
Learn = Callable[[record_pb2.SignedRecord], object]


@dataclass(eq=False)
class PiggybackTransport:
    """ports.Transport around a ports.Transport. `progressed` is called when a peer's progress told something new,
    `overclaimed` with a peer that tells of more samples than can be believed. Calls of `excluded` machines are
    refused."""

    transport: Transport
    progress: Progress
    record: Callable[[], tuple[int, record_pb2.SignedRecord] | None]
    learn: Learn
    progressed: Callable[[], None]
    overclaimed: Callable[[PeerId], None] = lambda peer: None
    excluded: Container[PeerId] = ()
    work: WorkBook = field(default_factory=WorkBook)

    def __post_init__(self) -> None:
        self._seen = Remembered[PeerId, int]()
        self.asked = Counter[PeerId]()  # calls whose answers are not here yet
        self._told = Remembered[PeerId, int]()  # version of our progress that a peer was told

    @property
    def peer_id(self) -> PeerId:
        return self.transport.peer_id

    async def addresses(self) -> list[str]:
        return await self.transport.addresses()

    @property
    def line_queue(self) -> int:
        return self.transport.line_queue

    @property
    def line_bytes_per_s(self) -> float:
        return self.transport.line_bytes_per_s

    def bytes_by_method(self) -> dict[tuple[str, str], int]:
        return self.transport.bytes_by_method()

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        await self.transport.connect(peer, addresses)

    def serve(self, method: str, handler: Handler, *, tensor_bytes_max: int, admit: Admit | None = None) -> None:
        def admitted(peer: PeerId, header: wire.Request) -> None:
            if machine_of(peer) in self.excluded:
                raise Unavailable("this node works with you no more")
            self._hear_record(peer, header)  # before the check, which asks who the caller is
            if admit is not None:
                admit(peer, header)

        if method in SILENT:
            self.transport.serve(method, handler, tensor_bytes_max=tensor_bytes_max, admit=admitted)
            return

        async def with_news(peer: PeerId, call: Call) -> Answer:
            self._hear_progress(peer, call.header.progress)
            answer = await handler(peer, call)
            # A cached answer may be sent twice: its header is not ours to change.
            header = type(answer.header)()
            header.CopyFrom(answer.header)
            self._ride(peer, method, header, call.header.progress)
            return replace(answer, header=header)

        self.transport.serve(method, with_news, tensor_bytes_max=tensor_bytes_max, admit=admitted)

    async def call(self, peer: PeerId, call: Call, *, timeout_s: float, reply_bytes_max: int) -> Answer:
        method = call.header.WhichOneof("body")
        assert method is not None, "a call without a body asks for nothing"
        self._ride(peer, method, call.header)
        self.asked[peer] += 1
        try:
            answer = await self.transport.call(peer, call, timeout_s=timeout_s, reply_bytes_max=reply_bytes_max)
        except Busy:
            raise
        except (RemoteFault, Unavailable) as error:  # it may not have had the news, or have forgotten who we are
            if isinstance(error, RemoteFault):
                self._told.pop(peer, None)
            self._seen.pop(peer, None)
            raise
        finally:
            self.asked[peer] -= 1
            if not self.asked[peer]:
                del self.asked[peer]
        if method in SILENT:
            return answer
        self._hear_progress(peer, answer.header.progress)
        self._hear_record(peer, answer.header)
        return answer

    def _ride(
        self, peer: PeerId, method: str, header: wire.Request | wire.Reply, heard: record_pb2.Progress | None = None
    ) -> None:
        """Put our news into a message to `peer`; `heard` is the progress that came with the call being answered.

        Replicas of one stage look each other up every announce period, so round messages carry less: a record rides
        only to a peer that never had one of ours or may have lost it, and progress rides only with the exchange,
        without the part that the peer knows. News were 500 of the 1,000 bytes that a round's messages had beside the
        packet (docs/measurements/packets.md).
        """
        header.ClearField("record")
        header.ClearField("progress")
        if method in METHODS or method in SILENT:
            if method in TELLING:
                self._news(peer, header.progress, heard)
            if peer not in self._seen and isinstance(header, wire.Request) and (signed := self._say(peer)) is not None:
                header.record.CopyFrom(signed)
            return
        if heard is None or heard.total < self.progress.total:  # else the caller knows no less than we
            self._news(peer, header.progress)
        if heard is not None:
            self.progress.remind(peer, heard, header.progress)
        signed = self._say(peer)
        if signed is not None:
            header.record.CopyFrom(signed)

    def _news(self, peer: PeerId, into: record_pb2.Progress, heard: record_pb2.Progress | None = None) -> None:
        """Put our progress that is new to `peer` into a message: neither sent to it before nor told in `heard`.

        Sending every feeder's counter would outweigh most calls. News that is lost is repeated with the feeder's next
        sample or record.
        """
        into.Clear()
        self.progress.news(self._told.get(peer, 0), into, heard)
        self._told[peer] = self.progress.version

    def _say(self, peer: PeerId) -> record_pb2.SignedRecord | None:
        """Our record for `peer`; None when the peer has received this version."""
        current = self.record()
        if current is None:
            return None
        sequence, signed = current
        if self._seen.get(peer, -1) >= sequence:
            return None
        self._seen[peer] = sequence
        return signed

    def _hear_progress(self, peer: PeerId, progress: record_pb2.Progress) -> None:
        before = self.progress.total
        try:
            if (progress.samples or progress.total > before) and self.progress.merge_wire(progress) > before:
                self.progressed()
        except ProgressOverclaim:  # the call itself may still be good
            self.overclaimed(peer)

    def _hear_record(self, peer: PeerId, header: wire.Request | wire.Reply) -> None:
        """Learn the record that rides on a message of `peer`, if it is its own: else one peer could tell of as many
        keys as it can sign with, at no price but that."""
        if header.HasField("record") and _is_of(peer, header.record):
            with contextlib.suppress(RemoteFault):  # a stale or odd record: the call itself may still be good
                self.learn(header.record)


def _is_of(peer: PeerId, signed: record_pb2.SignedRecord) -> bool:
    """Whether the record, which is not verified, names `peer`."""
    try:
        return bounds.parse(record_pb2.Record, signed.record, "record").peer_id == peer
    except RemoteFault:
        return False

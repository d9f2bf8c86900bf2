"""A replica's state as hashed chunks that a donor sends and a joiner verifies. Bytes and hashes only, no arithmetic.

The bytes of a snapshot are its sections (model/section.py) one after the other, cut into chunks of equal size (the last
may be shorter); its id is the SHA-256 over the chunks' hashes.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from swarmnode.base.bounds import SAMPLES_MAX
from swarmnode.base.errors import RemoteFault
from swarmnode.base.ports import State
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.base.wire import record_pb2
from swarmnode.model.section import PACKED_ITEMSIZE, SECTIONS, Sizes, outer_sections, snapshot_nbytes
from swarmnode.net.membership.progress import Progress
from swarmnode.net.membership.state_line import UNBROKEN, StateLine
from swarmnode.run.manifest import GossipSpec
from swarmnode.run.manifest.gossip_compat import begins_from_slow_weights

HASH_BYTES = 32
CHUNK_NBYTES = 1 << 20  # derived: a second at 8 Mbit/s, half a millisecond of hashing
CHUNK_NBYTES_MAX = 1 << 24
CHUNKS_AT_ONCE = 4  # of one donor; derived: 4 MiB under way fill a line of 100 Mbit/s over 330 ms
DOWNLOAD_RATE = 5e6  # guess: bytes per second from a volunteer's uplink, until this node has downloaded a state itself
BUMP_STEPS_MAX = 1 << 20
CHUNKS_MAX = 1 << 14  # hashes of 34 bytes each in one header of at most 1 MiB (net/transport/frame.py)


@dataclass(frozen=True, slots=True)
class StateSlice:
    """A part of a state: its `sections`, none for all, and of each the elements [first, first + count)."""

    sections: tuple[str, ...] = ()
    first: int = 0
    count: int | None = None  # None: to the end

    @staticmethod
    def of(request: wire.SnapshotRequest) -> StateSlice:
        """The part that a peer asks for. Raises RemoteFault for unknown sections, or sections out of order."""
        sections = tuple(request.sections)
        if sections != tuple(name for name in SECTIONS if name in sections):
            raise RemoteFault(f"sections {sections} asked for; a state has {SECTIONS} in this order")
        return StateSlice(sections, request.first, request.count or None)

    def request(self, stage: int, round_min: int, nobody_waits: bool = False) -> wire.SnapshotRequest:
        """The message that asks for this part. `nobody_waits`: donors may put others first."""
        return wire.SnapshotRequest(
            stage=stage,
            round_min=round_min,
            sections=self.sections,
            first=self.first,
            count=self.count or 0,
            nobody_waits=nobody_waits,
        )

    def sizes(self, whole: Sizes) -> dict[str, int]:
        """Elements of each section of this part of a state of size `whole`.

        Raises RemoteFault when the state has no such section or not so many elements in it.
        """
        sizes = {}
        for name in self.sections or whole:
            if name not in whole:
                raise RemoteFault(f"section {name} asked of a state of {', '.join(whole)}")
            count = whole[name] - self.first if self.count is None else self.count
            if count < 1 or self.first + count > whole[name]:
                raise RemoteFault(f"elements {self.first} to {self.first + count} asked of {whole[name]} of {name}")
            sizes[name] = count
        return sizes


WHOLE = StateSlice()


def newcomer_part(gossip: GossipSpec, sizes: Sizes) -> StateSlice:
    """The part of a state of `sizes` that a newcomer downloads after the first round: where a round replaces all else,
    what rounds move (model/section.py), 40 to 60 % of the bytes with most settings."""
    return StateSlice(outer_sections(sizes)) if begins_from_slow_weights(gossip) else WHOLE


SLOW = StateSlice(("phi",))
"""The slow weights alone: neighbours give them to rebuild a stage."""


@dataclass(eq=False)
class Snapshot:
    """An immutable copy of a replica's state at the end of round `round_index`.

    The constructor copies and hashes nothing. `manifest` hashes at its first call (0.5 s/GB: not on the event loop).

    `first`: the element of the stage with which its sections begin.
    """

    state: State
    stage: int
    round_index: int
    progress: record_pb2.Progress
    chunk_nbytes: int
    first: int = 0
    line: StateLine = UNBROKEN

    def __post_init__(self) -> None:
        self._sections = [memoryview(section).cast("B").toreadonly() for section in self.state.sections.values()]
        self._ends = list(itertools.accumulate(section.nbytes for section in self._sections))
        self.nbytes = self._ends[-1]
        self._manifest: wire.Snapshot | None = None
        self._whole_sections: dict[tuple[str, ...], Snapshot] = {}  # parts made before: hashed once

    @staticmethod
    def of(
        state: State,
        stage: int,
        round_index: int,
        progress: record_pb2.Progress,
        chunk_nbytes: int = CHUNK_NBYTES,
        line: StateLine = UNBROKEN,
    ) -> Snapshot:
        """A snapshot of `state`, whose sections must not change any more.

        Chunks double in size until CHUNKS_MAX suffice.
        """
        known = tuple(name for name in SECTIONS if name in state.sections)
        assert tuple(state.sections) == known, f"sections {tuple(state.sections)}; a snapshot holds {SECTIONS}"
        nbytes = {name: memoryview(data).nbytes for name, data in state.sections.items()}
        whole = all(size and size % PACKED_ITEMSIZE[name] == 0 for name, size in nbytes.items())
        assert state.packed and whole, f"sections of {nbytes} bytes"
        copy = record_pb2.Progress()
        copy.CopyFrom(progress)
        snapshot = Snapshot(state, stage, round_index, copy, chunk_nbytes, line=line)
        while snapshot.chunks > CHUNKS_MAX:
            snapshot.chunk_nbytes *= 2
        assert 1 <= snapshot.chunk_nbytes <= CHUNK_NBYTES_MAX, f"chunks of {snapshot.chunk_nbytes} bytes"
        return snapshot

    @staticmethod
    def of_offer(offer: wire.Snapshot, state: State, first: int = 0) -> Snapshot:
        """A snapshot of the `state` that came of a checked `offer`, to be given on. Nothing is hashed again."""
        line = StateLine(offer.lost_samples, offer.lost_at_samples)
        snapshot = Snapshot(state, offer.stage, offer.round, offer.progress, offer.chunk_nbytes, first, line)
        snapshot._manifest = offer
        return snapshot

    def part(self, cut: StateSlice) -> Snapshot:
        """A snapshot of a part of this one, sharing its memory; `cut` counts the stage's elements. Raises RemoteFault
        when this one lacks it."""
        whole = cut.first == 0 and cut.count is None
        if whole and (known := self._whole_sections.get(cut.sections)) is not None:
            return known
        sections = {}
        if cut.first < self.first:
            raise RemoteFault(f"elements from {cut.first} asked of a part that begins with {self.first}")
        here = replace(cut, first=cut.first - self.first)
        for name, count in here.sizes(self.sizes).items():
            itemsize = PACKED_ITEMSIZE[name]
            data = memoryview(self.state.sections[name]).cast("B")
            sections[name] = data[itemsize * here.first : itemsize * (here.first + count)]
        counters = self.state.inner_steps, self.state.gradient_norm
        state = State(sections, *counters, bump_steps=self.state.bump_steps, packed=True)
        part = Snapshot.of(state, self.stage, self.round_index, self.progress, self.chunk_nbytes, self.line)
        if whole:
            self._whole_sections[cut.sections] = part
        return part

    @property
    def sizes(self) -> dict[str, int]:
        """Elements of each section."""
        pairs = zip(self.state.sections, self._sections, strict=True)
        return {name: data.nbytes // PACKED_ITEMSIZE[name] for name, data in pairs}

    @property
    def samples(self) -> int:
        """Samples of the run when it was made."""
        return Progress.from_wire(self.progress).total

    @property
    def chunks(self) -> int:
        return math.ceil(self.nbytes / self.chunk_nbytes)

    @property
    def id(self) -> bytes:
        return self.manifest().id

    @property
    def hashed(self) -> bool:
        """Whether `manifest` is at hand."""
        return self._manifest is not None

    def manifest(self) -> wire.Snapshot:
        """The offer that is sent first: everything but the bytes."""
        if self._manifest is None:
            hashes = [hashlib.sha256(self.chunk(index)).digest() for index in range(self.chunks)]
            self._manifest = wire.Snapshot(
                id=snapshot_id(hashes),
                stage=self.stage,
                round=self.round_index,
                nbytes=self.nbytes,
                chunk_nbytes=self.chunk_nbytes,
                hashes=hashes,
                elements=self.sizes.values(),
                sections=self.sizes,
                inner_steps=self.state.inner_steps,
                progress=self.progress,
                gradient_norm=self.state.gradient_norm,
                bump_steps=self.state.bump_steps,
                lost_samples=self.line.lost,
                lost_at_samples=self.line.at,
            )
        return self._manifest

    def chunk(self, index: int) -> memoryview:
        """The bytes of chunk `index`, without a copy unless it crosses from one section to the next."""
        assert 0 <= index < self.chunks, f"chunk {index} of {self.chunks}"
        start = index * self.chunk_nbytes
        parts = list(self._parts(start, min(start + self.chunk_nbytes, self.nbytes)))
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

    def _parts(self, start: int, end: int) -> Iterator[memoryview]:
        first = bisect.bisect_right(self._ends, start)
        for section, its_end in zip(self._sections[first:], self._ends[first:], strict=True):
            if start >= end:
                return
            offset = start - (its_end - section.nbytes)
            part = section[offset : offset + end - start]
            yield part
            start += part.nbytes


def snapshot_id(hashes: Sequence[bytes]) -> bytes:
    """SHA-256 over the chunks' hashes."""
    return hashlib.sha256(b"".join(hashes)).digest()


def check_offer(offer: wire.Snapshot, *, stage: int, sizes: Sizes, nbytes_max: int) -> Progress:
    """The run's progress in `offer`, after every field is checked against the others and against what is expected.

    Nothing is allocated before. Raises RemoteFault that names the field, its value, and what belongs there.
    """
    nbytes = snapshot_nbytes(sizes)
    _expect("stage", offer.stage, stage)
    _expect("sections", tuple(offer.sections), tuple(sizes))
    _expect("elements", tuple(offer.elements), tuple(sizes.values()))
    _expect("nbytes", offer.nbytes, nbytes)
    if nbytes > nbytes_max:
        raise RemoteFault(f"snapshot of {nbytes} bytes; at most {nbytes_max} are accepted here")
    if not 1 <= offer.chunk_nbytes <= CHUNK_NBYTES_MAX:
        raise RemoteFault(f"snapshot in chunks of {offer.chunk_nbytes} bytes; 1 to {CHUNK_NBYTES_MAX} are accepted")
    chunks = math.ceil(nbytes / offer.chunk_nbytes)
    if chunks > CHUNKS_MAX:
        raise RemoteFault(f"snapshot of {chunks} chunks; at most {CHUNKS_MAX}")
    _expect("number of hashes", len(offer.hashes), chunks)
    if any(len(digest) != HASH_BYTES for digest in offer.hashes):
        raise RemoteFault(f"snapshot with a hash that is not {HASH_BYTES} bytes long")
    if offer.id != snapshot_id(offer.hashes):
        raise RemoteFault("snapshot whose id is not the hash of its hashes")
    if offer.round > SAMPLES_MAX or offer.inner_steps > SAMPLES_MAX:
        raise RemoteFault(
            f"snapshot of round {offer.round} after {offer.inner_steps} inner steps; at most {SAMPLES_MAX}"
        )
    if offer.bump_steps > BUMP_STEPS_MAX:
        raise RemoteFault(f"snapshot with {offer.bump_steps} steps at a higher rate; at most {BUMP_STEPS_MAX}")
    if not (math.isfinite(offer.gradient_norm) and offer.gradient_norm >= 0.0):
        raise RemoteFault(f"snapshot with gradient norm {offer.gradient_norm}; finite and at least 0 is due")
    return Progress.from_wire(offer.progress)


def chunk_span(offer: wire.Snapshot, index: int) -> tuple[int, int]:
    """(first byte, one past the last) of chunk `index` of a checked offer."""
    assert 0 <= index < len(offer.hashes), f"chunk {index} of {len(offer.hashes)}"
    start = index * offer.chunk_nbytes
    return start, min(start + offer.chunk_nbytes, offer.nbytes)


def check_chunk(offer: wire.Snapshot, index: int, data: memoryview | bytes | bytearray) -> None:
    """Raise RemoteFault unless `data` is chunk `index` of the checked `offer`."""
    start, end = chunk_span(offer, index)
    nbytes = memoryview(data).nbytes
    if nbytes != end - start:
        raise RemoteFault(f"chunk {index} of {nbytes} bytes; {end - start} belong there")
    if hashlib.sha256(data).digest() != offer.hashes[index]:
        raise RemoteFault(f"chunk {index} of snapshot {offer.id[:4].hex()} does not have the hash announced")


def assemble(offer: wire.Snapshot, data: memoryview | bytes | bytearray, *, verify: bool = True) -> State:
    """The state in `data`, all bytes of the checked `offer`, shared and not copied.

    Raises RemoteFault for bytes of another length or, with `verify`, another hash. `Replica.load` checks the numbers.
    """
    whole = memoryview(data).cast("B").toreadonly()
    if whole.nbytes != offer.nbytes:
        raise RemoteFault(f"snapshot of {whole.nbytes} bytes; {offer.nbytes} were announced")
    if verify:
        for index in range(len(offer.hashes)):
            start, end = chunk_span(offer, index)
            check_chunk(offer, index, whole[start:end])
    sizes = [count * PACKED_ITEMSIZE[name] for name, count in zip(offer.sections, offer.elements, strict=True)]
    spans = itertools.pairwise([0, *itertools.accumulate(sizes)])
    sections = {name: whole[start:end] for name, (start, end) in zip(offer.sections, spans, strict=True)}
    return State(sections, offer.inner_steps, offer.gradient_norm, bump_steps=offer.bump_steps, packed=True)


def mixed(offers: Sequence[wire.Snapshot]) -> wire.Snapshot:
    """The offer of a state whose chunk i comes from `offers[i]`, all of one size.

    It is the offer of the oldest part, with the hashes of all parts.
    """
    oldest = min(offers, key=lambda offer: (offer.round, offer.inner_steps))
    if all(offer is oldest for offer in offers):
        return oldest
    whole = wire.Snapshot()
    whole.CopyFrom(oldest)
    del whole.hashes[:]
    whole.hashes.extend([offer.hashes[index] for index, offer in enumerate(offers)])
    whole.id = snapshot_id(whole.hashes)
    return whole


def _expect(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise RemoteFault(f"snapshot whose {what} is {str(found)[:80]}; {expected} belongs there")

"""Snapshots as bytes: cut, hashed, offered, checked, put together."""

import hashlib
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.base.errors import RemoteFault
from swarmnode.base.ids import digest
from swarmnode.base.ports import State
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.keep.transfer import snapshot as module
from swarmnode.keep.transfer.snapshot import Snapshot, StateSlice, assemble, check_chunk, check_offer, chunk_span
from swarmnode.model.section import Sizes, snapshot_nbytes
from swarmnode.net.membership.progress import to_message
from tests.support.sections import PACKED_ITEMSIZE, SECTIONS

TEN = dict.fromkeys(SECTIONS, 10)


def state(sizes: Sizes, seed: int = 0) -> State:
    """Sections of bytes that mean nothing, all different."""
    sections = {
        name: memoryview(b"".join(digest(seed, name, i) for i in range(count // 8 + 1))[: itemsize * count])
        for name, count in sizes.items()
        for itemsize in (PACKED_ITEMSIZE[name],)
    }
    return State(sections, inner_steps=17, gradient_norm=0.5, packed=True)


def snapshot(sizes: Sizes = TEN, chunk_nbytes: int = 64) -> Snapshot:
    return Snapshot.of(state(sizes), 2, 7, to_message({"A": 900}), chunk_nbytes)


def offer() -> wire.Snapshot:
    copy = wire.Snapshot()
    copy.CopyFrom(snapshot().manifest())
    return copy


@given(st.integers(1, 60), st.integers(1, 60), st.booleans(), st.integers(1, 300))
def test_there_and_back(parameters: int, seconds: int, momentum: bool, chunk_nbytes: int) -> None:
    """Of every make of a run: sections differ in size, and momentum may be missing."""
    sizes = dict.fromkeys(SECTIONS, parameters) | {"exp_avg_sq": seconds}
    if not momentum:
        del sizes["momentum"]
    given_state = state(sizes)
    whole = b"".join(given_state.sections.values())  # the twin: everything in one piece
    found = Snapshot.of(given_state, 2, 7, to_message({"A": 900}), chunk_nbytes)
    pieces = [whole[start : start + chunk_nbytes] for start in range(0, len(whole), chunk_nbytes)]
    assert [bytes(found.chunk(index)) for index in range(found.chunks)] == pieces
    manifest = found.manifest()
    assert found.manifest() is manifest
    assert list(manifest.hashes) == [hashlib.sha256(piece).digest() for piece in pieces]
    assert manifest.id == hashlib.sha256(b"".join(manifest.hashes)).digest() == found.id
    assert check_offer(manifest, stage=2, sizes=sizes, nbytes_max=len(whole)).total == 900
    assert found.sizes == sizes and len(whole) == snapshot_nbytes(sizes)
    for index, piece in enumerate(pieces):
        start, end = chunk_span(manifest, index)
        assert whole[start:end] == piece
        check_chunk(manifest, index, piece)
    back = assemble(manifest, bytearray(whole))
    assert list(back.sections) == list(sizes)
    assert {name: bytes(part) for name, part in back.sections.items()} == {
        name: bytes(part) for name, part in given_state.sections.items()
    }
    assert (back.inner_steps, back.gradient_norm) == (17, 0.5)


def test_a_large_state_gets_larger_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNKS_MAX", 16)
    found = snapshot(dict.fromkeys(SECTIONS, 100), chunk_nbytes=10)
    assert found.chunk_nbytes == 80 and found.chunks == 15


def spoil(**fields: object) -> Callable[[wire.Snapshot], None]:
    def change(found: wire.Snapshot) -> None:
        for name, value in fields.items():
            setattr(found, name, value)

    return change


def reorder(found: wire.Snapshot) -> None:
    found.sections[0], found.sections[1] = found.sections[1], found.sections[0]


def widen(found: wire.Snapshot) -> None:
    found.elements[4] = 11


def narrow(found: wire.Snapshot) -> None:
    del found.elements[4]


def swap_hashes(found: wire.Snapshot) -> None:
    found.hashes[0], found.hashes[1] = found.hashes[1], found.hashes[0]


def short_hash(found: wire.Snapshot) -> None:
    found.hashes[1] = b"123"


def absurd_progress(found: wire.Snapshot) -> None:
    found.progress.samples[0] = 2**60


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (spoil(stage=3), "stage is 3; 2 belongs"),
        (widen, "elements is .*10, 10, 11.; .10, 10, 10, 10, 10. belongs"),
        (narrow, "elements is .10, 10, 10, 10.; .10, 10, 10, 10, 10. belongs"),
        (spoil(nbytes=2**63), "nbytes is 9223372036854775808; 120 belongs"),
        (spoil(chunk_nbytes=0), "chunks of 0 bytes"),
        (spoil(chunk_nbytes=2**31), "chunks of 2147483648 bytes"),
        (spoil(chunk_nbytes=32), "number of hashes is 2; 4 belongs"),
        (spoil(id=b"x" * 32), "id is not the hash"),
        (spoil(round=2**60), "round 1152921504606846976"),
        (spoil(inner_steps=2**60), "1152921504606846976 inner steps"),
        (spoil(gradient_norm=math.nan), "gradient norm nan"),
        (spoil(gradient_norm=-1.0), "gradient norm -1"),
        (reorder, "sections is"),
        (swap_hashes, "id is not the hash"),
        (short_hash, "not 32 bytes"),
        (absurd_progress, "progress of 1152921504606846976 samples"),
    ],
)
def test_an_offer_that_contradicts_itself_is_refused(change: Callable[[wire.Snapshot], None], words: str) -> None:
    bad = offer()
    change(bad)
    with pytest.raises(RemoteFault, match=words):
        check_offer(bad, stage=2, sizes=TEN, nbytes_max=10**9)


def test_an_offer_too_large_is_refused() -> None:
    with pytest.raises(RemoteFault, match="120 bytes; at most 119"):
        check_offer(offer(), stage=2, sizes=TEN, nbytes_max=119)


def test_wrong_bytes_are_refused() -> None:
    found = offer()
    whole = bytearray(b"".join(state(TEN).sections.values()))
    whole[119] ^= 1
    with pytest.raises(RemoteFault, match=r"chunk 1 .* hash"):
        assemble(found, whole)
    with pytest.raises(RemoteFault, match="119 bytes; 120"):
        assemble(found, whole[:119])
    with pytest.raises(RemoteFault, match="chunk 0 of 63 bytes; 64 belong"):
        check_chunk(found, 0, whole[:63])


def test_a_part_is_cut_from_each_section_as_it_is() -> None:
    sizes = {"theta": 10, "phi": 10, "exp_avg": 10, "exp_avg_sq": 3}
    whole = snapshot(sizes)
    part = whole.part(StateSlice(("phi", "exp_avg_sq"), 1, 2))
    assert part.sizes == {"phi": 2, "exp_avg_sq": 2}
    assert bytes(part.state.sections["exp_avg_sq"]) == bytes(whole.state.sections["exp_avg_sq"])[2:6]
    assert whole.part(StateSlice(first=2)).sizes == {"theta": 8, "phi": 8, "exp_avg": 8, "exp_avg_sq": 1}
    for cut, words in (
        (StateSlice(("momentum",)), "section momentum asked of a state of theta, phi, exp_avg, exp_avg_sq"),
        (StateSlice(("phi", "exp_avg_sq"), 2, 2), "elements 2 to 4 asked of 3 of exp_avg_sq"),
        (StateSlice(first=3), "elements 3 to 3 asked of 3 of exp_avg_sq"),
        (StateSlice(first=1 << 62, count=1 << 62), "asked of 10 of theta"),
    ):
        with pytest.raises(RemoteFault, match=words):
            whole.part(cut)


def test_a_part_of_a_part_counts_the_stages_elements() -> None:
    """A keeper of a head alone could not give it: it took the request for one of its own first elements."""
    whole = snapshot(dict.fromkeys(SECTIONS, 100))
    head = StateSlice(("phi",), 40, 60)
    given = whole.part(head)
    kept = Snapshot.of_offer(given.manifest(), given.state, head.first)
    for first, count in ((40, 60), (50, 10), (99, 1)):
        cut = StateSlice(("phi",), first, count)
        assert kept.part(cut).state.sections["phi"] == whole.part(cut).state.sections["phi"]
    for first, count in ((39, 5), (0, 60), (50, 51)):
        with pytest.raises(RemoteFault, match="asked of"):
            kept.part(StateSlice(("phi",), first, count))

"""Snapshots as bytes: cut, hashed, offered, checked, put together."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import RemoteFault
from swarmnode.ids import digest
from swarmnode.membership.progress import to_message
from swarmnode.ports import State
from swarmnode.recovery import snapshot as module
from swarmnode.recovery.snapshot import (
    PACKED_ITEMSIZE,
    SECTIONS,
    Snapshot,
    assemble,
    check_chunk,
    check_offer,
    chunk_span,
)
from swarmnode.wire import call_pb2 as wire
from swarmnode.wire import record_pb2


def state(parameters: int, seed: int = 0) -> State:
    """Sections of bytes that mean nothing, all different."""
    sections = {
        name: memoryview(b"".join(digest(seed, name, i) for i in range(parameters // 8 + 1))[: size * parameters])
        for name, size in PACKED_ITEMSIZE.items()
    }
    return State(sections, inner_steps=17, gradient_norm=0.5, packed=True)


def snapshot(parameters: int = 10, chunk_nbytes: int = 64) -> Snapshot:
    return Snapshot.of(state(parameters), 2, 7, to_message({"A": 900}), chunk_nbytes)


def offer() -> wire.Snapshot:
    copy = wire.Snapshot()
    copy.CopyFrom(snapshot().manifest())
    return copy


@given(st.integers(1, 60), st.integers(1, 300))
def test_there_and_back(parameters: int, chunk_nbytes: int) -> None:
    given_state = state(parameters)
    whole = b"".join(given_state.sections.values())  # the twin: everything in one piece
    found = Snapshot.of(given_state, 2, 7, to_message({"A": 900}), chunk_nbytes)
    pieces = [whole[start : start + chunk_nbytes] for start in range(0, len(whole), chunk_nbytes)]
    assert [bytes(found.chunk(index)) for index in range(found.chunks)] == pieces
    manifest = found.manifest()
    assert found.manifest() is manifest
    assert list(manifest.hashes) == [hashlib.sha256(piece).digest() for piece in pieces]
    assert manifest.id == hashlib.sha256(b"".join(manifest.hashes)).digest() == found.id
    assert check_offer(manifest, stage=2, parameters=parameters, nbytes_max=len(whole)).total == 900
    for index, piece in enumerate(pieces):
        start, end = chunk_span(manifest, index)
        assert whole[start:end] == piece
        check_chunk(manifest, index, piece)
    back = assemble(manifest, bytearray(whole))
    assert tuple(back.sections) == SECTIONS
    assert {name: bytes(part) for name, part in back.sections.items()} == {
        name: bytes(part) for name, part in given_state.sections.items()
    }
    assert (back.inner_steps, back.gradient_norm) == (17, 0.5)


def test_chunks_inside_a_section_are_not_copied() -> None:
    data = {name: bytearray(1000 * size) for name, size in PACKED_ITEMSIZE.items()}
    given_state = State({name: memoryview(part) for name, part in data.items()}, 0, 0.0, packed=True)
    found = Snapshot.of(given_state, 0, 0, record_pb2.Progress(), 1000)
    assert found.chunk(3).obj is data["phi"] and found.chunk(3).readonly


def test_a_large_state_gets_larger_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNKS_MAX", 16)
    found = snapshot(parameters=100, chunk_nbytes=10)
    assert found.chunk_nbytes == 80 and found.chunks == 15


def spoil(**fields: object) -> Callable[[wire.Snapshot], None]:
    def change(found: wire.Snapshot) -> None:
        for name, value in fields.items():
            setattr(found, name, value)

    return change


def reorder(found: wire.Snapshot) -> None:
    found.sections[0], found.sections[1] = found.sections[1], found.sections[0]


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
        (spoil(parameters=11), "parameters is 11; 10 belongs"),
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
        check_offer(bad, stage=2, parameters=10, nbytes_max=10**9)


def test_an_offer_too_large_is_refused() -> None:
    with pytest.raises(RemoteFault, match="120 bytes; at most 119"):
        check_offer(offer(), stage=2, parameters=10, nbytes_max=119)


def test_wrong_bytes_are_refused() -> None:
    found = offer()
    whole = bytearray(b"".join(state(10).sections.values()))
    whole[119] ^= 1
    with pytest.raises(RemoteFault, match=r"chunk 1 .* hash"):
        assemble(found, whole)
    with pytest.raises(RemoteFault, match="119 bytes; 120"):
        assemble(found, whole[:119])
    with pytest.raises(RemoteFault, match="chunk 0 of 63 bytes; 64 belong"):
        check_chunk(found, 0, whole[:63])


def test_progress_is_copied() -> None:
    progress = to_message({"A": 1})
    found = Snapshot.of(state(3), 0, 0, progress)
    progress.samples[0] = 2
    assert found.manifest().progress.samples[:] == [1]

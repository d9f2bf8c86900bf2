"""The book of records: a flood of keys costs a bounded number of signature checks and takes nobody's place."""

import random

import pytest

from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId
from swarmnode.base.wire import record_pb2 as wire
from swarmnode.net.membership import record as records
from swarmnode.net.membership.record import sign_record
from swarmnode.net.transport import record_book
from swarmnode.net.transport.record_book import (
    CHECKS_BURST,
    CHECKS_PER_S,
    PLACE_MAX,
    STRANGERS_MAX,
    RecordBook,
    mark_of,
)
from tests.support.transport_contract import RUN, record_of

NOW = 1_700_000_000.0
ME = Identity.of_seed(bytes(32))
CHANCE = random.Random(0)


def signed(identity: Identity, now_s: float = NOW, ttl_s: float = 60.0, stage: int = 0) -> wire.SignedRecord:
    return sign_record(record_of(identity, now_s, stage=stage, ttl_s=ttl_s), identity)


def keys(count: int, first: int = 1) -> list[Identity]:
    return [Identity.of_seed(number.to_bytes(4, "big") * 8) for number in range(first, first + count)]


def told(book: RecordBook, had: dict[int, int], most: int = 0) -> list[wire.SignedRecord]:
    """An answer of `book` about place 0."""
    return book.news(0, had, NOW, most, CHANCE)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[wire.SignedRecord]:
    """Every record whose signature the book has checked; all are found valid, so that a test need not sign each."""
    found: list[wire.SignedRecord] = []

    def check(told: wire.SignedRecord, *, run_id: str) -> wire.Record:
        found.append(told)
        return wire.Record.FromString(told.record)

    monkeypatch.setattr(record_book, "check_record", check)
    return found


def unsigned(number: int, now_s: float = NOW, ttl_s: float = 60.0) -> wire.SignedRecord:
    record = record_of(ME, now_s, ttl_s=ttl_s)
    record.peer_id = f"key {number}"
    return wire.SignedRecord(record=record.SerializeToString(), signature=bytes(64))


def test_the_newest_valid_record_of_each_peer_is_known_until_it_expires() -> None:
    book = RecordBook(RUN, 2, 100.0)
    one, other = keys(2)
    old = signed(one, ttl_s=10.0)
    new = signed(one, ttl_s=20.0)
    assert book.take(0, old, NOW) and book.take(0, new, NOW) and book.take(0, new, NOW)
    assert not book.take(0, old, NOW), "an older one"
    assert not book.take(0, signed(other, stage=1), NOW), "one of another place"
    assert not book.take(0, signed(other, ttl_s=200.0), NOW), "one that lives too long"
    assert not book.take(0, signed(other, ttl_s=-1.0), NOW), "an expired one"
    assert not book.take(0, wire.SignedRecord(record=b"\xff", signature=bytes(64)), NOW)
    assert not book.take(0, wire.SignedRecord(record=signed(other).record, signature=bytes(64)), NOW), "a forged one"
    assert not book.take(None, signed(other), NOW, of=PeerId(one.peer_id)), "of another peer than it came from"
    assert [record.signed for record in book.known(0, NOW).values()] == [new]
    assert book.take(None, signed(other, stage=1), NOW, of=PeerId(other.peer_id)) and len(book.known(1, NOW)) == 1
    assert not book.known(0, NOW + 20.1)


def test_a_reader_gets_what_it_lacks() -> None:
    book = RecordBook(RUN, 1, 100.0)
    one, other = keys(2)
    book.take_all(0, [signed(one), signed(other)], NOW)
    had = {mark_of(peer): record.expires_unix_ms for peer, record in book.known(0, NOW).items()}
    assert len(told(book, {})) == 2 and told(book, had) == []
    newer = signed(one, ttl_s=70.0)
    assert book.take(0, newer, NOW)
    assert told(book, had) == [newer]
    reader = RecordBook(RUN, 1, 100.0)
    assert reader.take_all(0, told(book, {}), NOW) == 2 and reader.known(0, NOW).keys() == {
        one.peer_id,
        other.peer_id,
    }


def test_a_flood_of_keys_costs_a_bounded_number_of_checks(checked: list[wire.SignedRecord]) -> None:
    book = RecordBook(RUN, 1, 100.0)
    known = [unsigned(number) for number in range(-100, 0)]
    assert book.take_all(0, known, NOW) == len(known)
    before = len(checked)
    for number in range(3 * PLACE_MAX):
        book.take(0, unsigned(number), NOW)
    assert len(checked) - before <= CHECKS_BURST / 2
    for number in range(20_000):
        book.take(0, unsigned(10_000 + number), NOW + number / 1000)
    assert len(checked) - before <= CHECKS_BURST / 2 + 20 * CHECKS_PER_S + 1
    assert len(book.known(0, NOW)) <= PLACE_MAX
    renewed = [unsigned(number, ttl_s=61.0) for number in range(-100, 0)]
    assert book.take_all(0, renewed, NOW + 20.0) == len(renewed), "those known before are renewed beside the flood"


def test_peers_seen_at_work_come_first_and_pay_nothing(checked: list[wire.SignedRecord]) -> None:
    book = RecordBook(RUN, 1, 100.0)
    for number in range(3 * PLACE_MAX):
        book.take(0, unsigned(number), NOW)
    book.works = lambda peer: peer.startswith("key -")
    workers = [unsigned(number) for number in range(-300, 0)]
    assert book.take_all(0, workers, NOW) == len(workers)
    first = told(book, {})
    assert len(first) == record_book.NEWS_MAX and all(one in workers for one in first)
    few = told(book, {}, 8)
    assert len(few) == 8 and all(one in workers for one in few)
    assert told(book, {}, 8) != few, "each reader hears of others"
    assert len(told(book, {}, PLACE_MAX)) == record_book.NEWS_MAX
    book.doubtful = lambda: True
    assert len(book.known(0, NOW)) == len(workers) + STRANGERS_MAX


def test_no_signature_is_checked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    book = RecordBook(RUN, 1, 100.0)
    count = 0
    one = signed(keys(1)[0])
    records._verified.clear()  # as if it had been signed elsewhere

    def counted(*told: object) -> bool:
        nonlocal count
        count += 1
        return True

    monkeypatch.setattr(records, "verify", counted)
    assert all(book.take(0, one, NOW) for _ in range(5)) and count == 1

"""A second process with a node's key: it is known by records that go on, and never by old ones."""

from dataclasses import dataclass

from swarmnode.base.wire import record_pb2
from swarmnode.net.membership.twin import TwinWatch

TTL_S = 15.0
BEGAN_S = 1000.0


@dataclass
class Life:
    """A process with the key, which began at `began_s`."""

    began_s: float

    def record(self, signed_s: float, **fields: object) -> record_pb2.Record:
        stretch = int(str(fields.get("stretch", 0)))
        return record_pb2.Record(
            joined_unix_ms=int(self.began_s * 1000),
            expires_unix_ms=int((signed_s + max(1, stretch) * TTL_S) * 1000),
            **{"state": record_pb2.NODE_STATE_TRAINING, **fields},  # type: ignore[arg-type]
        )


def watch() -> TwinWatch:
    return TwinWatch(int(BEGAN_S * 1000), TTL_S)


def test_a_key_that_goes_on_signing_is_a_twin_and_the_later_process_stands_aside() -> None:
    for began_s, yields in ((900.0, True), (1100.0, False)):
        twins = watch()
        other = Life(began_s)
        assert not twins.lives(other.record(1200.0), 1201.0), "it may have ended since"
        assert not twins.lives(other.record(1202.0), 1203.0)
        assert twins.lives(other.record(1206.0), 1207.0)
        assert twins.yields(other.record(1206.0)) is yields


def test_a_record_that_is_shown_again_and_again_is_no_twin() -> None:
    twins = watch()
    old = Life(900.0).record(999.5)
    assert not any(twins.lives(old, BEGAN_S + step) for step in range(200))
    assert twins.former(old)


def test_a_record_that_tells_of_rare_ones_is_as_old_as_it_is() -> None:
    twins = watch()
    old = Life(900.0).record(999.0, stretch=20)
    assert not any(twins.lives(old, BEGAN_S + step) for step in range(200))


def test_a_killed_process_whose_clock_was_ahead_is_no_twin() -> None:
    twins = watch()
    old = Life(900.0).record(BEGAN_S + 2.9)
    assert not any(twins.lives(old, BEGAN_S + step) for step in range(60))


def test_a_node_that_says_goodbye_is_no_twin() -> None:
    twins = watch()
    other = Life(900.0)
    for step in range(20):
        leaving = other.record(BEGAN_S + step, state=record_pb2.NODE_STATE_DRAINING)
        assert not twins.lives(leaving, BEGAN_S + step)


def test_own_records_are_known_and_an_exact_copy_is_told_apart() -> None:
    twins = watch()
    twins.signs(b"mine")
    assert twins.is_own(record_pb2.SignedRecord(signature=b"mine"))
    assert not twins.is_own(record_pb2.SignedRecord(signature=b"other"))
    copies = [watch(), watch()]
    for copy, drawn in zip(copies, (0.1, 0.7), strict=True):
        copy.begin_again(1200.0, lambda drawn=drawn: drawn)  # type: ignore[misc]
    before = Life(BEGAN_S)
    first = Life(copies[0].began_ms / 1000)
    second = Life(copies[1].began_ms / 1000)
    for copy, other in zip(copies, (second, first), strict=True):
        for step in range(10):
            assert not copy.lives(before.record(1200.0 + step), 1200.0 + step), "what both said before"
        assert not copy.lives(other.record(1201.0), 1202.0) and copy.lives(other.record(1206.0), 1207.0)
    assert copies[1].yields(first.record(1206.0)) and not copies[0].yields(second.record(1206.0))

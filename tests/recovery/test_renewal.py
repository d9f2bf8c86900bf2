"""Copies of a state are as fresh as is asked, and as line and disk carry it."""

from swarmnode.keep.recovery.renewal import RenewalTimer
from swarmnode.run.manifest import RecoverySpec

SPEC = RecoverySpec(snapshot_seconds=60.0, snapshot_part=0.01)


def made(samples: int, least_s: float) -> RenewalTimer:
    timer = RenewalTimer(SPEC)
    assert timer.due(0.0, samples)[0], "the first copy is due at once"
    timer.made(0.0, samples, least_s)
    return timer


def test_a_copy_is_at_most_a_minute_or_one_per_cent_of_the_run_behind() -> None:
    timer = made(1000, 0.0)
    assert not timer.due(5.0, 1009)[0]
    assert timer.due(5.0, 1011)[0], "one per cent"
    assert timer.due(60.0, 1001)[0], "a minute"
    assert not timer.due(1e6, 1000)[0], "nothing was trained since"


def test_no_copy_is_made_sooner_than_line_or_disk_carry_it() -> None:
    timer = made(1000, 300.0)
    assert not timer.due(299.0, 10_000)[0]
    assert timer.due(300.0, 1001)[0]

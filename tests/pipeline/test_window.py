"""The feeder's window settles where every machine is at work and little waits."""

import pytest

from swarmnode.pipeline.microbatch_size import QUEUED_HIGH, Window


def pipeline(window: Window, knee: float, completions: int, service_s: float = 1.0) -> list[int]:
    """Sizes of `window` over a pipeline that carries `knee` microbatches without queueing: more only wait."""
    sizes = []
    for _ in range(completions):
        round_trip_s = service_s * max(1.0, window.size / knee)
        window.record_trip(round_trip_s, round_trip_s - service_s)
        sizes.append(window.size)
    return sizes


@pytest.mark.parametrize("knee", [1, 2, 4, 8, 32])
def test_it_settles_a_little_above_the_knee(knee: int) -> None:
    settled = pipeline(Window(1.0, 64), knee, 2000)[1000:]
    assert min(settled) >= knee
    assert max(settled) <= knee + QUEUED_HIGH + 2


def test_slow_replicas_are_not_mistaken_for_queues() -> None:
    """Round trips of 1 s and 5 s without any waiting: nothing says that less should be under way."""
    window = Window(4.0, 64)
    for index in range(200):
        window.record_trip(5.0 if index % 2 else 1.0, 0.0)
    assert window.size == 64


def test_more_machines_to_supply_mean_more_under_way() -> None:
    few, many = Window(4.0, 64), Window(4.0, 64)
    for _ in range(500):
        few.record_trip(2.0, 1.0, 1.0)
        many.record_trip(2.0, 1.0, 5.0)
    assert few.size < 8 < many.size


def test_bounds_and_losses() -> None:
    window = Window(3.0, 4)
    for _ in range(100):
        window.record_trip(1.0, 0.0)
    assert window.size == 4
    window.record_loss()
    assert window.size == 2
    for _ in range(10):
        window.record_loss()
    assert window.size == 1


def test_losses_at_once_halve_the_window_once() -> None:
    window = Window(40.0, 64)
    for _ in range(20):
        window.record_loss()
    assert window.size == 20
    for _ in range(20):
        window.record_trip(1.0, 1.0)
    window.record_loss()
    assert window.size < 11, "a round trip later it is another loss"


def test_where_many_machines_are_short_of_work_it_grows_by_more_than_one_a_round_trip() -> None:
    window = Window(16.0, 64)
    window.record_trip(1.0, 0.5, machines=8.0)  # one waits for each: the doubling is over
    window.record_loss()
    assert window.size == 8
    for _ in range(24):  # about two round trips
        window.record_trip(1.0, 0.5, machines=8.0)
    assert 13 <= window.size <= 16, "one more in each round trip would have made 10 of them"


def test_a_path_that_becomes_slower_does_not_shrink_it() -> None:
    window = Window(4.0, 64)
    pipeline(window, 8, 500, service_s=0.001)
    before = window.size
    pipeline(window, 8, 600, service_s=1.0)
    assert abs(window.size - before) <= 2

"""A clock that is set while a node runs: what is followed, what is told, and that time goes on evenly."""

import asyncio

import pytest
from hivemind.utils import timed_storage

from swarmnode.app.daemon.clock import STEP_S, SystemClock, judge, watch_clock
from swarmnode.net.transport import hivemind_patches
from swarmnode.net.transport.call_directory import surely_ahead_s
from tests.support.fake_telemetry import Quiet

WENT_BACK = "went back 3600 s"


@pytest.mark.parametrize(
    ("step_s", "ahead_s", "met", "follow", "said"),
    [
        (0.2, [0.0, 0.1], True, True, ""),
        (-3600.0, [0.0, 0.1], True, False, WENT_BACK),
        (3600.0, [0.0], True, False, "went forward 3600 s"),
        (-3600.0, [-3600.0, -3599.0, 0.0], True, True, ""),  # it was wrong before, and now it is right
        (-3600.0, [], True, False, WENT_BACK),  # the network is down
        (-3600.0, [], False, True, ""),  # alone in the world
        (-3600.0, [-3600.0, 0.0], True, False, WENT_BACK),  # a liar against an honest peer sets no clock
        (-3600.0, [-1e9, -1e9, -1e9], True, True, "ahead of its peers'"),
        (0.0, [40.0, 41.0, 0.0], True, True, "40 s behind its peers'"),
        (0.0, [40.0, 0.0], True, True, ""),
    ],
)
def test_the_machines_clock_is_followed_where_peers_agree_with_it(
    step_s: float, ahead_s: list[float], met: bool, follow: bool, said: str
) -> None:
    followed, fault = judge(step_s, ahead_s, met)
    assert followed == follow
    assert said in fault
    assert bool(said) == bool(fault)


@pytest.mark.loop("virtual")
async def test_a_clock_set_back_while_running_is_told_once_and_time_goes_on() -> None:
    loop = asyncio.get_running_loop()
    skew_s = [0.0]
    peers = [0.0]
    clock = SystemClock(lambda: 1.7e9 + loop.time() + skew_s[0], loop.time)
    telemetry = Quiet()

    async def ask() -> list[float]:
        return [1.7e9 + loop.time() + peer - clock.unix_s() for peer in peers]

    def events() -> list[str]:
        return [event for event, _ in telemetry.events if event.startswith("clock.")]

    watching = asyncio.create_task(watch_clock(clock, ask, telemetry, 10.0))
    for skew_s[0] in (0.0, -3600.0, -3600.0, 7200.0):
        before = clock.unix_s()
        await asyncio.sleep(30.0)
        assert clock.unix_s() == pytest.approx(before + 30.0), "records and passes live on as before"
    assert events() == ["clock.wrong"]
    assert "forward 7200 s" in clock.fault
    skew_s[0] = 0.4  # by NTP
    await asyncio.sleep(30.0)
    assert events() == ["clock.wrong", "clock.right"]
    assert not clock.fault
    assert abs(clock.unix_s() - 1.7e9 - loop.time() - 0.4) < STEP_S
    peers[0] = skew_s[0] = 500.0  # a virtual machine that was stopped: all others went on
    await asyncio.sleep(30.0)
    assert clock.unix_s() == pytest.approx(1.7e9 + loop.time() + 500.0)
    assert events()[2:] == ["clock.followed"]
    watching.cancel()


def test_the_directory_lives_by_the_nodes_clock() -> None:
    kept = timed_storage.get_dht_time
    try:
        hivemind_patches.keep_time(lambda: 5.0)
        storage: timed_storage.TimedStorage[str, int] = timed_storage.TimedStorage()
        assert storage.store("early", 1, 6.0)
        assert not storage.store("late", 1, 4.0)
    finally:
        hivemind_patches.keep_time(kept)


@pytest.mark.parametrize(
    ("theirs_s", "ahead_s"),
    [(100.0, 0.0), (108.0, 0.0), (104.0, 0.0), (111.5, 3.5), (95.5, -4.5)],
)
def test_an_answer_that_took_long_proves_no_wrong_clock(theirs_s: float, ahead_s: float) -> None:
    """A loaded machine heard an answer after eight seconds, and said that its clock was four seconds ahead."""
    assert surely_ahead_s(theirs_s, 100.0, 108.0) == ahead_s

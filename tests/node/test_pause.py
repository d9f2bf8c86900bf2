"""A replica stands aside and comes back: in whole nodes; and a regulator that decides when, on a clock of our own."""

import asyncio

import pytest

from swarmnode.base.errors import Unavailable
from swarmnode.base.wire import record_pb2
from swarmnode.train.node.limits import Limits, SensorReading, change
from swarmnode.train.node.pause import PauseControl, StageSlot
from swarmnode.train.node.regulator import Regulator
from tests.node.test_gradient import run_of
from tests.support.fake_telemetry import Quiet
from tests.support.village import Villager, manifest, village

NOON = 1_700_000_000 // 86_400 * 86_400 + 43_200


def trains(person: Villager) -> bool:
    return person.node.state == record_pb2.NODE_STATE_TRAINING


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.nightly)])
async def test_a_replica_pauses_catches_up_and_goes_on(stage: int) -> None:
    async with village(manifest(stages=2), stages=(0, 1, 0, 1)) as v:
        await v.until(lambda: all(map(trains, v.people)) and v.total() > 64, "everybody trains")
        aside = next(person for person in v.people if person.node.stage == stage)
        await aside.node.pause_control.apply(False, "asked to")
        assert aside.node.pause_control.paused
        await aside.served.held_work.emptied()
        steps = aside.served.hop.inner_steps
        rounds = aside.served.gossip.done
        before = v.total()
        others = [person for person in v.people if person is not aside]
        await v.until(
            lambda: v.total() > before + 3 * 128 and all(o.served.gossip.done > rounds + 1 for o in others),  # type: ignore[union-attr]
            "the others go on without it",
        )
        assert aside.served.hop.inner_steps <= steps + 1, "it does nothing meanwhile"
        assert aside.served.gossip.done <= rounds + 1
        # As a regulator does it: asked again until it is so.
        while not trains(aside):
            await aside.node.pause_control.apply(True, "resumed")
        assert aside.served.gossip.done > rounds, "it took the rounds it had missed from another"
        steps = aside.served.hop.inner_steps
        await v.until(lambda: aside.served.hop.inner_steps > steps + 1, "it works again")  # type: ignore[union-attr]
        lost = sum(p.quiet.total("swarmnode_microbatches_total", outcome="lost") for p in v.people)
        assert lost == 0


async def test_a_round_that_a_pause_interrupts_ends_before_another_state_is_taken() -> None:
    async with village(manifest(stages=2), stages=(0, 1, 0, 1)) as v:
        await v.until(lambda: all(map(trains, v.people)) and v.total() > 64, "everybody trains")
        aside, partner = (person.node for person in v.people if person.node.stage == 1)
        assert aside.served is not None and partner.served is not None
        gossip = aside.served.gossip
        partner.served.gossip.hold(True)  # the round waits for it
        await v.until(lambda: not gossip.idle.is_set(), "a round is under way")
        await aside.pause_control.apply(False, "asked to")
        assert not gossip.idle.is_set()
        partner.served.gossip.hold(False)
        while aside.state != record_pb2.NODE_STATE_TRAINING:
            await aside.pause_control.apply(True, "resumed")
        done = gossip.done
        await v.until(lambda: gossip.done > done + 1, "it meets again")


class Sky:
    """A machine whose readings are written by the test."""

    def __init__(self) -> None:
        self.reading = SensorReading(NOON, 0)

    async def __call__(self, limits: Limits) -> SensorReading:
        now = NOON + asyncio.get_running_loop().time()
        return SensorReading(now, 0, used_nbytes=self.reading.used_nbytes, temperature_c=self.reading.temperature_c)


class FakePresence:
    """Just enough of node.presence.Presence: a state and who is told."""

    def __init__(self) -> None:
        self.status = self
        self.own = self
        self.state = record_pb2.NODE_STATE_TRAINING
        self.stage = 0
        self.allowance: record_pb2.Allowance | None = None
        self.said: list[tuple[float, int]] = []

    def note_of_machine(self, allowance: record_pb2.Allowance | None, gives: bool) -> None:
        self.allowance = allowance

    def set_state(self, state: int, reason: str) -> None:
        self.state = state  # type: ignore[assignment]
        self.said.append((asyncio.get_running_loop().time(), state))


@pytest.mark.loop("virtual")
async def test_hours_and_people_on_the_simulated_clock() -> None:
    """Two days: hours 22-07, a snooze at night; every change of state within a second of when it is due."""
    presence = FakePresence()
    quiet = Quiet()
    pause_control = PauseControl(presence, StageSlot(), quiet)  # type: ignore[arg-type]
    regulator = Regulator(change(Limits(), {"hours": "22-07"}), Sky(), pause_control, presence, quiet)  # type: ignore[arg-type]
    with pytest.raises(Unavailable, match="starting"):
        regulator.pause(0, "too early")
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(regulator.run())
        await asyncio.sleep(5)
        assert presence.allowance is not None and presence.allowance.resumes_unix_s == NOON + 10 * 3600
        await asyncio.sleep(11 * 3600)  # 23:00
        regulator.pause(3600, "snoozed")
        assert not regulator.verdict.running and regulator.verdict.reason == "snoozed"
        await asyncio.sleep(2 * 3600)  # 01:00
        regulator.pause(0, "asked to")
        await asyncio.sleep(3600)
        regulator.resume()
        await asyncio.sleep(86_400)
        regulator.change({"hours": "none"})
        await asyncio.sleep(2)
        with pytest.raises(ValueError, match="hours"):
            regulator.change({"hours": "noon"})
        running.cancel()
    paused = record_pb2.NODE_STATE_PAUSED
    trains_ = record_pb2.NODE_STATE_TRAINING
    due = [
        (0, paused),
        (10, trains_),  # 22:00
        (11, paused),  # snoozed at 23:00
        (12, trains_),
        (13, paused),  # asked to at 01:00
        (14, trains_),
        (19, paused),  # 07:00
        (34, trains_),  # 22:00 of the next day
    ]
    for (at_s, state), (hour, wanted) in zip(presence.said, due, strict=True):
        assert state == wanted and abs(at_s - hour * 3600) <= 12, (presence.said, due)


@pytest.mark.parametrize("method", ["noloco", "gradient"])
@pytest.mark.parametrize("aside", [0, 1])
async def test_a_round_does_not_wait_for_a_member_that_pauses(method: str, aside: int) -> None:
    """Whichever of the two calls: the one that stays goes on alone, long before an exchange is given up."""
    run = run_of() if method == "gradient" else manifest(stages=1, method=method)
    async with village(run, stages=(0, 0)) as v:
        await v.until(lambda: all(map(trains, v.people)) and v.total() > 512, "both train")
        pauses, stays = sorted(v.people, key=lambda person: person.node.me, reverse=bool(aside))
        pauses.served.gossip.hold(True)  # so that the other's round waits for it
        await v.until(lambda: not stays.served.gossip.idle.is_set() and pauses.served.gossip.idle.is_set(), "one waits")
        done = stays.served.gossip.done
        begun_s = asyncio.get_running_loop().time()
        await pauses.node.pause_control.apply(False, "asked to")
        await v.until(lambda: stays.served.gossip.done > done, "the round ends")
        assert asyncio.get_running_loop().time() - begun_s < 1.0
        await v.trains(256, "it trains on")

"""A pause never costs the others: a stage whose only machine sleeps goes on at once wherever another one is awake."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pytest

from swarmnode.base.wire import record_pb2
from swarmnode.run.manifest import Manifest
from swarmnode.train.node.limits import Limits, SensorReading
from swarmnode.train.node.regulator import Regulator
from tests.support.village import LoopClock, Village, Villager, manifest, told, village, with_recovery

BOUND_S = 120.0
TRAINING = record_pb2.NODE_STATE_TRAINING
PAUSED = record_pb2.NODE_STATE_PAUSED
IN_WORK = 16  # samples: what may be between two stages when one of them pauses


def moving(**recovery: object) -> Manifest:
    """Two stages, between which nodes move."""
    run = with_recovery(manifest(stages=2), **recovery)
    return replace(run, pipeline=replace(run.pipeline, rebalance_period_s=1.0))


def trains(person: Villager) -> bool:
    return person.node.state == TRAINING


def paused(person: Villager) -> bool:
    return person.node.state == PAUSED


def behind(person: Villager) -> int:
    """Samples that the state lacks with which `person` brought its stage back."""
    lacks = told(person, "recovery.done")[-1]["behind"]
    assert isinstance(lacks, int)
    return lacks


@dataclass
class Machine:
    """What the sensors of a villager's machine read; `regulator` acts on it."""

    person: Villager
    used_nbytes: int = 0
    nbytes_per_s: float = 0.0
    temperature_c: float = 40.0
    processes: frozenset[str] = frozenset()
    idle_s: float = 1e6
    on_battery: bool = False
    period_s: float = 0.25

    def __post_init__(self) -> None:
        node = self.person.node
        self.clock = LoopClock()
        told = node.presence, self.person.quiet
        self.regulator = Regulator(Limits(), self.sense, node.pause_control, *told, period_s=self.period_s)

    async def sense(self, limits: Limits) -> SensorReading:
        read = (
            self.used_nbytes,
            self.nbytes_per_s,
            self.temperature_c,
            0,
            self.processes,
            self.idle_s,
            self.on_battery,
        )
        return SensorReading(self.clock.unix_s(), 0, True, *read)

    def now(self, ahead_s: float) -> str:
        """The time of the day, in `ahead_s` from now: "22:17"."""
        second = int(self.clock.unix_s() + ahead_s) % 86_400
        return f"{second // 3600:02}:{second // 60 % 60:02}"


async def awake(v: Village, machine: Machine) -> None:
    """Regulate `machine`, in a village whose members all train."""
    v._stack.callback(asyncio.get_running_loop().create_task(machine.regulator.run()).cancel)
    await v.until(lambda: all(map(trains, v.people)) and v.total() > 512, "everybody trains")


def use_quota(machine: Machine) -> None:
    machine.used_nbytes = 10**9


Change = Callable[[Machine], None]
KINDS: Mapping[str, tuple[dict[str, str], Change, Change]] = {  # limits, what begins the pause, what ends it
    "snooze": ({}, lambda m: m.regulator.pause(7200, "snoozed"), lambda m: m.regulator.resume()),
    "pause": ({}, lambda m: m.regulator.pause(0, "asked to"), lambda m: m.regulator.resume()),
    "hours": (
        {},
        lambda m: m.regulator.change({"hours": f"{m.now(-120)}-{m.now(0)}"}),
        lambda m: m.regulator.change({"hours": "none"}),
    ),
    "idle": ({"when-idle": "10m"}, lambda m: setattr(m, "idle_s", 1.0), lambda m: setattr(m, "idle_s", 1e6)),
    "mains": (
        {"on-ac-only": "yes"},
        lambda m: setattr(m, "on_battery", True),
        lambda m: setattr(m, "on_battery", False),
    ),
    "yield": (
        {"yield-to": "steam"},
        lambda m: setattr(m, "processes", frozenset({"steam"})),
        lambda m: setattr(m, "processes", frozenset()),
    ),
    "heat": (
        {"max-temp": "80"},
        lambda m: setattr(m, "temperature_c", 90.0),
        lambda m: setattr(m, "temperature_c", 40.0),
    ),
    "quota": ({"quota": "1GB"}, use_quota, lambda m: setattr(m, "used_nbytes", 0)),
}
EACH_PUSH = ("snooze", "hours", "quota")
kinds = [pytest.param(kind, marks=[] if kind in EACH_PUSH else pytest.mark.nightly) for kind in KINDS]


@pytest.mark.parametrize("kind", kinds)
async def test_whatever_pauses_the_only_machine_of_a_stage_a_spare_goes_there_and_it_fits_in_again(kind: str) -> None:
    limits, begin, end = KINDS[kind]
    async with village(moving(), stages=(0, 1, 1)) as v:
        sleeper, *others = v.people
        machine = Machine(sleeper)
        await awake(v, machine)
        await v.until(lambda: any(p.served.backup.kept_round for p in others), "a snapshot is kept")
        begun = sum(len(told(p, "state.fresh")) for p in v.people)
        machine.regulator.change(limits)
        begin(machine)
        await v.until(lambda: paused(sleeper), "it pauses")
        done = sleeper.served.gossip.done
        await v.trains(512, "the others go on without it", BOUND_S)
        mover = next(p for p in others if p.node.stage == 0)
        if kind != "quota":  # then nothing is left for giving its state, and a snapshot counts
            assert behind(mover) <= IN_WORK, "it has what the sleeper had, not a snapshot"
        end(machine)
        await v.until(lambda: trains(sleeper), "it is back", BOUND_S)
        assert sleeper.served.gossip.done > done, "it took what the others learned meanwhile"
        await v.trains(256, "all go on", BOUND_S)
        assert sum(len(told(p, "state.fresh")) for p in v.people) == begun, "nothing began anew"


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.nightly)])
async def test_a_spare_without_a_snapshot_has_the_state_from_the_sleeper(stage: int) -> None:
    async with village(moving(keepers=0), stages=(stage, 1 - stage, 1 - stage)) as v:
        sleeper, *others = v.people
        await v.until(lambda: all(map(trains, v.people)) and v.total() > 512, "everybody trains")
        await sleeper.node.pause_control.apply(False, "asked to")
        await v.trains(512, "the others go on without it", BOUND_S)
        assert behind(next(p for p in others if p.node.stage == stage)) <= IN_WORK


async def test_a_joiner_has_the_state_from_the_sleeper() -> None:
    async with village(moving(keepers=0), stages=(0, 1)) as v:
        sleeper, _ = v.people
        await v.until(lambda: all(map(trains, v.people)) and v.total() > 512, "both train")
        await sleeper.node.pause_control.apply(False, "asked to")
        before = v.total()
        joiner = v.add(None)
        await v.until(lambda: v.total() > before + 256, "the joiner brings the stage back", BOUND_S)
        assert joiner.node.stage == 0 and behind(joiner) <= IN_WORK


async def test_a_spare_has_the_state_of_one_that_leaves() -> None:
    async with village(moving(keepers=0), stages=(0, 1, 1)) as v:
        leaver, *others = v.people
        await v.until(lambda: all(map(trains, v.people)) and v.total() > 512, "everybody trains")
        leaver.notices.leave("told to go")
        await v.until(
            lambda: any(p.node.stage == 0 and trains(p) for p in others), "a spare has taken it over", BOUND_S
        )
        assert behind(next(p for p in others if p.node.stage == 0)) <= IN_WORK
        await v.trains(256, "the run goes on", BOUND_S)


async def test_with_nobody_spare_the_run_waits_and_goes_on_when_the_sleeper_wakes() -> None:
    async with village(moving(), stages=(0, 1)) as v:
        sleeper, other = v.people
        machine = Machine(sleeper)
        await awake(v, machine)
        machine.regulator.pause(60, "snoozed")
        await v.until(lambda: paused(sleeper), "it pauses")
        await sleeper.served.held_work.emptied()
        total = v.total()
        member = other.node.presence.peer_table.member
        wakes = machine.clock.unix_s() + 60
        await v.until(lambda: abs(member(sleeper.node.me).resumes_unix_s - wakes) <= 2, "others know until when")  # type: ignore[union-attr]
        await asyncio.sleep(30)
        assert v.total() == total and trains(other) and other.node.stage == 1, "it waits, and stays"
        await v.until(lambda: v.total() > total + 256, "it goes on when the sleeper wakes", BOUND_S)
        assert not told(other, "recovery.done") and not told(sleeper, "recovery.done"), "nothing was lost"


async def test_a_node_that_wakes_takes_the_newer_state_of_a_sleeper() -> None:
    """The sleeper is relieved by another machine, which sleeps when it wakes: it goes on with what that one learned."""
    async with village(moving(keepers=0), stages=(0, 1, 1)) as v:
        first, *others = v.people
        await v.until(lambda: all(map(trains, v.people)) and v.total() > 512, "everybody trains")
        await first.node.pause_control.apply(False, "asked to")
        await v.trains(512, "the others go on without it", BOUND_S)
        second = next(p for p in others if p.node.stage == 0)
        await second.node.pause_control.apply(False, "asked to")
        await second.served.held_work.emptied()
        done = second.served.gossip.done
        while not trains(first):
            await first.node.pause_control.apply(True, "resumed")
        assert first.served.gossip.done >= done and behind(first) <= IN_WORK
        await v.trains(256, "the run goes on", BOUND_S)


async def test_before_announced_hours_end_a_spare_has_taken_the_stage() -> None:
    async with village(moving(), stages=(0, 1, 1)) as v:
        sleeper, *others = v.people
        machine = Machine(sleeper)
        v.sample_s = 0.0
        await awake(v, machine)
        machine.regulator.change({"hours": f"{machine.now(-60)}-{machine.now(120)}"})
        await v.until(lambda: any(p.node.stage == 0 and trains(p) for p in others), "one goes there", BOUND_S)
        assert trains(sleeper), "it was there before the sleeper paused"
        assert not any(told(p, "recovery.began") for p in others), "it took the state from a replica at work"


def by_day() -> Manifest:
    """A run at the pace of a day: a microbatch takes a minute, a round about an hour."""
    run = moving()
    limits = replace(
        run.limits,
        announce_period_s=30.0,
        record_ttl_s=150.0,
        hop_timeout_min_s=60.0,
        microbatch_timeout_s=1800.0,
        exchange_timeout_s=600.0,
    )
    return replace(run, limits=limits, pipeline=replace(run.pipeline, rebalance_period_s=300.0))


@pytest.mark.nightly  # a minute; each kind of pause has a test in each push
async def test_a_whole_day_of_three_sleepers_goes_on_with_one_machine_awake_for_each_stage() -> None:
    """Two stages; each of three machines sleeps eight hours, one after the other: two are awake at any time."""
    async with village(by_day()) as v:
        v.sample_s = 20.0
        machines = [Machine(v.add(None), period_s=10.0) for _ in range(3)]
        for machine, hours in zip(machines, ("8-24", "16-8", "0-16"), strict=True):
            machine.regulator.change({"hours": hours})
            await machine.regulator.once()
            v._stack.callback(asyncio.get_running_loop().create_task(machine.regulator.run()).cancel)
        begun = 0
        trained = list[int]()
        slept = set[int]()
        for hour in range(26):
            before = v.total()
            await asyncio.sleep(3600)
            trained.append(v.total() - before)
            slept |= {index for index, machine in enumerate(machines) if paused(machine.person)}
            fresh = sum(len(told(p, "state.fresh")) for p in v.people)
            begun = fresh if hour == 0 else begun
            assert fresh == begun, f"a stage began anew in hour {hour}"
        assert slept == {0, 1, 2}, "each slept"
        assert min(trained[1:]) > max(trained) / 4, f"samples by hour: {trained}"
        recovered = [(p.node.me, fields) for p in v.people for fields in told(p, "recovery.done")]
        assert recovered and all(int(str(fields["behind"])) <= 2 * IN_WORK for _, fields in recovered), recovered

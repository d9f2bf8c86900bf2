"""A stage whose replicas announce themselves and do nothing counts as empty: keys alone stop no run."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

import pytest

from swarmnode.base.errors import Busy, RemoteFault, Unavailable
from swarmnode.base.ids import PeerId
from swarmnode.base.ports import Answer, Call
from swarmnode.base.wire import record_pb2
from swarmnode.keep.recovery import state_loader
from swarmnode.run.manifest import Manifest
from tests.support.stranger import Stranger
from tests.support.village import RUN, Village, lose, manifest, told, village, with_recovery

KEYS = 8


def run() -> Manifest:
    """Nobody moves for speed; a microbatch may take a second."""
    plain = with_recovery(manifest())
    limits = dataclasses.replace(plain.limits, microbatch_timeout_s=1.0)
    pipeline = dataclasses.replace(plain.pipeline, rebalance_period_s=600.0, rebalance_ratio=10.0, min_keep=1)
    return dataclasses.replace(plain, limits=limits, pipeline=pipeline)


@contextlib.asynccontextmanager
async def idle_keys(v: Village, stage: int, fault: Exception) -> AsyncIterator[None]:
    """Keys at `stage` that announce themselves, answer pings, and refuse all work with `fault`."""
    keys = [Stranger(v, number) for number in range(KEYS)]

    async def refuse(peer: PeerId, call: Call) -> Answer:
        raise fault

    for key in keys:
        for kind in ("process", "exchange", "snapshot"):
            key.transport.serve(kind, refuse, tensor_bytes_max=1 << 20)

    async def announcing() -> None:
        while True:
            for key in keys:
                await key.say(v, stage=stage, progress=record_pb2.Progress(total=v.total()), samples_per_second=10.0)
            await asyncio.sleep(0.2)

    flood = asyncio.ensure_future(announcing())
    try:
        yield
    finally:
        flood.cancel()


FAULTS: dict[str, Exception] = {
    "no": Unavailable("not now"),
    "busy": Busy("later", 0.1),
    "wrong": RemoteFault("a fault"),
}


@pytest.mark.parametrize(
    ("stage", "fault"),
    [
        (2, "no"),
        (1, "busy"),
        pytest.param(2, "wrong", marks=pytest.mark.nightly),
        pytest.param(0, "no", marks=pytest.mark.nightly),
    ],
)
async def test_a_run_begins_though_a_stage_is_full_of_keys_that_do_nothing(stage: int, fault: str) -> None:
    """Honest newcomers choose another stage; one of them goes where nobody works."""
    async with village(run()) as v, idle_keys(v, stage, FAULTS[fault]):
        await v.until(lambda: len(v.network.records.get((RUN, stage), {})) == KEYS, "the keys are announced")
        for other in {0, 1, 2} - {stage}:
            for _ in range(2):
                v.add(other)
        await v.fed(128)
        assert any(told(p, "stage.moved") and p.node.stage == stage for p in v.people)


async def test_keys_do_not_stand_in_for_the_last_replica_of_a_stage() -> None:
    """The last replica of stage 1 dies, and keys are there: its state comes back from where it was kept."""
    async with village(run(), stages=(0, 0, 1, 2)) as v:
        await v.until(
            lambda: any(p.node.served and p.served.backup.kept_round for p in v.people[:2]), "a snapshot is kept"
        )
        async with idle_keys(v, 1, FAULTS["no"]):
            await lose(v, 1)
            await v.trains(256, "training goes on")
            done = [fields for p in v.people for fields in told(p, "recovery.done") if fields["stage"] == 1]
            assert done[0]["method"] == "ring"


async def test_a_newcomer_at_such_a_stage_takes_the_state_that_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has seen nobody at work. The keys give no state, and meanwhile nothing is trained."""
    monkeypatch.setattr(state_loader, "POLITE", dataclasses.replace(state_loader.POLITE, attempts_max=2))
    async with village(run(), stages=(0, 1, 2)) as v:
        keeper = v.people[0]
        await v.until(lambda: keeper.node.served is not None and keeper.served.backup.kept_round is not None, "kept")
        async with idle_keys(v, 1, FAULTS["no"]):
            await lose(v, 1)
            await v.until(lambda: v.told() == v.total(), "all know how far the run came")
            here = keeper.node.presence.peer_table
            await v.until(lambda: {m.total for m in here.swarm().stages[1]} == {v.total()}, "the keys say the same")
            joiner = v.add(1)
            since = v.total()
            await v.until(lambda: bool(told(joiner, "recovery.done")), "it has the state")
            assert told(joiner, "recovery.done")[0]["method"] == "ring"
            await v.until(lambda: v.total() >= since + 256, "training goes on")

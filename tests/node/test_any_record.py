"""A node lives through any record: what strangers sign stops nobody, and is passed on by nobody."""

from swarmnode.base.wire import record_pb2
from swarmnode.train.node.own_record import StageStatus
from tests.support.stranger import Stranger
from tests.support.village import manifest, told, village


async def test_blocks_that_nobody_can_have_finished_move_no_feeder() -> None:
    """Within the range of the field; what is out of it is refused in any record (tests/bounds)."""
    async with village(manifest(), stages=(0, 1, 2, 0)) as v:
        await v.fed(64)
        await Stranger(v, 1).say(v, blocks=record_pb2.Blocks(finished_below=2**52))
        await v.trains(128, "feeders go on")
        late = v.add(0)
        await v.until(lambda: late.node.state == record_pb2.NODE_STATE_TRAINING, "a feeder that comes later")
        await v.trains(128, "with it")
        for person in v.people:
            if (said := person.served.status().blocks) is not None:
                assert said.finished_below <= v.total(), "and nobody announces it again"


async def test_speeds_without_measure_kill_nobody() -> None:
    async with village(manifest(), stages=(0, 1, 2, 0)) as v:
        await v.fed(64)
        for number, speed in enumerate((1.7e308, 1.7e308, 1e9)):
            await Stranger(v, number).say(v, stage=1, samples_per_second=speed)
        await v.trains(128, "training beside speeds that cannot be")


async def test_a_joiner_meets_others_whatever_stride_a_stranger_announces() -> None:
    async with village(manifest(round_samples=64), stages=(0, 1, 2, 2)) as v:
        await v.fed(128)
        await Stranger(v, 1).say(v, stage=2, round_stride=1024)
        late = v.add(2)
        await v.until(lambda: bool(told(late, "exchange.paired")), "the joiner meets somebody")
        assert late.served.gossip.stride < 64


async def test_a_nodes_own_record_is_in_range() -> None:
    """Else its own record would stop it."""
    async with village(manifest(), stages=(0, 1, 2)) as v:
        await v.fed(64)
        for person in v.people:
            absurd = StageStatus(samples_per_second=float("inf"), queue=10**9)
            person.served.status = lambda absurd=absurd: absurd  # type: ignore[method-assign, misc]
            person.node.presence.own.announce_change()
        await v.trains(128, "with absurd measurements of its own")

"""A node lives through any record: what strangers sign stops nobody, and is passed on by nobody."""

import asyncio

from swarmnode.ids import seeded
from swarmnode.node.presence import StageStatus
from swarmnode.wire import record_pb2
from tests.support.messages import fill
from tests.support.stranger import LIVES_S, Stranger
from tests.support.village import RUN, LoopClock, manifest, told, village


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


async def test_records_of_any_numbers_that_are_in_range_stop_nobody() -> None:
    """Three dozen keys, each a record whose every field is an edge of its range or anything between, heard by calls and
    from the directory; and again as some of them change."""
    rng = seeded("village", "any record")
    async with village(manifest(), stages=(0, 1, 2, 0)) as v:
        await v.fed(64)
        strangers = [Stranger(v, number) for number in range(36)]
        heard = set[tuple[str, str]]()  # at once, for records expire
        for turn in range(2):
            for stranger in strangers[turn * 12 :]:
                record = record_pb2.Record()
                fill(record, rng, share=0.9)
                record.run_id, record.peer_id, record.sequence = RUN, stranger.me, turn + 1
                record.expires_unix_ms = int((LoopClock().unix_s() + rng.uniform(1.0, LIVES_S)) * 1000)
                record.stage = rng.choice([0, 1, 2, 2, record.stage])
                record.state = record.state or record_pb2.NODE_STATE_TRAINING
                record.addresses[:] = [f"/{address[1:]}" for address in record.addresses]
                del record.progress.feeders[:], record.progress.samples[:]
                if rng.random() < 0.5:
                    record.progress.feeders.append(stranger.me)
                    record.progress.samples.append(rng.choice([0, 1, 2**40, 2**53]))
                if record.stage:
                    record.ClearField("blocks")
                signed = stranger.signed(record)
                stranger.publish(signed)
                await asyncio.gather(*(stranger.tell(p.node.me, signed) for p in v.people), return_exceptions=True)
                table = ((p.node.me, p.node.presence.peer_table.member(stranger.me)) for p in v.people)
                heard |= {(me, stranger.me) for me, member in table if member is not None}
            await v.trains(128, f"training through records of turn {turn}")
        assert len(heard) >= len(v.people) * 12, "most were taken in, not refused"


async def test_a_nodes_own_record_is_in_range() -> None:
    """Else its own record would stop it."""
    async with village(manifest(), stages=(0, 1, 2)) as v:
        await v.fed(64)
        for person in v.people:
            absurd = StageStatus(samples_per_second=float("inf"), queue=10**9)
            person.served.status = lambda absurd=absurd: absurd  # type: ignore[method-assign, misc]
            person.node.presence.announce_change()
        await v.trains(128, "with absurd measurements of its own")

"""Keys that say the run is far ahead move nobody's clock, and a joiner's neither."""

from swarmnode.base.wire import record_pb2
from tests.support.stranger import Stranger
from tests.support.village import Village, manifest, told, village

LIE = 2**52


def clocks(v: Village) -> list[int]:
    return [p.node.samples_total() for p in v.people]


async def test_six_sybils_move_no_clock_and_a_joiner_meets_the_others() -> None:
    async with village(manifest(round_samples=64), stages=(0, 1, 2, 0, 1)) as v:
        await v.fed(128)
        sybils = [Stranger(v, number) for number in range(6)]

        async def lie() -> None:
            for number, sybil in enumerate(sybils):
                told = record_pb2.Progress(total=LIE)
                await sybil.say(v, stage=number % 3, progress=told, round=2**40, samples_per_second=1e9)

        await lie()
        await v.trains(128, "it trains on")
        assert max(clocks(v)) < 8 * v.total()
        await lie()
        joiner = v.add(2)
        await v.until(lambda: bool(told(joiner, "exchange.paired")), "the joiner meets somebody")
        await lie()
        await v.trains(128, "it trains on with the joiner")
        assert max(clocks(v)) < 8 * v.total(), clocks(v)

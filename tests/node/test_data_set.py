"""The run's text reaches feeders by content: from a meeting point, and from each other."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.memory_network import MemoryTransport
from swarmnode.base.errors import Busy, DataError, RemoteFault, Unavailable
from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId
from swarmnode.base.ports import Call
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.data.chunk_store import ChunkCache
from swarmnode.data.index import Index
from swarmnode.keep.transfer.chunk_set import ChunkServer, ChunkSet, ServeLimits, SetPorts, data_set_of
from swarmnode.run.manifest import DataSpec, Manifest
from tests.support.data_sets import data_set
from tests.support.fake_telemetry import Quiet
from tests.support.village import RUN, Numbers, Village, cause, manifest, told, village

POINT = Identity.of_seed(b"p" * 32).peer_id


class OneWord(Numbers):
    """The same text whoever reads it, under a name of one's own."""

    def __init__(self, run: Manifest, digest: bytes) -> None:
        super().__init__(run)
        self.digest = digest


def on(index: Index, stages: int = 2) -> Manifest:
    made = manifest(stages=stages, window_max=2)
    # Few samples a round, so that a joiner has not to wait.
    gossip = replace(made.gossip, round_samples=32)
    data = DataSpec(source="index", index=index.digest.hex(), end_token=0, block_samples=8)
    return replace(made, data=data, gossip=gossip)


def text(folder: Path, chunks: int = 40) -> Index:
    return data_set(folder / "data", chunks=chunks, chunk_tokens=8 * 16 + 1, vocabulary=50)


async def meeting_point(v: Village, folder: Path) -> tuple[MemoryTransport, ChunkSet[Index]]:
    """A member that trains nothing and gives the text in `folder`."""
    transport = MemoryTransport(v.network, POINT, RUN)
    quiet = Quiet()
    data = data_set_of(v.run, ChunkCache(folder / "cache-point"), folder / "data", quiet)
    ChunkServer([data], transport, quiet, ServeLimits(yields=False)).serve()
    await data.open()
    return transport, data


def volunteer(v: Village, cache: Path, *, knows: bool = True) -> Callable[[Quiet], SetPorts[Index]]:
    def made(quiet: Quiet) -> SetPorts[Index]:
        return SetPorts(data_set_of(v.run, ChunkCache(cache), None, quiet), None, lambda: [POINT] if knows else [])

    return made


async def test_chunks_come_from_a_meeting_point_and_then_from_each_other(tmp_path: Path) -> None:
    index = text(tmp_path)
    async with village(on(index)) as v:
        point, _ = await meeting_point(v, tmp_path)
        people = [v.add(stage, data=volunteer(v, tmp_path / f"cache-{n}")) for n, stage in enumerate((0, 1, 0))]
        await v.until(lambda: all(p.fed > 64 for p in (people[0], people[2])), "both feeders feed")
        assert all(p.node.presence.status.data_digest == index.digest[:8] for p in (people[0], people[2]))
        # The meeting point dies. A newcomer has the index and chunks from feeders.
        await point.close()
        late = v.add(0, data=volunteer(v, tmp_path / "cache-late", knows=False))
        await v.until(lambda: late.fed > 64, "a newcomer feeds what other feeders hold")
        given = sum(p.quiet.counted["swarmnode_data_bytes_total", (("source", "served"),)] for p in people)
        assert given > 0
        assert not told(late, "data.failed"), "nobody lies"
        # Drawn once: what feeders finished together is what the run has counted.
        assert v.total() <= 40 * 8 * 100
        seen = [p.served.status() for p in people]
        losses = [(now.loss_validation, now.loss_validation_first) for now in seen]
        assert any(now is not None and begun is not None and now < begun for now, begun in losses)


async def test_without_text_a_node_serves_another_stage_and_feeds_once_it_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmnode.train.node.run_text.LOOK_S", 0.3)
    monkeypatch.setattr("swarmnode.train.node.run_text.AGAIN_S", 0.3)
    index = text(tmp_path)
    async with village(on(index)) as v:
        first = v.add(None, data=volunteer(v, tmp_path / "cache-0"))
        await v.until(lambda: first.node.stage is not None, "a stage is chosen")
        assert first.node.stage == 1, "nobody gives the text: it cannot feed, and does not end"
        assert 0 in first.node.presence.status.unable
        assert "index" in str(told(first, "data.refused")[0]["reason"])
        await meeting_point(v, tmp_path)
        await v.until(lambda: 0 not in first.node.presence.status.unable, "it can feed, and says so")
        monkeypatch.setattr("swarmnode.train.node.run_text.LOOK_S", 60.0)  # on a busy machine the index takes its time
        second = v.add(None, data=volunteer(v, tmp_path / "cache-1"))
        await v.until(lambda: second.node.stage == 0 and second.fed > 16, "the next one feeds")


async def test_chunks_that_nobody_gives_do_not_hold_up_the_others(tmp_path: Path) -> None:
    index = text(tmp_path)
    for number in (2, 5, 7):  # twelve chunks are nowhere
        (tmp_path / "data" / f"train-{number:05}.bin").unlink()

    async with village(on(index)) as v:
        await meeting_point(v, tmp_path)
        feeder, _ = (v.add(stage, data=volunteer(v, tmp_path / f"cache-{stage}")) for stage in (0, 1))
        await v.until(lambda: feeder.fed > 1.5 * 40 * 8, "it trains the others, in the next epoch too")
        assert feeder.served.parts.feeder is not None and len(feeder.served.parts.feeder._text._aside) >= 12
        async with asyncio.timeout(100):
            await v.leave()


async def test_a_feeder_drains_while_it_waits_for_text(tmp_path: Path) -> None:
    """The only one that gives chunks is gone: nothing is lost, and leaving does not wait for it."""
    index = text(tmp_path)
    async with village(on(index)) as v:
        point, _ = await meeting_point(v, tmp_path)
        feeder, _ = (v.add(stage, data=volunteer(v, tmp_path / f"cache-{stage}")) for stage in (0, 1))
        await v.until(lambda: feeder.fed > 8, "it feeds")
        await point.close()
        await v.until(lambda: bool(told(feeder, "data.waiting")), "what it held is used up")
        waited = feeder.fed
        async with asyncio.timeout(100):
            await v.leave()
        assert feeder.fed >= waited


async def test_a_member_that_gives_other_bytes_is_asked_no_more(tmp_path: Path) -> None:
    index = text(tmp_path, chunks=12)
    async with village(on(index)) as v:
        _, honest = await meeting_point(v, tmp_path)
        liar = MemoryTransport(v.network, Identity.of_seed(b"l" * 32).peer_id, RUN)
        other = data_set(tmp_path / "other", chunks=12, chunk_tokens=8 * 16 + 1, vocabulary=49)
        lies = data_set_of(v.run, ChunkCache(tmp_path / "cache-liar"), None, Quiet())

        async def blob(sha256: bytes) -> bytes:
            """Always something of the right length."""
            number = honest.store.number_of(sha256)
            return b"\0" * (other.chunk(number).nbytes if number is not None else len(other.canonical()))

        lies.blob = blob  # type: ignore[method-assign, assignment]
        ChunkServer([lies], liar, Quiet(), ServeLimits(yields=False)).serve()

        def made(quiet: Quiet) -> SetPorts[Index]:
            data = data_set_of(v.run, ChunkCache(tmp_path / "cache"), None, quiet)
            return SetPorts(data, None, lambda: [liar.peer_id, POINT])

        feeder = v.add(0, data=made)
        v.add(1, data=volunteer(v, tmp_path / "cache-1"))
        await v.until(lambda: feeder.fed > 64, "the honest one gives everything")
        failed = told(feeder, "data.failed")
        assert len(failed) == 1 and "do not match the hash" in str(failed[0]["reason"])
        assert feeder.quiet.counted["swarmnode_peer_faults_total", (("kind", "data"),)] == 1


async def test_a_feeder_with_another_text_is_refused_with_both_digests() -> None:
    async with village(manifest(stages=2)) as v:
        ours = bytes(range(32))
        theirs = bytes(range(32, 64))
        first = v.add(0, samples=lambda: OneWord(v.run, ours))
        v.add(1)
        await v.until(lambda: first.fed > 8, "the first feeder feeds")
        second = v.add(None, unable=frozenset({1}), samples=lambda: OneWord(v.run, theirs))
        with pytest.raises(BaseExceptionGroup) as found:
            await v.until(lambda: second.fed > 0, "it must not feed")
        leaf = cause(found.value)
        assert isinstance(leaf, DataError) and ours[:8].hex() in str(leaf) and theirs[:8].hex() in str(leaf)
        v.people.remove(second)

        # One that can serve another stage does, and says why.
        third = v.add(None, samples=lambda: OneWord(v.run, theirs))
        await v.until(lambda: third.node.state == 3, "it trains")
        if third.node.stage == 0:
            raise AssertionError("it feeds another text")
        if refused := told(third, "data.refused"):
            assert ours[:8].hex() in str(refused[0]["reason"])
        # And one with the same text feeds.
        fourth = v.add(0, samples=lambda: OneWord(v.run, ours))
        await v.until(lambda: fourth.fed > 8, "who has the same text feeds")


async def test_asking_for_chunks_is_bounded(tmp_path: Path) -> None:
    index = data_set(tmp_path / "data", chunks=4)
    run = replace(manifest(), data=DataSpec(source="index", index=index.digest.hex()))
    data = data_set_of(run, ChunkCache(tmp_path / "cache"), tmp_path / "data", Quiet())
    transport = MemoryTransport(Village(run).network, POINT, RUN)
    limits = ServeLimits(asker_burst=100_000, asker_rate=0.0, all_burst=10**9, yields=False)
    server = ChunkServer([data], transport, Quiet(), limits)

    def asked(**fields: object) -> Call:
        return Call(wire.Request(data_chunk=wire.DataChunkRequest(**{"index": index.digest, **fields})))  # type: ignore[arg-type]

    sha256 = index.chunk(2).sha256
    for wrong in (
        {"sha256": b"short", "nbytes": 10},
        {"sha256": sha256, "nbytes": 0},
        {"sha256": sha256, "nbytes": 1 << 20},
        {"sha256": sha256, "nbytes": 10, "offset": 1 << 40},
    ):
        with pytest.raises(RemoteFault):
            await server.answer(POINT, asked(**wrong))
    answer = await server.answer(POINT, asked(sha256=sha256, nbytes=100))
    assert (answer.header.data_chunk.nbytes, answer.tensors) == (0, ()), "nothing is open yet"
    await data.open()
    answer = await server.answer(POINT, asked(sha256=sha256, nbytes=100, offset=50))
    whole = data.store.read(2) if data.store is not None else None
    assert whole is not None and bytes(answer.tensors[0].data) == whole[50:150]
    assert answer.header.data_chunk.held == b"\x3f", "four chunks of training, two held out"
    with pytest.raises(RemoteFault):
        await server.answer(POINT, asked(sha256=sha256, nbytes=100, offset=len(whole)))
    answer = await server.answer(POINT, asked(sha256=b"\0" * 32, nbytes=100))
    assert answer.header.data_chunk.nbytes == 0
    with pytest.raises(Busy):
        for _ in range(20):
            await server.answer(POINT, asked(sha256=sha256, nbytes=100_000))
    stranger = Identity.of_seed(b"s" * 32).peer_id
    assert (await server.answer(stranger, asked(sha256=sha256, nbytes=100))).tensors, "each has a bucket"
    alone = data_set_of(run, ChunkCache(tmp_path / "empty"), None, Quiet())
    with pytest.raises(Unavailable, match="not on this machine"):
        await alone.open()


@pytest.mark.loop("virtual")
async def test_strangers_get_a_twentieth_and_a_key_each_chunk_twice() -> None:
    class Held:
        digest = bytes(32)

        async def blob(self, sha256: bytes) -> bytes | None:
            return bytes(100_000)

        def held_bits(self) -> bytes:
            return b""

    day = 10_000_000
    worker = Identity.of_seed(b"w" * 32).peer_id
    limits = ServeLimits(day_nbytes=day, yields=False)
    transport = MemoryTransport(Village(manifest()).network, POINT, RUN)
    server = ChunkServer([Held()], transport, Quiet(), limits, lambda peer: peer == worker)

    async def takes(peer: PeerId) -> int:
        asked = wire.DataChunkRequest(index=bytes(32), sha256=bytes(32), nbytes=100_000)
        try:
            answer = await server.answer(peer, Call(wire.Request(data_chunk=asked)))
        except Busy:
            return 0
        return sum(len(tensor.data) for tensor in answer.tensors)

    taken = 0
    for number in range(500):
        key = Identity.of_seed(number.to_bytes(32, "big")).peer_id
        taken += sum([await takes(key) for _ in range(4)])
        await asyncio.sleep(100.0)
    assert taken <= 0.05 * day
    worked = [await takes(worker) for _ in range(5)]
    assert sum(map(bool, worked)) == 2, "the rest is there for who works, each chunk twice"

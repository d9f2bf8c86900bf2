"""Tensors travel while they are written: the watermark alone, and on real streams."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest

from swarmnode.base.errors import LocalFault, PeerTimeout, Refused, RemoteFault
from swarmnode.base.ids import PeerId
from swarmnode.base.ports import Answer, Call, StreamingMessage, WireTensor
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.base.wire_tensor import ReadyWatermark
from swarmnode.net.transport.libp2p import Libp2pTransport
from swarmnode.net.transport.stream import FRAME_BYTES, LOOKAHEAD_BYTES
from tests.support.libp2p_node import node, until
from tests.support.transport_contract import MIB, echo, ping, pong, process, tensor

NBYTES = 4 * MIB + 12_345


class Written:
    """A tensor whose bytes the test writes, a part after the other."""

    def __init__(self, nbytes: int = NBYTES) -> None:
        self.whole = bytes(memoryview(tensor(nbytes).data))
        self._room = np.full(nbytes, 0xEE, np.uint8)
        self.watermark = ReadyWatermark(nbytes)
        self.tensor = WireTensor("u8", (nbytes,), self._room.data.toreadonly(), watermark=self.watermark)

    def write(self, end: int) -> None:
        begin = self.watermark.ready_nbytes
        self._room[begin:end] = np.frombuffer(self.whole[begin:end], np.uint8)
        self.watermark.reach(end)


async def test_a_waiter_is_woken_by_the_thread_that_writes_and_only_when_enough_is_there() -> None:
    watermark = ReadyWatermark(100)
    woken = list[int]()

    async def wait(nbytes: int) -> None:
        await watermark.until(nbytes)
        woken.append(nbytes)

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for nbytes in (60, 10, 0, 100):
            group.create_task(wait(nbytes))
        await until(lambda: woken == [0])
        for reached, expected in ((9, [0]), (10, [0, 10]), (60, [0, 10, 60]), (100, [0, 10, 60, 100])):
            thread = threading.Thread(target=watermark.reach, args=(reached,))
            thread.start()
            thread.join()
            await until(lambda expected=expected: woken == expected)  # type: ignore[misc]
    watermark.fail(ValueError("late"))
    assert watermark.complete and watermark.error is None
    await watermark.until(100)


async def test_an_error_of_a_draft_reaches_its_readers() -> None:
    written = Written(1000)

    def write() -> None:
        written.write(500)
        raise MemoryError("no room")

    draft = StreamingMessage([tensor(10), written.tensor], write)
    assert not draft.complete
    async with asyncio.timeout(60):
        waiting = asyncio.get_running_loop().create_task(draft.finished())
        with pytest.raises(MemoryError):
            await asyncio.to_thread(draft.finish)
        with pytest.raises(LocalFault, match="no room"):
            await waiting
        await written.watermark.until(500)
        with pytest.raises(LocalFault, match="no room"):
            await written.watermark.until(501)


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Libp2pTransport, Libp2pTransport]]:
    async with node() as (here, _), node() as (there, _):
        there.serve("process", echo, tensor_bytes_max=8 * MIB)
        there.serve("ping", pong, tensor_bytes_max=0)
        await here.connect(there.peer_id, await there.addresses())
        here.start()
        there.start()
        yield here, there


def arrived(transport: Libp2pTransport, nbytes: int) -> Callable[[], bool]:
    """What came before a new stream was known to be a call's is not counted: at most LOOKAHEAD_BYTES."""
    return lambda: transport.throttle.down.total_nbytes >= nbytes - LOOKAHEAD_BYTES


@pytest.mark.live
@pytest.mark.parametrize("bps", [pytest.param(None, marks=pytest.mark.nightly), 400e6])
@pytest.mark.loop("uvloop")
async def test_final_bytes_arrive_before_the_rest_is_written(bps: float | None) -> None:
    async with pair() as (here, there):
        here.throttle.up.bps = bps
        first = Written()
        second = Written(70_000)
        call = process(tensor(10), first.tensor, second.tensor, tensor(20))
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(
                here.call(there.peer_id, call, timeout_s=60, reply_bytes_max=8 * MIB), name="asking"
            )
            for end in (FRAME_BYTES, FRAME_BYTES + 100, 3 * FRAME_BYTES, NBYTES - 1, NBYTES):
                first.write(end)
                await until(arrived(there, end // FRAME_BYTES * FRAME_BYTES))
            await until(arrived(there, NBYTES))
            assert not asking.done()
            second.write(70_000)
        got = [bytes(memoryview(t.data)) for t in asking.result().tensors]
        assert got == [bytes(tensor(10).data), first.whole, second.whole, bytes(tensor(20).data)]


@pytest.mark.live
@pytest.mark.loop("uvloop")
async def test_an_answer_travels_while_it_is_written() -> None:
    async with pair() as (here, there):
        written = Written()

        async def handler(peer: PeerId, call: Call) -> Answer:
            return Answer(wire.Reply(exchanged=wire.Exchanged()), [written.tensor])

        there.serve("exchange", handler, tensor_bytes_max=0)
        call = Call(wire.Request(exchange=wire.Exchange()))
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(here.call(there.peer_id, call, timeout_s=60, reply_bytes_max=8 * MIB))
            written.write(2 * FRAME_BYTES)
            await until(arrived(here, 2 * FRAME_BYTES))
            assert not asking.done()
            written.write(NBYTES)
        assert bytes(memoryview(asking.result().tensors[0].data)) == written.whole


@pytest.mark.live
@pytest.mark.loop("uvloop")
async def test_a_tensor_that_is_never_finished_breaks_the_stream_and_nothing_else() -> None:
    async with pair() as (here, there):
        served = 0

        async def count(peer: PeerId, call: Call) -> Answer:
            async def take() -> None:
                nonlocal served
                assert await call.whole()
                served += 1

            return Answer(wire.Reply(exchanged=wire.Exchanged()), [answered.tensor], before_end=take)

        there.serve("exchange", count, tensor_bytes_max=8 * MIB)
        asked = Written()
        answered = Written()
        call = Call(wire.Request(exchange=wire.Exchange()), [asked.tensor])
        loop = asyncio.get_running_loop()

        asking = loop.create_task(here.call(there.peer_id, call, timeout_s=60, reply_bytes_max=8 * MIB))
        asked.write(FRAME_BYTES)
        await until(arrived(there, FRAME_BYTES))
        asked.watermark.fail(MemoryError("no room"))
        with pytest.raises(LocalFault, match="no room"):
            await asking
        assert served == 0, "half of a tensor is no tensor"

        call = Call(wire.Request(exchange=wire.Exchange()), [tensor(10)])
        asking = loop.create_task(here.call(there.peer_id, call, timeout_s=60, reply_bytes_max=8 * MIB))
        answered.write(FRAME_BYTES)
        await until(arrived(here, FRAME_BYTES))
        answered.watermark.fail(MemoryError("no room"))
        with pytest.raises(RemoteFault, match="disconnected"):
            await asking
        assert served == 0, "the answer never came to its end"
        for one, other in ((here, there), (there, here)):
            one_more = await here.call(there.peer_id, ping(), timeout_s=60, reply_bytes_max=0)
            assert one_more.header.status == wire.STATUS_OK, (one, other)


@pytest.mark.live
@pytest.mark.loop("uvloop")
async def test_a_refusal_a_death_a_deadline_and_a_cancellation_end_the_wait_for_bytes() -> None:
    async with pair() as (here, there):
        loop = asyncio.get_running_loop()
        written = Written()
        with pytest.raises(Refused, match="not served"):
            call = Call(wire.Request(exchange=wire.Exchange()), [written.tensor])
            await here.call(there.peer_id, call, timeout_s=60, reply_bytes_max=0)
        with pytest.raises(PeerTimeout):
            await here.call(there.peer_id, process(written.tensor), timeout_s=0.05, reply_bytes_max=MIB)
        written.write(FRAME_BYTES)
        for end in ("cancelled", "dead"):
            seen = there.throttle.down.total_nbytes
            asking = loop.create_task(
                here.call(there.peer_id, process(written.tensor), timeout_s=60, reply_bytes_max=MIB)
            )
            await until(arrived(there, seen + FRAME_BYTES))
            if end == "cancelled":
                asking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asking
            else:
                await there.close()
                with pytest.raises(RemoteFault, match="disconnected"):
                    await asking
        assert not written.watermark._waiters

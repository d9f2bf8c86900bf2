"""What every Transport and every Directory must do, whatever it is made of. Run by test_contract.py on each pair."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from swarmnode.base.errors import Busy, MicrobatchLost, PeerTimeout, Refused, RemoteFault, Unavailable
from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.ports import Answer, Call, Directory, Transport, WireTensor
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.base.wire import record_pb2
from swarmnode.net.membership.record import sign_record

RUN = RunId("ab" * 32)
MIB = 1 << 20


@dataclass
class Pair:
    """Two nodes that can reach each other; `other_run` reaches `there` but belongs to another run."""

    here: Transport
    there: Transport
    close_there: Callable[[], Awaitable[None]]


@dataclass
class Directories:
    """Two directories that know each other, their identities, and the wall clock they live by."""

    here: Directory
    there: Directory
    identities: tuple[Identity, Identity]
    unix_s: Callable[[], float]


def ping(payload: bytes = b"") -> Call:
    return Call(wire.Request(ping=wire.Ping(payload=payload)))


def process(*tensors: WireTensor) -> Call:
    return Call(wire.Request(process=wire.Process(samples=1)), tensors)


def exchange(*tensors: WireTensor) -> Call:
    return Call(wire.Request(exchange=wire.Exchange(round=7)), tensors)


def tensor(nbytes: int, seed: int = 1) -> WireTensor:
    pattern = bytes((index * seed + index // 251) % 256 for index in range(min(nbytes, 4096)))
    data = (pattern * (nbytes // max(1, len(pattern)) + 1))[:nbytes]
    return WireTensor("u8", (nbytes,), data)


async def pong(peer: PeerId, call: Call) -> Answer:
    return Answer(wire.Reply(pong=wire.Pong(payload=call.header.ping.payload)))


async def echo(peer: PeerId, call: Call) -> Answer:
    return Answer(wire.Reply(processed=wire.Processed(tokens=call.header.process.samples)), call.tensors)


def refusing(error: Exception) -> Callable[[PeerId, Call], Awaitable[Answer]]:
    async def handler(peer: PeerId, call: Call) -> Answer:
        raise error

    return handler


class TransportContract:
    """Subclasses give `pair`, an asynchronous context manager, and `run`, which runs a coroutine."""

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        raise NotImplementedError

    def pair(self) -> AbstractAsyncContextManager[Pair]:
        raise NotImplementedError

    async def test_a_call_is_answered_by_the_method_it_names(self) -> None:
        async with self.pair() as pair:
            seen = []

            async def handler(peer: PeerId, call: Call) -> Answer:
                seen.append((peer, call.header.run_id, call.header.timeout_ms))
                return await pong(peer, call)

            pair.there.serve("ping", handler, tensor_bytes_max=0)
            answer = await pair.here.call(pair.there.peer_id, ping(b"hello"), timeout_s=60, reply_bytes_max=0)
            assert answer.header.status == wire.STATUS_OK
            assert answer.header.pong.payload == b"hello"
            assert seen == [(pair.here.peer_id, RUN, 60_000)]

    async def test_tensors_travel_unchanged_both_ways(self) -> None:
        async with self.pair() as pair:
            pair.there.serve("process", echo, tensor_bytes_max=8 * MIB)
            sizes = [(0,), (1,), (4096, 7), (3 * MIB + 11, 0, 65536, 65537), ()]
            kinds = [WireTensor("f32", (2, 3), bytes(24)), WireTensor("f32", (1000,), b"packed", "int8")]
            of_sizes = [[tensor(n, seed) for seed, n in enumerate(nbytes, start=3)] for nbytes in sizes]
            for sent in (*of_sizes, kinds):
                answer = await pair.here.call(pair.there.peer_id, process(*sent), timeout_s=60, reply_bytes_max=8 * MIB)
                assert [bytes(t.data) for t in answer.tensors] == [bytes(t.data) for t in sent]
                got = [(t.dtype, t.shape, t.codec) for t in answer.tensors]
                assert got == [(t.dtype, t.shape, t.codec) for t in sent]
                assert all(not memoryview(t.data).readonly for t in answer.tensors)

    async def test_a_handler_is_told_how_long_its_request_took_to_come_in(self) -> None:
        async with self.pair() as pair:
            took: list[float] = []

            async def handler(peer: PeerId, call: Call) -> Answer:
                took.append(call.received_s)
                return await echo(peer, call)

            pair.there.serve("process", handler, tensor_bytes_max=MIB)
            loop = asyncio.get_running_loop()
            begun = loop.time()
            await pair.here.call(pair.there.peer_id, process(tensor(MIB)), timeout_s=60, reply_bytes_max=MIB)
            assert 0.0 <= took[0] <= loop.time() - begun

    @pytest.mark.parametrize(
        ("raised", "expected", "says"),
        [
            (Busy("all taken", 1.5), Busy, "all taken"),
            (Unavailable("draining", 2.0), Unavailable, "draining"),
            (MicrobatchLost("no way onward"), Unavailable, "no way onward"),
            (Refused("wrong shape"), Refused, "wrong shape"),
            (RemoteFault("wrong shape"), Refused, "wrong shape"),
            (ValueError("a secret"), RemoteFault, "ValueError"),
            (TimeoutError("a secret"), RemoteFault, "TimeoutError"),
            (ConnectionResetError("a secret"), RemoteFault, "ConnectionResetError"),
        ],
    )
    async def test_an_error_of_a_handler_reaches_the_caller(
        self, raised: Exception, expected: type[Exception], says: str
    ) -> None:
        async with self.pair() as pair:
            pair.there.serve("process", refusing(raised), tensor_bytes_max=MIB)
            pair.there.serve("ping", pong, tensor_bytes_max=0)
            for nbytes in (0, MIB):
                with pytest.raises(expected) as caught:
                    await pair.here.call(pair.there.peer_id, process(tensor(nbytes)), timeout_s=60, reply_bytes_max=0)
                assert caught.type is expected
                assert says in str(caught.value)
                assert "secret" not in str(caught.value)
                if isinstance(raised, Unavailable):
                    assert isinstance(caught.value, Unavailable)
                    assert caught.value.retry_after_s == raised.retry_after_s
            await pair.here.call(pair.there.peer_id, ping(), timeout_s=60, reply_bytes_max=0)

    async def test_a_method_nobody_serves_is_refused(self) -> None:
        async with self.pair() as pair:
            with pytest.raises(Refused, match="'ping' is not served"):
                await pair.here.call(pair.there.peer_id, ping(), timeout_s=60, reply_bytes_max=0)

    @pytest.mark.parametrize("nbytes", [1025, 4 * MIB])
    async def test_tensors_above_the_methods_bound_are_refused_and_the_next_call_works(self, nbytes: int) -> None:
        async with self.pair() as pair:
            pair.there.serve("process", echo, tensor_bytes_max=1024)
            for _ in range(2):
                with pytest.raises(Refused, match="at most 1024"):
                    await pair.here.call(pair.there.peer_id, process(tensor(nbytes)), timeout_s=60, reply_bytes_max=MIB)
                await pair.here.call(pair.there.peer_id, process(tensor(1024)), timeout_s=60, reply_bytes_max=MIB)

    async def test_a_reply_above_the_callers_bound_is_a_fault(self) -> None:
        async with self.pair() as pair:
            pair.there.serve("process", echo, tensor_bytes_max=MIB)
            for nbytes in (2000, MIB):
                with pytest.raises(RemoteFault, match="at most 1999"):
                    await pair.here.call(
                        pair.there.peer_id, process(tensor(nbytes)), timeout_s=60, reply_bytes_max=1999
                    )
            await pair.here.call(pair.there.peer_id, process(tensor(1999)), timeout_s=60, reply_bytes_max=1999)

    async def test_a_spec_that_contradicts_itself_is_refused(self) -> None:
        async with self.pair() as pair:
            pair.there.serve("process", echo, tensor_bytes_max=MIB)
            for wrong in (WireTensor("f32", (3,), bytes(8)), WireTensor("f33", (2,), bytes(8))):
                with pytest.raises(Refused, match="tensor"):
                    await pair.here.call(pair.there.peer_id, process(wrong), timeout_s=60, reply_bytes_max=MIB)

    async def test_a_handler_that_hangs_is_a_timeout_and_is_cancelled(self) -> None:
        async with self.pair() as pair:
            hanging = Hanging()
            pair.there.serve("process", hanging, tensor_bytes_max=MIB)
            with pytest.raises(PeerTimeout, match=r"within 3\.0 s"):
                await pair.here.call(pair.there.peer_id, process(tensor(5000)), timeout_s=3.0, reply_bytes_max=0)
            await asyncio.wait_for(hanging.cancelled.wait(), 60)

    async def test_cancelling_a_call_reaches_the_handler(self) -> None:
        async with self.pair() as pair:
            hanging = Hanging()
            pair.there.serve("process", hanging, tensor_bytes_max=MIB)
            async with asyncio.TaskGroup() as group:
                task = group.create_task(pair.here.call(pair.there.peer_id, process(), timeout_s=60, reply_bytes_max=0))
                await asyncio.wait_for(hanging.entered.wait(), 60)
                task.cancel()
            await asyncio.wait_for(hanging.cancelled.wait(), 60)
            assert task.cancelled()

    async def test_a_peer_that_goes_away_mid_call_is_a_fault(self) -> None:
        async with self.pair() as pair:
            hanging = Hanging()
            pair.there.serve("process", hanging, tensor_bytes_max=MIB)
            async with asyncio.TaskGroup() as group:
                task = group.create_task(
                    _caught(pair.here.call(pair.there.peer_id, process(), timeout_s=60, reply_bytes_max=0))
                )
                await asyncio.wait_for(hanging.entered.wait(), 60)
                await pair.close_there()
            fault = task.result()
            assert isinstance(fault, RemoteFault), fault
            assert not isinstance(fault, PeerTimeout)
            with pytest.raises(RemoteFault):
                await pair.here.call(pair.there.peer_id, process(), timeout_s=20, reply_bytes_max=0)

    async def test_many_calls_at_once_do_not_mix(self) -> None:
        async with self.pair() as pair:
            pair.there.serve("process", echo, tensor_bytes_max=MIB)

            async def one(seed: int) -> None:
                sent = tensor(1000 + 3000 * seed, seed)
                answer = await pair.here.call(pair.there.peer_id, process(sent), timeout_s=30, reply_bytes_max=MIB)
                assert bytes(answer.tensors[0].data) == bytes(sent.data)

            for _ in range(2):
                async with asyncio.TaskGroup() as group:
                    for seed in range(1, 33):
                        group.create_task(one(seed))

    async def test_calls_go_both_ways_at_once(self) -> None:
        async with self.pair() as pair:

            async def next_hop(peer: PeerId, call: Call) -> Answer:
                inner = await pair.there.call(peer, ping(b"back"), timeout_s=60, reply_bytes_max=0)
                return Answer(wire.Reply(pong=inner.header.pong))

            pair.there.serve("process", next_hop, tensor_bytes_max=MIB)
            pair.here.serve("ping", pong, tensor_bytes_max=0)
            answer = await pair.here.call(pair.there.peer_id, process(), timeout_s=60, reply_bytes_max=0)
            assert answer.header.pong.payload == b"back"

    async def test_bytes_are_counted_on_both_sides(self) -> None:
        async with self.pair() as pair:
            pair.there.serve("process", echo, tensor_bytes_max=MIB)
            await pair.here.call(pair.there.peer_id, process(tensor(MIB)), timeout_s=60, reply_bytes_max=MIB)
            here = pair.here.bytes_by_method()
            there = pair.there.bytes_by_method()
            for way in (here["process", "sent"], here["process", "received"]):
                assert MIB < way < MIB + 1024
            assert here["process", "sent"] == there["process", "received"]
            assert here["process", "received"] == there["process", "sent"]

    async def test_an_exchange_travels_both_ways_at_once(self) -> None:
        """The handler runs at the header, and its answer's end waits for the whole request."""
        async with self.pair() as pair:
            order = list[str]()
            sent = tensor(3 * MIB + 5, 3)
            given = tensor(2 * MIB + 7, 5)

            async def handler(peer: PeerId, call: Call) -> Answer:
                order.append("called")

                async def take() -> None:
                    assert [bytes(t.data) for t in await call.whole()] == [bytes(sent.data)]
                    order.append("whole")

                return Answer(wire.Reply(exchanged=wire.Exchanged(round=7)), [given], before_end=take)

            pair.there.serve("exchange", handler, tensor_bytes_max=4 * MIB)
            for _ in range(2):
                answer = await pair.here.call(pair.there.peer_id, exchange(sent), timeout_s=60, reply_bytes_max=4 * MIB)
                order.append("answered")
                assert answer.header.exchanged.round == 7
                assert [bytes(t.data) for t in answer.tensors] == [bytes(given.data)]
            assert order == ["called", "whole", "answered"] * 2

    async def test_an_exchange_of_nothing_ends_with_the_request_too(self) -> None:
        async with self.pair() as pair:
            taken = list[int]()

            async def handler(peer: PeerId, call: Call) -> Answer:
                async def take() -> None:
                    taken.append(sum(t.nbytes for t in await call.whole()))

                return Answer(wire.Reply(exchanged=wire.Exchanged()), before_end=take)

            pair.there.serve("exchange", handler, tensor_bytes_max=4 * MIB)
            for nbytes in (0, 3 * MIB):
                await pair.here.call(pair.there.peer_id, exchange(tensor(nbytes)), timeout_s=60, reply_bytes_max=0)
            assert taken == [0, 3 * MIB]

    async def test_an_exchange_refused_at_its_header_gets_the_refusal_and_no_packet(self) -> None:
        async with self.pair() as pair:
            pair.there.serve("exchange", refusing(Unavailable("another round", 0.5)), tensor_bytes_max=8 * MIB)
            pair.there.serve("ping", pong, tensor_bytes_max=0)
            for nbytes in (0, 5, 8 * MIB):
                with pytest.raises(Unavailable, match="another round"):
                    await pair.here.call(
                        pair.there.peer_id, exchange(tensor(nbytes)), timeout_s=60, reply_bytes_max=MIB
                    )
            await pair.here.call(pair.there.peer_id, ping(), timeout_s=60, reply_bytes_max=0)
            sent = pair.there.bytes_by_method()["exchange", "sent"]
            assert sent < 1024, "refusals, and nothing else"

    async def test_an_exchange_given_up_while_it_travels_is_no_answer(self) -> None:
        async with self.pair() as pair:

            async def handler(peer: PeerId, call: Call) -> Answer:
                async def end() -> None:
                    raise Unavailable("over")

                return Answer(wire.Reply(exchanged=wire.Exchanged()), [tensor(MIB)], before_end=end)

            pair.there.serve("exchange", handler, tensor_bytes_max=8 * MIB)
            pair.there.serve("ping", pong, tensor_bytes_max=0)
            with pytest.raises(RemoteFault):
                await pair.here.call(pair.there.peer_id, exchange(tensor(MIB)), timeout_s=60, reply_bytes_max=MIB)
            await pair.here.call(pair.there.peer_id, ping(), timeout_s=60, reply_bytes_max=0)

    async def test_a_peer_that_is_not_there(self) -> None:
        async with self.pair() as pair:
            nobody = Identity.of_seed(bytes(32)).peer_id
            with pytest.raises(RemoteFault, match="cannot be reached"):
                await pair.here.call(nobody, ping(), timeout_s=20, reply_bytes_max=0)
            with pytest.raises(Unavailable):
                await pair.here.connect(nobody, ["/ip4/127.0.0.1/tcp/9"])


class Hanging:
    """A handler that never answers, and says when it was entered and cancelled."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def __call__(self, peer: PeerId, call: Call) -> Answer:
        self.entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        raise AssertionError


async def _caught(call: Awaitable[object]) -> Exception | None:
    try:
        await call
    except Exception as error:  # noqa: BLE001
        return error
    return None


def record_of(
    identity: Identity, unix_s: float, *, stage: int = 0, ttl_s: float = 20.0, sequence: int = 1, run_id: RunId = RUN
) -> record_pb2.Record:
    return record_pb2.Record(
        run_id=run_id,
        peer_id=identity.peer_id,
        sequence=sequence,
        expires_unix_ms=round((unix_s + ttl_s) * 1000),
        stage=stage,
        state=record_pb2.NODE_STATE_TRAINING,
        addresses=["/ip4/127.0.0.1/tcp/4001"],
        samples_per_second=12.5,
    )


class DirectoryContract:
    """Subclasses give `directories` and `run`."""

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        raise NotImplementedError

    @asynccontextmanager
    async def directories(self) -> AsyncIterator[Directories]:
        raise NotImplementedError
        yield

    async def test_an_announced_record_is_found(self) -> None:
        async with self.directories() as pair:
            signed = []
            for number, (directory, identity) in enumerate(zip((pair.here, pair.there), pair.identities, strict=True)):
                record = sign_record(record_of(identity, pair.unix_s(), stage=1, sequence=number), identity)
                assert (await directory.announce(record)).stored
                signed.append(record)
            expected = sorted(record.record for record in signed)
            for directory in (pair.here, pair.there):
                assert sorted(found.record for found in await directory.lookup(1)) == expected
                assert await directory.lookup(0) == []

    async def test_a_later_record_replaces_the_earlier_one_and_is_not_replaced_by_it(self) -> None:
        async with self.directories() as pair:
            me = pair.identities[0]
            first = sign_record(record_of(me, pair.unix_s(), sequence=1, ttl_s=10), me)
            second = sign_record(record_of(me, pair.unix_s(), sequence=2, ttl_s=11), me)
            assert (await pair.here.announce(first)).stored
            assert (await pair.here.announce(second)).stored
            assert not (await pair.here.announce(first)).stored
            assert [found.record for found in await pair.there.lookup(0)] == [second.record]

    async def test_a_record_that_wants_to_live_too_long_is_not_stored(self) -> None:
        async with self.directories() as pair:
            me = pair.identities[0]
            forever = sign_record(record_of(me, pair.unix_s(), ttl_s=4000), me)
            assert not (await pair.here.announce(forever)).stored
            assert await pair.there.lookup(0) == []

    def test_a_record_expires(self) -> None:
        async def main() -> None:
            async with self.directories() as pair:
                me = pair.identities[0]
                assert (await pair.here.announce(sign_record(record_of(me, pair.unix_s(), ttl_s=0.6), me))).stored
                async with asyncio.timeout(60):
                    while True:
                        if not await pair.there.lookup(0):
                            return
                        await asyncio.sleep(0.05)

        self.run(main())

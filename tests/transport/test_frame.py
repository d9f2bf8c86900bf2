"""What a stranger can send, and what the parser makes of it: a value or a RemoteFault, before memory is taken."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.base import uplink_scheduler
from swarmnode.base.errors import RemoteFault
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.ports import DTYPE_BYTES, Answer, Call, WireTensor
from swarmnode.base.uplink_scheduler import UplinkScheduler
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.net.transport import frame, serve
from swarmnode.net.transport.frame import HEADER_BYTES_MAX, PREAMBLE, TENSORS_MAX, VERSION, FrameFlag, FrameKind
from swarmnode.net.transport.links import LinkBook
from swarmnode.net.transport.serve import ByteBudget, CallerGate, StreamServer
from swarmnode.net.transport.stream import LOOKAHEAD_BYTES, P2pdStream
from swarmnode.net.transport.throttle import RateThrottle

RUN = RunId("cd" * 32)
PEER = PeerId("somebody")


def request(**fields: object) -> wire.Request:
    values = {"version": VERSION, "run_id": RUN[16:32], "timeout_ms": 1000, "ping": wire.Ping()} | fields
    return wire.Request(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (PREAMBLE.pack(b"GET ", 1, 1, 0, 0), "garbage"),
        (
            PREAMBLE.pack(b"SWRM", VERSION + 1, 1, 0, 0),
            f"version {VERSION + 1}; this node speaks {VERSION} here: update",
        ),
        (PREAMBLE.pack(b"SWRM", VERSION, 2, 0, 0), "kind 2 where a request"),
        (PREAMBLE.pack(b"SWRM", VERSION, 1, 4, 0), "unknown flags"),
        (PREAMBLE.pack(b"SWRM", VERSION, 1, 0, HEADER_BYTES_MAX + 1), f"at most {HEADER_BYTES_MAX}"),
    ],
)
def test_a_wrong_preamble_says_what_is_wrong(raw: bytes, says: str) -> None:
    with pytest.raises(RemoteFault, match=says):
        frame.open_preamble(raw, FrameKind.REQUEST)


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (request(version=VERSION - 1), f"protocol version {VERSION - 1}.*update the older"),
        (request(run_id="ef" * 32), "wrong run 'efef"),
        (request(timeout_ms=0), "timeout of 0 ms"),
        (request(timeout_ms=4_000_000), "timeout of 4000000 ms"),
    ],
)
def test_a_wrong_request_says_what_is_wrong(header: wire.Request, says: str) -> None:
    with pytest.raises(RemoteFault, match=says):
        frame.open_request(header.SerializeToString(), RUN)


sizes = st.one_of(st.integers(0, 5000), st.integers(0, 2**64 - 1))
specs = st.builds(
    wire.TensorSpec,
    dtype=st.one_of(st.sampled_from(sorted(DTYPE_BYTES)), st.text(max_size=5)),
    shape=st.lists(sizes, max_size=10),
    nbytes=sizes,
    codec=st.sampled_from(["", "raw", "packed", "x" * 40]),
)


@given(st.lists(specs, max_size=TENSORS_MAX + 3), st.integers(0, 20_000))
def test_no_announcement_above_the_bound_is_believed(announced: list[wire.TensorSpec], nbytes_max: int) -> None:
    try:
        total = frame.check_tensors(announced, nbytes_max)
    except RemoteFault:
        return
    assert total == sum(spec.nbytes for spec in announced) <= nbytes_max
    assert len(announced) <= TENSORS_MAX
    assert [t.nbytes for t in frame.allocate(announced)] == [spec.nbytes for spec in announced]


class Pipe:
    """A server behind a real socket pair, and the stranger's end of it."""

    def __init__(self, tensor_bytes_max: int = 1 << 20) -> None:
        self.budget = ByteBudget(16 << 20)
        self.scheduler = UplinkScheduler()
        self.calls: list[Call] = []
        self._tensor_bytes_max = tensor_bytes_max

    async def __aenter__(self) -> Pipe:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        throttle = RateThrottle()
        self.server = server = StreamServer(
            RUN,
            self.budget,
            self.scheduler,
            Counter(),
            None,
            LinkBook(),
            throttle,
            CallerGate(throttle, lambda peer: None),
        )

        async def handler(peer: PeerId, call: Call) -> Answer:
            self.calls.append(call)
            return Answer(wire.Reply(), call.tensors)

        for method in ("ping", "process"):
            server.register(method, handler, self._tensor_bytes_max)
        _, stream = await loop.create_connection(P2pdStream, sock=ours)
        self.attending = loop.create_task(server.attend(stream, PEER))
        _, self.stranger = await loop.create_connection(P2pdStream, sock=theirs)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.stranger.abort()
        await asyncio.wait_for(self.attending, 60)
        assert self.budget.used_bytes == 0

    async def reply(self) -> tuple[wire.Reply, FrameFlag]:
        raw, flags = await frame.receive_header(self.stranger, FrameKind.REPLY)
        header = frame.open_reply(raw)
        await frame.receive_tensors(self.stranger, header.tensors)
        return header, flags


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(bounded())


def sealed(*tensors: WireTensor, **fields: object) -> bytes:
    header = frame.seal_request(request(**fields), tensors, RUN, 5.0)
    data = b"".join(bytes(t.data) for t in tensors)
    return frame.preamble(FrameKind.REQUEST, len(header)) + header + data


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=2 * LOOKAHEAD_BYTES))
def test_garbage_on_a_stream_is_refused_and_leaves_nothing(garbage: bytes) -> None:
    async def main() -> None:
        async with Pipe() as pipe:
            await pipe.stranger.write(garbage)
            if len(garbage) >= PREAMBLE.size:
                header, flags = await pipe.reply()
                assert header.status == wire.STATUS_REFUSED
                assert flags == FrameFlag.LAST
            assert not pipe.calls

    run(main)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_frame_cut_or_bent_anywhere_never_reaches_a_handler_as_something_else(data: st.DataObject) -> None:
    tensors = [
        WireTensor("u8", (n,), bytes([n % 251]) * n) for n in data.draw(st.lists(st.integers(0, 40_000), max_size=3))
    ]
    whole = sealed(*tensors)
    header_end = len(whole) - sum(t.nbytes for t in tensors)
    cut = data.draw(st.integers(0, len(whole)))
    bent = data.draw(st.one_of(st.none(), st.integers(0, header_end - 1)))

    async def main() -> None:
        sent = bytearray(whole)
        if bent is not None:
            sent[bent] ^= data.draw(st.integers(1, 255))
        async with Pipe() as pipe:
            await pipe.stranger.write(bytes(sent[:cut]))
            if cut == len(whole) and bent is None:
                assert (await pipe.reply())[0].status == wire.STATUS_OK
                assert [bytes(t.data) for t in pipe.calls[0].tensors] == [bytes(t.data) for t in tensors]
        if cut < len(whole) and bent is None:
            assert not pipe.calls

    run(main)


async def test_an_answer_whose_turn_does_not_come_is_refused_and_the_stream_serves_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(uplink_scheduler, "WAIT_SHARE", 0.02)

    async with Pipe() as pipe:
        await pipe.scheduler.take(50_000, 1.0)
        bulk = WireTensor("u8", (50_000,), bytes(50_000))
        await pipe.stranger.write(sealed(bulk))
        header, flags = await pipe.reply()
        assert (header.status, flags) == (wire.STATUS_UNAVAILABLE, FrameFlag.NONE)
        assert "our own uplink was busy" in header.reason
        pipe.scheduler.give(50_000)
        await pipe.stranger.write(sealed(bulk))
        assert (await pipe.reply())[0].status == wire.STATUS_OK


async def test_a_long_frame_is_answered_and_what_follows_is_refused_as_garbage() -> None:
    async with Pipe() as pipe:
        await pipe.stranger.write(sealed(WireTensor("u8", (3,), b"abc")) + b"d" * 100)
        assert (await pipe.reply())[0].status == wire.STATUS_OK
        header, flags = await pipe.reply()
        assert (header.status, flags) == (wire.STATUS_REFUSED, FrameFlag.LAST)
        assert "garbage instead of a frame: starts with b'dddd'" in header.reason
        assert len(pipe.calls) == 1


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (wire.TensorSpec(dtype="u8", shape=[1 << 39], nbytes=1 << 39), "at most 1048576 are accepted"),
        (wire.TensorSpec(dtype="u8", shape=[2] * 9, nbytes=512), "at most 8"),
        (wire.TensorSpec(dtype="f32", shape=[1 << 39, 1 << 39], nbytes=8), "announced with 8 bytes"),
        (wire.TensorSpec(dtype="u8", shape=[1 << 60], nbytes=1 << 60), "TensorSpec"),
        (wire.TensorSpec(dtype="object", shape=[1], nbytes=8), "unknown dtype 'object'"),
    ],
)
async def test_an_absurd_announcement_is_refused_before_anything_is_read(spec: wire.TensorSpec, says: str) -> None:
    async with Pipe() as pipe:
        header = request(tensors=[spec]).SerializeToString()
        await pipe.stranger.write(frame.preamble(FrameKind.REQUEST, len(header)) + header)
        reply, _ = await pipe.reply()
        assert reply.status == wire.STATUS_REFUSED
        assert says in reply.reason


@pytest.mark.parametrize("sent", [0, 10_000, 49_999])
async def test_a_slow_sender_loses_its_stream_and_returns_its_budget(
    sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "LEAST_SPAN_S", 0.05)

    async with Pipe() as pipe:
        whole = sealed(WireTensor("u8", (50_000,), bytes(50_000)))
        await pipe.stranger.write(whole[: len(whole) - 50_000 + sent])
        await asyncio.wait_for(pipe.attending, 60)
        assert pipe.budget.used_bytes == 0 and not pipe.calls


async def test_exchanges_of_one_peer_do_not_pile_up() -> None:
    """Their tensors wait for our boundary: a third at once is refused."""

    async with Pipe() as pipe:
        enough = asyncio.Event()
        waiting = list[Call]()

        async def wait(peer: PeerId, call: Call) -> Answer:
            waiting.append(call)
            await enough.wait()
            return Answer(wire.Reply())

        pipe.server.register("exchange", wait, 1 << 20)
        ends = [pipe.stranger]
        attending = []
        for _ in range(2):
            ours, theirs = socket.socketpair()
            _, stream = await asyncio.get_running_loop().create_connection(P2pdStream, sock=ours)
            attending.append(asyncio.ensure_future(pipe.server.attend(stream, PEER)))
            ends.append((await asyncio.get_running_loop().create_connection(P2pdStream, sock=theirs))[1])
        header = frame.seal_request(wire.Request(exchange=wire.Exchange(round=1)), (), RUN, 5.0)
        for end in ends[:2]:
            await end.write(frame.preamble(FrameKind.REQUEST, len(header)) + header)
        while len(waiting) < 2:
            await asyncio.sleep(0)
        await ends[2].write(frame.preamble(FrameKind.REQUEST, len(header)) + header)
        raw, flags = await frame.receive_header(ends[2], FrameKind.REPLY)
        assert (frame.open_reply(raw).status, flags) == (wire.STATUS_BUSY, FrameFlag.LAST)
        enough.set()
        for end in ends[:2]:
            raw, _ = await frame.receive_header(end, FrameKind.REPLY)
            assert frame.open_reply(raw).status == wire.STATUS_OK
        for end in ends[1:]:
            end.abort()
        await asyncio.gather(*attending)
        assert len(waiting) == 2


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
async def test_an_answer_is_never_ahead_of_the_packet_that_it_answers(share: float) -> None:
    """A partner that announces a packet and keeps it, whole or in part, gets no more of ours."""
    given = 2_000_000
    sent = 1_000_000
    async with Pipe() as pipe:

        async def give(peer: PeerId, call: Call) -> Answer:
            return Answer(wire.Reply(), [WireTensor("u8", (given,), bytes(given))])

        pipe.server.register("exchange", give, 1 << 20)
        whole = sealed(
            WireTensor("u8", (sent,), bytes(sent)), ping=None, exchange=wire.Exchange(round=1), both_ways=True
        )
        cut = len(whole) - round((1.0 - share) * sent)
        await pipe.stranger.write(whole[:cut], beside=True)
        raw, _ = await frame.receive_header(pipe.stranger, FrameKind.REPLY)
        assert frame.open_reply(raw).tensors[0].nbytes == given
        before = pipe.stranger.consumed
        allowed = int(share * given)
        first = max(0, allowed - frame.BESIDE_BYTES)
        got = await pipe.stranger.read(first)
        for _ in range(100):  # turns of the loop in which more would come
            await asyncio.sleep(0)
        assert len(got) <= pipe.stranger.bytes_in - before <= allowed
        await pipe.stranger.write(whole[cut:], beside=True)
        assert got + await pipe.stranger.read(given - first) == bytes(given)


async def test_an_exchange_without_room_is_refused_while_its_handler_waits() -> None:
    async with Pipe() as pipe:
        waiting = asyncio.Event()

        async def wait(peer: PeerId, call: Call) -> Answer:
            waiting.set()
            await asyncio.Event().wait()
            raise AssertionError

        pipe.server.register("exchange", wait, 1 << 20)
        half = WireTensor("u8", (500_000,), bytes(500_000))
        whole = sealed(half, half, ping=None, exchange=wire.Exchange(), both_ways=True)
        await pipe.stranger.write(whole[: len(whole) - half.nbytes - 1], beside=True)
        await waiting.wait()
        others = [pipe.budget.admit(PeerId(f"another{i}"), 1 << 20) for i in range(16)]
        for other in others:
            other.arrive(1 << 20 if other is not others[-1] else 100_000)
        await pipe.stranger.write(whole[len(whole) - half.nbytes - 1 :], beside=True)
        reply, flags = await pipe.reply()
        assert (reply.status, flags) == (wire.STATUS_BUSY, FrameFlag.LAST)
        for other in others:
            other.close()


async def test_a_full_budget_answers_busy() -> None:
    async with Pipe() as pipe:
        others = [pipe.budget.admit(PeerId(f"another{i}"), 1 << 20) for i in range(16)]
        for other in others:
            other.arrive(1 << 20)
        await pipe.stranger.write(sealed(WireTensor("u8", (10,), bytes(10))))
        reply, flags = await pipe.reply()
        assert (reply.status, flags) == (wire.STATUS_BUSY, FrameFlag.LAST)
        for other in others:
            other.close()


async def test_a_header_of_the_largest_size_is_read() -> None:
    async with Pipe() as pipe:
        header = frame.seal_request(request(ping=wire.Ping()), (), RUN, 5.0)
        padding = HEADER_BYTES_MAX - len(header) - 5
        varint = bytes([padding & 0x7F | 0x80, padding >> 7 & 0x7F | 0x80, padding >> 14 & 0x7F])
        header += b"\xc2\x3e" + varint + bytes(padding)  # field 1000, which nobody knows yet
        assert len(header) == HEADER_BYTES_MAX
        await pipe.stranger.write(frame.preamble(FrameKind.REQUEST, len(header)) + header)
        assert (await pipe.reply())[0].status == wire.STATUS_OK

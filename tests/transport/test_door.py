"""The door of the real transport: who may not take part is told why, before anything longer than a pass is read; and
no peer has more of its calls of the DHT verified than its share."""

import asyncio
import time
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hivemind.proto import dht_pb2

from swarmnode.base.errors import Busy, Forbidden, RemoteFault, Unavailable
from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId
from swarmnode.base.wire import access_pb2
from swarmnode.net.transport import frame
from swarmnode.net.transport.frame import FrameKind
from swarmnode.net.transport.libp2p import Libp2pTransport
from swarmnode.net.transport.stranger_limit import (
    ALL_BURST,
    ALL_IDLE_CALLS_BURST,
    ALL_PER_S,
    BROKEN_BURST,
    BROKEN_PER_S,
    CALLS_BURST,
    DROPPED_MAX,
    IDLE_CALLS_PER_S,
    KEYS_BURST,
    KEYS_PER_S,
    DhtLimit,
    StrangerRateLimiter,
)
from swarmnode.run import owner
from swarmnode.run.admission.access import AccessList, AccessRules, sign_access_list, sign_grant, sign_pass
from swarmnode.run.admission.admission import Admission
from tests.support.clock import WallClock
from tests.support.libp2p_node import node
from tests.support.transport_contract import RUN, ping, pong

pytestmark = pytest.mark.node  # real processes of p2pd

OWNER = Ed25519PrivateKey.from_private_bytes(b"o" * 32)
DELEGATE = Identity.of_seed(b"d" * 32)


def a_pass(machine: PeerId) -> access_pb2.Pass:
    until = int(time.time()) + 1000
    return sign_pass(DELEGATE, RUN, sign_grant(OWNER, RUN, DELEGATE, until), machine, until)


def a_admission(mine: access_pb2.Pass | None = None) -> Admission:
    return Admission(AccessRules(RUN, owner.public_bytes(OWNER), is_open=False), WallClock(), mine)


async def call(here: Libp2pTransport, there: Libp2pTransport) -> None:
    await here.call(there.peer_id, ping(), timeout_s=60, reply_bytes_max=0)


@pytest.mark.live
@pytest.mark.loop("uvloop")
async def test_only_those_with_a_pass_are_served() -> None:
    async with asyncio.timeout(120), node() as (there, _), node() as (here, _), node() as (stranger, _):
        admission = a_admission()
        there.let_in(admission)
        there.serve("ping", pong, tensor_bytes_max=0)
        for transport in (there, here, stranger):
            transport.start()
        for transport in (here, stranger):
            await transport.connect(there.peer_id, await there.addresses())
        with pytest.raises(Forbidden, match="by invitation") as caught:
            await call(stranger, there)
        assert caught.value.exit_code == 77
        with pytest.raises(Forbidden, match="by invitation"):
            await call(here, there)
        here.let_in(a_admission(a_pass(here.peer_id)))
        stranger.let_in(a_admission(a_pass(here.peer_id)))
        await call(here, there)
        with pytest.raises(Forbidden, match="another machine's"):
            await call(stranger, there)

        # It announces a header of 1 MiB and sends none of it: refused at its first twelve bytes.
        stream = (await stranger.daemon.open_stream(there.peer_id, [stranger.protocol], 10))[0]
        await stream.write(frame.preamble(FrameKind.REQUEST, frame.HEADER_BYTES_MAX))
        raw, _ = await frame.receive_header(stream, FrameKind.REPLY)
        assert "by invitation" in frame.open_reply(raw).reason
        stream.abort()

        # A pass of a megabyte is not read either.
        stream = (await stranger.daemon.open_stream(there.peer_id, [stranger.protocol], 10))[0]
        await stream.write(frame.preamble(FrameKind.PASS, frame.HEADER_BYTES_MAX))
        raw, _ = await frame.receive_header(stream, FrameKind.REPLY)
        assert "at most 512" in frame.open_reply(raw).reason
        stream.abort()

        # Banned while its stream is open and warm: the next call on it is refused.
        await call(here, there)
        admission.learn(sign_access_list(OWNER, RUN, AccessList(1, banned=frozenset([here.peer_id]))))
        with pytest.raises(Forbidden, match="banned") as caught:
            await call(here, there)
        told = access_pb2.SignedAccessList.FromString(caught.value.evidence)
        assert a_admission().learn(told), "with the owner's own words"
        admission.learn(sign_access_list(OWNER, RUN, AccessList(2, allowed=frozenset([stranger.peer_id]))))
        await call(here, there)
        await call(stranger, there)


@pytest.mark.live
@pytest.mark.loop("uvloop")
async def test_a_peer_above_its_rate_is_not_answered() -> None:
    async with asyncio.timeout(120), node() as (there, _), node() as (stranger, _):
        there.let_in(a_admission())
        there.serve("ping", pong, tensor_bytes_max=0)
        there.start()
        stranger.start()
        await stranger.connect(there.peer_id, await there.addresses())
        told = 0
        for _ in range(60):
            with pytest.raises(RemoteFault) as caught:
                await call(stranger, there)
            told += isinstance(caught.value, Forbidden)
        assert 8 <= told < 60
        while there._server._streams_of:  # nothing is kept of those turned away; the bound is the test's
            await asyncio.sleep(0.05)


async def test_a_noisy_peer_is_not_read_and_a_working_one_is() -> None:
    limit = StrangerRateLimiter()
    peer = PeerId("noisy")
    now_s = 100.0
    for _ in range(int(BROKEN_BURST)):
        assert limit.stream(peer, now_s, works=False)
        limit.broke(peer, now_s)
    assert not limit.stream(peer, now_s, works=False)
    assert limit.stream(peer, now_s, works=True), "a partner is not silenced"
    assert limit.stream(PeerId("other"), now_s, works=False)
    now_s += 1.0 / BROKEN_PER_S
    assert limit.stream(peer, now_s, works=False), "it is told once more what is wrong"
    limit.broke(peer, now_s)
    assert not limit.is_nuisance(peer)
    assert not any(limit.stream(peer, now_s, works=False) for _ in range(DROPPED_MAX))
    assert limit.is_nuisance(peer) and not limit.is_nuisance(peer), "once for so many"


async def test_noise_is_answered_a_few_times_and_then_dropped_unread() -> None:
    async with asyncio.timeout(120), node() as (there, _), node() as (noisy, _):
        there.prefer(lambda peer: False)
        there.serve("ping", pong, tensor_bytes_max=0)
        there.start()
        noisy.start()
        await noisy.connect(there.peer_id, await there.addresses())
        answered = 0
        for _ in range(3 * int(BROKEN_BURST)):
            stream, _ = await noisy.daemon.open_stream(there.peer_id, [noisy.protocol], 10.0)
            try:
                await stream.write(b"noise " * 100)
                await stream.read(1)
                answered += 1
            except (RemoteFault, Unavailable, ConnectionError):
                pass
            finally:
                stream.abort()
        assert BROKEN_BURST <= answered < 2 * BROKEN_BURST


def test_many_keys_that_never_worked_make_no_more_calls_than_a_few_and_who_works_is_not_touched() -> None:
    limit = StrangerRateLimiter()
    calls = 0
    for number in range(100):
        calls += sum(limit.call(PeerId(f"key {number}"), 100.0, works=False) for _ in range(2000))
    assert calls == ALL_IDLE_CALLS_BURST
    assert all(limit.call(PeerId("partner"), 100.0) for _ in range(int(CALLS_BURST)))
    assert sum(limit.call(PeerId("key 1"), 101.0, works=False) for _ in range(2000)) == IDLE_CALLS_PER_S


def test_ten_thousand_keys_are_no_memory() -> None:
    stranger_limit = StrangerRateLimiter()
    answered = sum(stranger_limit.stranger(PeerId(f"peer-{number}"), number / 1000) for number in range(10_000))
    assert answered <= 64 + 20 * 10 + 1, "all strangers together have one rate"
    assert len(stranger_limit._refusals) <= 4096


def test_a_peer_and_all_peers_together_have_their_rates() -> None:
    limit = DhtLimit()
    assert limit.take("one", int(KEYS_BURST), 0.0) and not limit.take("one", 1, 0.0)
    assert limit.take("other", 1, 0.0), "a flood of one peer costs others nothing"
    assert sum(limit.take("one", 1, 10.0) for _ in range(2 * int(10 * KEYS_PER_S))) == 10 * KEYS_PER_S
    keys = [limit.take(f"key {number}", 1, 10.0) for number in range(2 * int(ALL_BURST))]
    assert sum(keys) <= ALL_BURST + 10.0 * ALL_PER_S and not keys[-1]


@pytest.mark.parametrize("keys", [int(KEYS_BURST), 1], ids=["many keys", "a long answer"])
async def test_beyond_it_the_handler_is_not_reached(keys: int) -> None:
    served = []
    request = dht_pb2.FindRequest(keys=[b"key"] * keys)

    async def handler(request: dht_pb2.FindRequest, context: SimpleNamespace) -> dht_pb2.FindResponse:
        served.append(request)
        return dht_pb2.FindResponse(peer=dht_pb2.NodeInfo(node_id=bytes(800_000 // keys)))

    limited = DhtLimit().limited(handler)
    await limited(request, SimpleNamespace(remote_id="one"))
    with pytest.raises(Busy):
        await limited(request, SimpleNamespace(remote_id="one"))
    assert len(served) == 1

"""The real transport between real processes: death, silence, garbage, restarts, and what is left behind."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from swarmnode.base.errors import Busy, LocalFault, PeerTimeout, RemoteFault, Unavailable, UsageError
from swarmnode.base.ids import PeerId
from swarmnode.base.ports import Answer, Call
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.net.transport import frame
from swarmnode.net.transport.frame import FrameKind
from swarmnode.net.transport.key_file import create
from swarmnode.net.transport.libp2p import Libp2pTransport
from swarmnode.net.transport.socket_dir import SocketDir
from swarmnode.net.transport.stream import P2pdStream
from tests.support.fake_telemetry import Quiet
from tests.support.libp2p_node import node, until
from tests.support.transport_contract import MIB, RUN, echo, ping, pong, process, refusing, tensor

from .peer import PeerProcess, peer_process

pytestmark = [pytest.mark.node, pytest.mark.loop("uvloop")]  # real processes of p2pd

HANG = Call(wire.Request(exchange=wire.Exchange()))


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@asynccontextmanager
async def pair(folder: Path) -> AsyncIterator[tuple[Libp2pTransport, PeerProcess]]:
    async with node() as (here, _), peer_process(folder / "peer.key", RUN) as peer:
        await here.connect(peer.peer_id, peer.addresses)
        here.serve("ping", pong, tensor_bytes_max=0)
        here.start()
        yield here, peer


@pytest.mark.live
async def test_a_peer_killed_mid_call_is_a_fault_and_leaves_nothing_behind(tmp_path: Path) -> None:
    async with pair(tmp_path) as (here, peer):
        await here.call(peer.peer_id, ping(), timeout_s=60, reply_bytes_max=0)
        sockets = peer.said["sockets"]
        call = asyncio.get_running_loop().create_task(here.call(peer.peer_id, HANG, timeout_s=100, reply_bytes_max=0))
        await asyncio.sleep(0)
        os.kill(peer.pid, signal.SIGKILL)
        with pytest.raises(RemoteFault) as caught:
            await call
        assert not isinstance(caught.value, PeerTimeout)
        with pytest.raises(RemoteFault, match="cannot be reached|disconnected"):
            await here.call(peer.peer_id, ping(), timeout_s=60, reply_bytes_max=0)
        await peer.ended()
        await until(lambda: gone(peer.said["p2pd"]))
        SocketDir().remove()  # any node that starts sweeps
        assert not os.access(sockets, os.F_OK)


@pytest.mark.live
async def test_a_frozen_peer_is_a_timeout_and_works_again_when_it_thaws(tmp_path: Path) -> None:
    async with pair(tmp_path) as (here, peer):
        os.kill(peer.pid, signal.SIGSTOP)
        for call in (ping(), process(tensor(30 * MIB))):
            with pytest.raises(PeerTimeout):
                await here.call(peer.peer_id, call, timeout_s=0.4, reply_bytes_max=64 * MIB)
        os.kill(peer.pid, signal.SIGCONT)
        await here.call(peer.peer_id, ping(), timeout_s=60, reply_bytes_max=0)


async def answers(here: Libp2pTransport, peer: PeerId) -> bool:
    try:
        await here.call(peer, ping(), timeout_s=60, reply_bytes_max=0)
    except RemoteFault:
        return False
    return True


@pytest.mark.live
async def test_a_stale_stream_is_replaced_when_the_peer_comes_back_at_its_address(tmp_path: Path) -> None:
    async with pair(tmp_path) as (here, peer):
        await here.call(peer.peer_id, ping(), timeout_s=60, reply_bytes_max=0)
        stream = here._pool._idle[peer.peer_id][0][1]
        await peer.ask("end")
        await peer.ended()
        await until(lambda: stream.lost)
        async with peer_process(tmp_path / "peer.key", RUN, peer.addresses[0]) as again:
            assert again.peer_id == peer.peer_id
            assert again.addresses == peer.addresses
            # libp2p refuses to dial for some seconds after a refused dial ("dial backoff"): that is an error at
            # once, as routing wants it, and over by itself.
            async with asyncio.timeout(60):
                while not await answers(here, peer.peer_id):
                    await asyncio.sleep(0.2)


@pytest.mark.live
async def test_p2pd_of_either_side_killed_is_started_again(tmp_path: Path) -> None:
    async with pair(tmp_path) as (here, peer):
        here._telemetry = quiet = Quiet()
        addresses = await here.addresses()
        call = asyncio.get_running_loop().create_task(here.call(peer.peer_id, HANG, timeout_s=100, reply_bytes_max=0))
        await until(lambda: here._pool.in_use[peer.peer_id] > 0)
        old = here.daemon.pid
        os.kill(old, signal.SIGKILL)
        with pytest.raises((Unavailable, RemoteFault)):
            await call
        await here.call(peer.peer_id, ping(), timeout_s=60, reply_bytes_max=0)
        assert here.daemon.pid != old
        assert await here.addresses() == addresses
        assert str(here.daemon.peer_id) == here.peer_id
        # The peer calls us back on a new stream: the handlers are registered again.
        await here.call(peer.peer_id, Call(wire.Request(manifest={})), timeout_s=60, reply_bytes_max=0)
        # On a busy machine the gate for strangers may have changed meanwhile.
        assert [event for event, _ in quiet.events if event != "gate.changed"] == ["p2pd.died", "p2pd.restarted"]

        os.kill(peer.said["p2pd"], signal.SIGKILL)
        for _ in range(600):
            try:
                await here.call(peer.peer_id, ping(), timeout_s=60, reply_bytes_max=0)
                break
            except RemoteFault:
                await asyncio.sleep(0.1)
        else:
            pytest.fail("the peer did not come back")


@pytest.mark.live
@pytest.mark.parametrize("kill", [True, False])
async def test_sockets_swept_by_a_cleaner_are_made_anew(tmp_path: Path, kill: bool) -> None:
    """Temporary files are swept after ten days. Either p2pd dies later, or the node sees that its sockets are gone."""
    async with pair(tmp_path) as (here, peer):
        old = here.daemon.pid
        swept = here.daemon.sockets.path
        shutil.rmtree(swept)
        if kill:
            os.kill(old, signal.SIGKILL)
        await until(lambda: here.daemon.sockets.path != swept and here.daemon.running.is_set())
        assert here.daemon.pid != old
        while not await answers(here, peer.peer_id):  # a first dial may fail, and libp2p backs off for seconds
            await asyncio.sleep(0.2)
        # The peer calls us back on a new stream: p2pd hands it to the new socket.
        await here.call(peer.peer_id, Call(wire.Request(manifest={})), timeout_s=60, reply_bytes_max=0)


async def test_p2pd_that_dies_again_and_again_breaks_the_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmnode.net.transport.p2pd_process.RESTARTS_MAX", 1)
    async with node() as (here, identity):
        waiting = asyncio.get_running_loop().create_task(here.wait_failed())
        os.kill(here.daemon.pid, signal.SIGKILL)
        await until(lambda: not here.daemon.running.is_set())
        await here.daemon.running.wait()
        os.kill(here.daemon.pid, signal.SIGKILL)
        with pytest.raises(LocalFault, match="p2pd died 2 times"):
            await waiting
        with pytest.raises(LocalFault, match="p2pd died 2 times"):
            await here.call(identity.peer_id, ping(), timeout_s=60, reply_bytes_max=0)


async def test_a_p2pd_that_answers_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmnode.net.transport.p2pd_process.PING_PERIOD_S", 0.05)
    async with node() as (here, _):
        frozen = here.daemon.pid
        os.kill(frozen, signal.SIGSTOP)
        with monkeypatch.context() as impatient:
            impatient.setattr("swarmnode.net.transport.p2pd_process.CONTROL_TIMEOUT_S", 0.3)
            await until(lambda: gone(frozen))
        await until(here.daemon.running.is_set)
        assert await here.addresses()


@asynccontextmanager
async def stranger(to: Libp2pTransport) -> AsyncIterator[Callable[[], Awaitable[P2pdStream]]]:
    """A node that opens raw streams to `to`."""
    async with node() as (other, _):
        await other.connect(to.peer_id, await to.addresses())

        async def opened() -> P2pdStream:
            return (await other.daemon.open_stream(to.peer_id, [to.protocol], 10))[0]

        yield opened


async def test_bytes_announced_and_never_sent_starve_neither_callers_nor_our_own_calls() -> None:
    """Two bare peers announce four tensors of 1 GiB each and send nothing: another peer is served all the same, and
    the answers to our own calls find room. These waited for the budget, and the peers that gave them were banned."""

    async with node() as (here, _), node() as (other, _), stranger(here) as first, stranger(here) as second:
        here.serve("process", echo, tensor_bytes_max=4 << 30)
        here.start()
        other.serve("process", echo, tensor_bytes_max=4 << 30)
        other.start()
        huge = wire.TensorSpec(dtype="u8", shape=[1 << 30], nbytes=1 << 30)
        header = process().header
        header.version = frame.VERSION
        header.run_id = RUN[16:32]
        header.timeout_ms = 600_000
        header.tensors.extend([huge] * 4)
        raw = header.SerializeToString()
        streams = [await opened() for opened in (first, second) for _ in range(4)]
        for stream in streams:
            await stream.write(frame.preamble(FrameKind.REQUEST, len(raw)) + raw)
        await until(lambda: len(here._budget._large) == 1)
        assert here._budget.used_bytes <= 2 * frame.PIECE_BYTES
        await other.connect(here.peer_id, await here.addresses())
        call = process(tensor(MIB))
        for _ in range(4):
            await other.call(here.peer_id, call, timeout_s=60, reply_bytes_max=MIB)
            await here.call(other.peer_id, call, timeout_s=60, reply_bytes_max=MIB)
        for stream in streams:
            stream.abort()
        await until(lambda: here._budget.used_bytes == 0)


async def test_a_caller_that_is_not_admitted_is_refused_before_its_tensors_are_read() -> None:
    """Its stream ends, and what it goes on sending is never held."""

    async with node() as (here, _), node() as (other, _):
        admitted: set[PeerId] = set()
        seen = list[int]()

        def admit(peer: PeerId, header: wire.Request) -> None:
            seen.append(here._budget.used_bytes)
            if peer not in admitted:
                raise Unavailable("no business of yours")

        here.serve("process", echo, tensor_bytes_max=64 * MIB, admit=admit)
        here.start()
        await other.connect(here.peer_id, await here.addresses())
        with pytest.raises(Unavailable, match="no business of yours"):
            await other.call(here.peer_id, process(tensor(64 * MIB)), timeout_s=60, reply_bytes_max=64 * MIB)
        assert seen == [0] and here._budget.used_bytes == 0
        admitted.add(other.peer_id)
        await other.call(here.peer_id, process(tensor(MIB)), timeout_s=60, reply_bytes_max=MIB)


async def test_a_node_of_another_protocol_version_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    async with node() as (here, _):
        here.serve("ping", pong, tensor_bytes_max=0)
        here.start()
        with monkeypatch.context() as older:
            older.setattr(frame, "VERSION", frame.VERSION - 1)
            older.setattr(frame, "LEAST", frame.LEAST - 1)
            async with node() as (other, _):
                await other.connect(here.peer_id, await here.addresses())
                with pytest.raises(RemoteFault, match="another protocol version .update the older of the two"):
                    await other.call(here.peer_id, ping(), timeout_s=60, reply_bytes_max=0)


async def test_two_versions_speak_the_newest_that_both_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """Either way round, and two of the newer one speak the newer."""
    async with node() as (today, _):
        with monkeypatch.context() as later:
            later.setattr(frame, "VERSION", frame.VERSION + 1)
            async with node() as (newer, _), node() as (newest, _):
                versions = []
                for number, server in enumerate((today, newer)):

                    async def tell(peer: PeerId, call: Call) -> Answer:
                        versions.append(call.header.version)
                        return Answer(wire.Reply(pong=wire.Pong(payload=call.header.ping.payload)))

                    server.serve("ping", tell, tensor_bytes_max=0)
                    server.start()
                    for caller in (newer, newest) if not number else (today, newest):
                        await caller.connect(server.peer_id, await server.addresses())
                        answer = await caller.call(server.peer_id, ping(b"x"), timeout_s=60, reply_bytes_max=0)
                        assert answer.header.pong.payload == b"x"
                assert versions == [2, 2, 2, 3]


async def test_calls_that_come_before_start_wait_for_it() -> None:
    async with node() as (here, _), node() as (other, _):
        await other.connect(here.peer_id, await here.addresses())
        call = asyncio.get_running_loop().create_task(
            other.call(here.peer_id, ping(b"early"), timeout_s=60, reply_bytes_max=0)
        )
        await until(lambda: here._incoming == 1)
        here.serve("ping", pong, tensor_bytes_max=0)
        here.start()
        assert (await call).header.pong.payload == b"early"


async def test_a_warm_stream_is_used_again_and_closed_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    async with node() as (here, _), node() as (other, _):
        here.serve("ping", pong, tensor_bytes_max=0)
        here.serve("process", refusing(Busy("no")), tensor_bytes_max=MIB)
        here.start()
        await other.connect(here.peer_id, await here.addresses())
        for _ in range(5):
            await other.call(here.peer_id, ping(), timeout_s=60, reply_bytes_max=0)
            with pytest.raises(Busy):
                await other.call(here.peer_id, process(tensor(MIB)), timeout_s=60, reply_bytes_max=0)
        assert here._incoming == 1
        assert [len(idle) for idle in other._pool._idle.values()] == [1]
        monkeypatch.setattr("swarmnode.net.transport.stream_transport.IDLE_S", 0.0)
        other._pool.sweep()
        assert not other._pool._idle
        await until(lambda: here._incoming == 0)


async def test_too_many_calls_to_one_peer_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmnode.net.transport.stream_transport.IN_USE_MAX", 1)
    async with node() as (here, _), node() as (other, _):
        await other.connect(here.peer_id, await here.addresses())
        first = asyncio.get_running_loop().create_task(
            other.call(here.peer_id, ping(), timeout_s=60, reply_bytes_max=0)
        )
        await asyncio.sleep(0)
        with pytest.raises(Busy, match="1 calls to"):
            await other.call(here.peer_id, ping(), timeout_s=60, reply_bytes_max=0)
        here.serve("ping", pong, tensor_bytes_max=0)
        here.start()
        await first


async def test_addresses_that_cannot_be_listened_on(tmp_path: Path) -> None:
    before = {path.name for path in Path("/tmp").glob(f"swarmnode-p2p-{os.getpid()}-*")}
    key = tmp_path / "node.key"
    identity = create(key)
    async with node() as (taken, _):
        (address,) = await taken.addresses()
        with pytest.raises(UsageError, match="the port is in use"):
            await Libp2pTransport.create(key, identity, RUN, [address])
    for wrong in ("/ip4/203.0.113.7/tcp/4001", "localhost:4001", "/dns/localhost/tcp/1"):
        with pytest.raises(UsageError):
            await Libp2pTransport.create(key, identity, RUN, [wrong])
    other = create(tmp_path / "other.key")
    with pytest.raises(LocalFault, match="holds the key of"):
        await Libp2pTransport.create(key, other, RUN)
    assert len(asyncio.all_tasks()) == 1
    assert {path.name for path in Path("/tmp").glob(f"swarmnode-p2p-{os.getpid()}-*")} == before


async def test_p2pd_is_not_in_our_process_group() -> None:
    async with node() as (here, _):
        assert os.getpgid(here.daemon.pid) != os.getpgid(os.getpid())  # Ctrl-C is ours to handle

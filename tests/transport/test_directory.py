"""The directory on a real DHT: processes find each other, liars are not believed, what is down is waited for."""

import asyncio
import gc
import math
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hivemind.dht import node as hivemind_node
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings import control
from hivemind.proto import p2pd_pb2
from hivemind.utils import MSGPackSerializer

from swarmnode.base.errors import Unreachable
from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.wire import record_pb2
from swarmnode.net.membership.record import sign_record
from swarmnode.net.transport import hivemind_patches
from swarmnode.net.transport.call_directory import CallDirectory
from swarmnode.net.transport.contact import Contacts
from swarmnode.net.transport.contact_keeper import (
    POINT_CHECK_MAX_S,
    POINT_CHECK_S,
    POINT_CHECKS_PER_S,
    point_check_s,
)
from swarmnode.net.transport.directory import DhtDirectory, key_of
from swarmnode.net.transport.key_file import create
from swarmnode.net.transport.libp2p import Libp2pTransport
from tests.support.fake_telemetry import Quiet
from tests.support.libp2p_node import node, until
from tests.support.records import resigned
from tests.support.transport_contract import RUN, record_of

from .peer import STAGES, peer_process

pytestmark = pytest.mark.node  # real processes of p2pd


def bootstrap(transport: Libp2pTransport, addresses: list[str]) -> list[tuple[PeerId, list[str]]]:
    return [(transport.peer_id, addresses)]


@pytest.mark.live
@pytest.mark.loop("uvloop")
async def test_independent_processes_find_each_other(tmp_path: Path) -> None:
    async with AsyncExitStack() as living:
        first = await living.enter_async_context(peer_process(tmp_path / "0.key", RUN))
        peers = [first] + [
            await living.enter_async_context(peer_process(tmp_path / f"{i}.key", RUN, bootstraps=first.bootstraps))
            for i in (1, 2)
        ]
        for peer in peers:
            assert await peer.ask("announce")
        everybody = sorted(peer.peer_id for peer in peers)
        for peer in peers:
            assert await peer.ask("lookup") == everybody
        # The one everybody came through dies; the others go on without it.
        os.kill(first.pid, signal.SIGKILL)
        await first.ended()
        assert set(everybody[:0] + [p.peer_id for p in peers[1:]]) <= set(await peers[1].ask("lookup"))


@pytest.mark.live
@pytest.mark.loop("uvloop")
async def test_a_directory_survives_the_death_of_its_p2pd(tmp_path: Path) -> None:
    async with peer_process(tmp_path / "0.key", RUN) as first, node() as (here, me):
        known = [(first.peer_id, first.addresses)]
        directory = await DhtDirectory.create(here, known, RUN, STAGES, unix_s=time.time)
        assert await first.ask("announce")
        os.kill(here.daemon.pid, signal.SIGKILL)
        for attempt in range(600):
            record = record_of(me, time.time(), sequence=attempt, ttl_s=60)
            if (await directory.announce(sign_record(record, me))).stored and me.peer_id in await first.ask("lookup"):
                break
            await asyncio.sleep(0.1)
        else:
            pytest.fail("the other process does not see us again")
        found = [record_pb2.Record.FromString(s.record).peer_id for s in await directory.lookup(0)]
        assert first.peer_id in found
        await directory.close()


@pytest.mark.loop("uvloop")
async def test_joining_waits_for_a_bootstrap_that_is_not_up_yet(tmp_path: Path) -> None:
    key = tmp_path / "late.key"
    identity = create(key)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"/ip4/127.0.0.1/tcp/{free.getsockname()[1]}"
    async with node() as (here, _):
        joining = asyncio.get_running_loop().create_task(
            DhtDirectory.create(here, [(identity.peer_id, [address])], RUN, 1, join_timeout_s=60, unix_s=time.time)
        )
        await asyncio.sleep(0.5)
        assert not joining.done()
        late = await Libp2pTransport.create(key, identity, RUN, [address])
        try:
            first = await DhtDirectory.create(late, [], RUN, 1, unix_s=time.time)
            second = await joining
            await second.close()
            await first.close()
        finally:
            await late.close()


@pytest.mark.loop("uvloop")
async def test_a_bootstrap_that_never_answers_is_unreachable() -> None:
    nobody = Identity.of_seed(bytes(32)).peer_id
    async with node() as (here, _):
        with pytest.raises(Unreachable, match=rf"within 1 s \(tried {nobody} at /ip4/127.0.0.1/tcp/9;") as caught:
            await DhtDirectory.create(
                here, [(nobody, ["/ip4/127.0.0.1/tcp/9"])], RUN, 1, join_timeout_s=1, unix_s=time.time
            )
        assert "\n" not in str(caught.value)
        # Nothing of the attempt is in the way of the next one.
        directory = await DhtDirectory.create(here, [], RUN, 1, unix_s=time.time)
        await directory.close()


@pytest.mark.loop("uvloop")
async def test_a_contact_that_is_forgotten_before_it_is_tried_does_no_harm() -> None:
    nobody = Identity.of_seed(bytes(32)).peer_id
    contacts = Contacts()
    loop = asyncio.get_running_loop()
    async with node() as (here, _):
        directory = await DhtDirectory.create(here, [], RUN, 1, contacts=contacts, unix_s=time.time)
        contacts.hear(nobody, ["/ip4/127.0.0.1/tcp/9"], 1.0)
        trying = loop.create_task(directory.keeper.try_lost({}, here=set()))
        loop.call_soon(contacts.known.clear)
        assert not await trying
        await directory.close()


@pytest.mark.loop("uvloop")
async def test_a_node_that_a_former_contact_greets_first_has_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a cut: all start again, each tries the others before they listen, and the bootstrap is gone for good."""
    monkeypatch.setattr("swarmnode.net.transport.contact.RETRY_MIN_S", 0.1)
    nobody = Identity.of_seed(bytes(32)).peer_id
    closed = ["/ip4/127.0.0.1/tcp/9"]
    async with node() as (here, _), node() as (there, _):
        other = await DhtDirectory.create(there, [], RUN, 1, unix_s=time.time)
        contacts = Contacts()
        contacts.hear(there.peer_id, closed, time.time())
        create = DhtDirectory.create(
            here, [(nobody, closed)], RUN, 1, join_timeout_s=60, contacts=contacts, unix_s=time.time
        )
        joining = asyncio.get_running_loop().create_task(create)
        await until(lambda: contacts.known[there.peer_id].failures > 0)
        await there.connect(here.peer_id, await here.addresses())
        while not await other.greet(here.peer_id):
            await asyncio.sleep(0.02)
        directory = await joining
        await directory.close()
        await other.close()


@pytest.mark.loop("uvloop")
async def test_a_bootstrap_that_is_back_is_a_holder_at_once() -> None:
    async with node() as (here, _), node() as (there, _):
        other = await CallDirectory.create(there, [], RUN, 1, unix_s=time.time)
        point = bootstrap(there, await there.addresses())
        directory = await CallDirectory.create(here, point, RUN, 1, unix_s=time.time)
        there.withdraw("records")
        assert not await directory._learn(there.peer_id, 0) and await directory._holders(0) == [here.peer_id]
        there.serve("records", other._answer, tensor_bytes_max=0)
        assert await directory.keeper.try_lost({}, set()) and await directory._holders(0) == [there.peer_id]
        await directory.close()
        await other.close()


@pytest.mark.parametrize("kind", [CallDirectory, DhtDirectory])
@pytest.mark.loop("uvloop")
async def test_a_meeting_point_that_goes_and_comes_is_told_each_time(
    kind: type[CallDirectory], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever of the two calls first."""
    monkeypatch.setattr("swarmnode.net.transport.contact_keeper.POINT_CHECK_S", 0.2)
    monkeypatch.setattr("swarmnode.net.transport.contact_keeper.RETRY_MIN_S", 0.1)
    key = tmp_path / "point.key"
    identity = create(key)
    quiet = Quiet()

    def last() -> str:
        return [event for event, _ in quiet.events if event.startswith("bootstrap.")][-1]

    async with node() as (here, _):
        point = await Libp2pTransport.create(key, identity, RUN)
        listening = point.listening
        other = await kind.create(point, [], RUN, 1, unix_s=time.time)
        known = bootstrap(point, await point.addresses())
        directory = await kind.create(here, known, RUN, 1, unix_s=time.time, telemetry=quiet)  # type: ignore[arg-type]
        for _ in range(2):
            await until(lambda: last() == "bootstrap.connected")
            await other.close()
            await point.close()
            await until(lambda: last() == "bootstrap.unreachable")
            point = await Libp2pTransport.create(key, identity, RUN, listening)
            other = await kind.create(point, bootstrap(here, await here.addresses()), RUN, 1, unix_s=time.time)
        await until(lambda: last() == "bootstrap.connected")
        await directory.close()
        await other.close()
        await point.close()


def test_a_meeting_point_of_many_is_asked_more_rarely_by_each() -> None:
    assert point_check_s(12) == POINT_CHECK_S
    assert point_check_s(1000) == 1000 / POINT_CHECKS_PER_S
    assert point_check_s(10**6) == POINT_CHECK_MAX_S


@asynccontextmanager
async def liar_and_victim() -> AsyncIterator[tuple[Any, Identity, DhtDirectory, Libp2pTransport]]:
    """(the liar's DHT node, its identity, the victim's directory and transport); they know each other."""
    async with node() as (here, _), node() as (there, liar):
        victim = await DhtDirectory.create(here, [], RUN, 2, ttl_max_s=100, unix_s=time.time)
        lying = await DhtDirectory.create(
            there, bootstrap(here, await here.addresses()), RUN, 2, ttl_max_s=100, unix_s=time.time
        )
        yield lying._node, liar, victim, here
        await lying.close()
        await victim.close()


@pytest.mark.loop("uvloop")
async def test_bad_records_are_not_stored() -> None:
    other = Identity.of_seed(bytes([5] * 32))
    async with liar_and_victim() as (node_of_liar, liar, victim, here):
        now = time.time()

        async def store(
            signed: record_pb2.SignedRecord | bytes,
            *,
            subkey: str = liar.peer_id,
            key: str = f"{RUN}/0/0",
            expires: float | None = None,
        ) -> bool:
            raw = signed if isinstance(signed, bytes) else signed.SerializeToString()
            if expires is None:
                record = record_pb2.Record.FromString(record_pb2.SignedRecord.FromString(raw).record)
                expires = record.expires_unix_ms / 1000
            (stored,) = await node_of_liar.protocol.call_store(
                PeerID.from_base58(here.peer_id),
                [DHTID.generate(source=key)],
                [MSGPackSerializer.dumps(raw)],
                [expires],
                subkeys=[subkey],
            )
            return bool(stored)

        honest = record_of(liar, now, ttl_s=50)
        forged = record_of(other, now, ttl_s=50)
        oversized = record_of(liar, now, ttl_s=50)
        oversized.version = "x" * 1280
        far = record_of(liar, now, ttl_s=50, run_id=RunId("ef" * 32))
        later = round(honest.expires_unix_ms / 1000 + 40)
        assert not await store(resigned(forged, liar), subkey=other.peer_id)
        assert not await store(resigned(honest, liar), subkey=other.peer_id)
        assert not await store(resigned(oversized, liar))
        assert not await store(resigned(far, liar))
        assert not await store(resigned(honest, liar), key=f"{RUN}/1/0")
        assert not await store(resigned(honest, liar), key="anything else")
        assert not await store(resigned(honest, liar), expires=later)
        assert not await store(resigned(record_of(liar, now, ttl_s=200), liar))
        assert not await store(resigned(record_of(liar, now, ttl_s=-5), liar))
        assert not await store(b"\xff garbage", expires=now + 20)
        assert not await store(b"", expires=now + 20)
        assert await victim.lookup(0) == []
        assert await store(resigned(honest, liar))
        assert [found.record for found in await victim.lookup(0)] == [honest.SerializeToString()]
        # A replay of an older one does not shorten the life of the newer one.
        assert not await store(resigned(record_of(liar, now, ttl_s=0.3), liar))
        await asyncio.sleep(0.5)
        assert len(await victim.lookup(0)) == 1


@pytest.mark.loop("uvloop")
async def test_one_bad_entry_in_the_dictionary_of_an_older_version_does_not_hide_the_good_ones() -> None:
    async with liar_and_victim() as (node_of_liar, liar, victim, _):
        victim._calls._mute[liar.peer_id] = math.inf  # as a peer that does not know what a RecordsRequest is
        other = Identity.of_seed(bytes([5] * 32))
        key = DHTID.generate(source=f"{RUN}/0/0")
        now = time.time()
        good, bad = (record_of(who, now, ttl_s=50) for who in (liar, other))
        for record in (good, bad):
            value = MSGPackSerializer.dumps(resigned(record, liar).SerializeToString())
            node_of_liar.protocol.storage.store_subkey(key, record.peer_id, value, record.expires_unix_ms / 1000)
        assert [found.record for found in await victim.lookup(0)] == [good.SerializeToString()]


@pytest.mark.loop("uvloop")
async def test_records_are_stored_in_the_dht_as_older_versions_look_for_them() -> None:
    async with node() as (first, me), node() as (second, _):
        here = await DhtDirectory.create(first, [], RUN, STAGES, unix_s=time.time)
        there = await DhtDirectory.create(
            second, bootstrap(first, await first.addresses()), RUN, STAGES, unix_s=time.time
        )
        signed = sign_record(record_of(me, time.time(), sequence=1, ttl_s=60), me)
        assert (await here.announce(signed)).stored
        for directory in (here, there):
            kept = directory._node.protocol.storage.get(key_of(RUN, 0))
            assert kept is not None
            assert MSGPackSerializer.loads(kept.value.get(me.peer_id).value) == signed.SerializeToString()
        await there.close()
        await here.close()


@pytest.mark.loop("uvloop")
async def test_a_process_hears_of_the_record_of_its_key_whose_place_it_takes(tmp_path: Path) -> None:
    async with peer_process(tmp_path / "0.key", RUN) as first, node() as (here, me):
        told = list[list[record_pb2.SignedRecord]]()
        records = [sign_record(record_of(me, time.time(), ttl_s=60 + n, sequence=n), me) for n in range(3)]
        known = [(first.peer_id, first.addresses)]
        for process in range(2):  # the second one has an empty book
            directory = await DhtDirectory.create(here, known, RUN, STAGES, unix_s=time.time)
            for record in records[process : 2 * process + 1]:
                told.append([*(await directory.announce(record)).others])
            await directory.close()
            here.withdraw("records")
        assert told == [[], [records[0]], [records[1]]]


async def test_a_frozen_neighbour_makes_lookups_slow_but_never_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmnode.net.transport.call_directory.SMALL_CALL_S", 0.5)
    async with peer_process(tmp_path / "0.key", RUN) as first, node() as (here, me):
        directory = await DhtDirectory.create(here, [(first.peer_id, first.addresses)], RUN, STAGES, unix_s=time.time)
        record = sign_record(record_of(me, time.time(), ttl_s=60), me)
        assert (await directory.announce(record)).stored
        os.kill(first.pid, signal.SIGSTOP)
        assert [found.record for found in await directory.lookup(0)] == [record.record]
        assert not (await directory.announce(record)).others
        os.kill(first.pid, signal.SIGCONT)


async def test_a_cancelled_search_ends_by_itself() -> None:
    """hivemind's own leaves a task for each worker, of which asyncio complains once they are collected."""
    hivemind_patches.apply()
    complaints: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
    query = DHTID.generate(source="key")
    answered = asyncio.Event()
    told = []

    async def ask(peer: DHTID, queries: list[DHTID]) -> dict[DHTID, tuple[tuple[DHTID, ...], bool]]:
        await answered.wait()
        return dict.fromkeys(queries, ((), False))

    async def tell(*found: object) -> None:
        told.append(found)

    peers = [DHTID.generate(source=str(i)) for i in range(5)]
    before = asyncio.all_tasks()
    options = {"beam_size": 5, "num_workers": 3, "queries_per_call": 1, "get_neighbors": ask, "found_callback": tell}
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await hivemind_node.traverse_dht([query], peers, **options)
    answered.set()
    for _ in range(20):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
    gc.collect()
    assert not complaints and not told
    await hivemind_node.traverse_dht([query], peers, **options)
    assert len(told) == 1, "a search that nobody cancels tells its result"


def test_a_rejected_store_leaves_the_newer_record_alone() -> None:
    hivemind_patches.apply()
    storage = DHTLocalStorage()
    key = DHTID.generate(source="key")
    now = time.time()
    assert storage.store(key, b"new", now + 100)
    assert not storage.store(key, b"old", now + 0.01)
    assert not storage.store(key, b"same", now + 100)
    assert storage.store(key, b"newer", now + 101)
    assert storage.get(key).value == b"newer"
    nested = DictionaryDHTValue()
    assert nested.store("a", b"new", now + 100)
    assert not nested.store("a", b"old", now + 50)
    assert nested.get("a").value == b"new"


async def test_an_answer_to_a_cancelled_call_leaves_the_others() -> None:
    """hivemind's own reader ends at such an answer, and with it every call of the process."""
    hivemind_patches.apply()
    client = control.ControlClient.__new__(control.ControlClient)
    stream = asyncio.StreamReader()
    ids = [uuid4() for _ in range(2)]
    loop = asyncio.get_running_loop()
    cancelled, other = (loop.create_future() for _ in ids)
    client._pending_calls = dict(zip(ids, (cancelled, other), strict=True))
    client._handler_tasks = {}
    cancelled.cancel()
    for call_id in ids:
        answer = p2pd_pb2.CallUnaryResponse(response=b"here")
        raw = p2pd_pb2.PersistentConnectionResponse(callId=call_id.bytes, callUnaryResponse=answer).SerializeToString()
        stream.feed_data(bytes([len(raw)]) + raw)
    reading = asyncio.create_task(client._read_from_persistent_conn(stream))
    async with asyncio.timeout(10.0):
        assert await other == b"here"
        stream.feed_eof()
        await reading

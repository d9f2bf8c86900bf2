"""The real Directory: signed records in hivemind's DHT, on the same p2pd as the calls.

The DHT only gives hints. Each place (a stage) has a key; each node owns one subkey of it, its
peer id, and only it may store that. All keys are known in advance and all values are verified SignedRecords.

A find of the DHT moves all records under a key from each of its HOLDERS, and so does a store. So both are only used to
learn which nodes those are; what they hold is asked by calls (call_directory.py). Nodes that do not speak these are
asked as the DHT does.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from typing import Any

from hivemind.dht import DHTNode
from hivemind.dht.protocol import ValidationError
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer, timed_storage

from swarmnode.base import bounds
from swarmnode.base.errors import LocalFault, RemoteFault, cause_of
from swarmnode.base.ids import PeerId, RunId, short
from swarmnode.base.wire import record_pb2 as wire
from swarmnode.net.membership.liveness import SMALL_CALL_S
from swarmnode.net.membership.record import SIGNED_BYTES_MAX
from swarmnode.net.transport.call_directory import CallDirectory, surely_ahead_s
from swarmnode.net.transport.libp2p import Libp2pTransport
from swarmnode.net.transport.p2pd_process import P2pdProcess
from swarmnode.net.transport.record_book import HOLDERS, NEAR_S, RPC_TIMEOUT_S, RecordBook
from swarmnode.net.transport.stranger_limit import DhtLimit, RpcHandler


def key_of(run_id: RunId, place: int) -> DHTID:
    """The DHT's key of the records of `place`."""
    return DHTID.generate(source=f"{run_id}/{place}/0")


class RecordValidator(RecordValidatorBase):  # type: ignore[misc]
    """Decides what this node stores for others and takes from their dictionaries: records that `book` takes, under the
    right key and subkey. Runs on every store and every entry read."""

    def __init__(self, run_id: RunId, book: RecordBook) -> None:
        self._book = book
        self._places = {key_of(run_id, place).to_bytes(): place for place in range(book.places)}

    def validate(self, entry: DHTRecord) -> bool:
        """Whether `entry` may be stored and returned; never raises."""
        place = self._places.get(entry.key)
        if place is None or len(entry.value) > SIGNED_BYTES_MAX + 8:
            return False
        try:
            signed = bounds.parse(wire.SignedRecord, MSGPackSerializer.loads(entry.value), "record")
            record = bounds.parse(wire.Record, signed.record, "record")
            subkey = MSGPackSerializer.loads(entry.subkey)
        except Exception:  # noqa: BLE001  msgpack and hivemind's extensions raise many kinds on a stranger's bytes
            return False
        return (
            subkey == record.peer_id
            and round(entry.expiration_time * 1000) == record.expires_unix_ms
            and self._book.take(place, signed, timed_storage.get_dht_time())
        )


class DhtCalls:
    """The interface that hivemind's DHT expects of a P2P object. It registers the DHT's handlers anew at each start of
    `p2pd`, and bounds the calls of strangers. So the DHT notices only a short silence."""

    def __init__(self, p2pd: P2pdProcess, traffic: Counter[tuple[str, str]]) -> None:
        """`traffic`: as Transport.bytes_by_method, of "dht"."""
        self._p2pd = p2pd
        self._traffic = traffic
        self._limit = DhtLimit()
        self._handlers: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}
        p2pd.on_start = self._register

    async def _register(self, p2p: Any) -> None:
        for name, (handler, args, kwargs) in self._handlers.items():
            await p2p.add_protobuf_handler(name, handler, *args, **kwargs)

    @property
    def peer_id(self) -> Any:
        return self._p2pd.peer_id

    async def add_protobuf_handler(self, name: str, handler: Any, *args: Any, **kwargs: Any) -> None:
        handler = self._counted(self._limit.limited(handler))
        self._handlers[name] = (handler, args, kwargs)
        await self._p2pd.p2p.add_protobuf_handler(name, handler, *args, **kwargs)

    async def remove_protobuf_handler(self, name: str, **kwargs: Any) -> None:
        self._handlers.pop(name, None)
        if self._p2pd.running.is_set():
            await self._p2pd.p2p.remove_protobuf_handler(name, **kwargs)

    async def call_protobuf_handler(self, peer: Any, name: str, request: Any, *args: Any) -> Any:
        await self._p2pd.until_running()
        self._traffic["dht", "sent"] += request.ByteSize()
        answer = await self._p2pd.p2p.call_protobuf_handler(peer, name, request, *args)
        self._traffic["dht", "received"] += answer.ByteSize()
        return answer

    def _counted(self, handler: RpcHandler) -> RpcHandler:
        async def serve(request: Any, context: Any) -> Any:
            self._traffic["dht", "received"] += request.ByteSize()
            answer = await handler(request, context)
            self._traffic["dht", "sent"] += answer.ByteSize()
            return answer

        return serve

    async def get_visible_maddrs(self, latest: bool = False) -> Any:
        return await self._p2pd.p2p.get_visible_maddrs(latest=latest)


class DhtDirectory(CallDirectory):
    """Implements ports.Directory. `create` joins the DHT, `close` leaves it. The transport stays open."""

    faults = (*CallDirectory.faults, P2PDaemonError)
    _transport: Libp2pTransport
    _node: Any
    _nearest: dict[int, tuple[float, list[DHTID], list[PeerId]]]  # place -> (until, neighbours, holders)

    async def _prepare(self) -> None:
        self._nearest = {}
        self._node = await DHTNode.create(
            p2p=DhtCalls(self._transport.daemon, self._transport.traffic),
            node_id=DHTID.generate(source=self._transport.peer_id),
            record_validator=RecordValidator(self._run_id, self._book),
            num_replicas=HOLDERS,
            wait_timeout=RPC_TIMEOUT_S,
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
            reuse_get_requests=False,
        )

    async def close(self) -> None:
        """Stop answering the DHT's requests."""
        await super().close()
        with contextlib.suppress(P2PDaemonError, OSError, TimeoutError):
            async with asyncio.timeout(RPC_TIMEOUT_S):
                await self._node.shutdown()

    async def _store_at(self, peer: PeerId, own: wire.Record, record: wire.SignedRecord) -> bool | None:
        """Whether `peer` stored our record; None if it did not answer."""
        key = key_of(self._run_id, own.stage)
        value = MSGPackSerializer.dumps(record.SerializeToString())
        expires_s = own.expires_unix_ms / 1000.0
        protocol = self._node.protocol
        if peer == self._transport.peer_id:
            return bool(protocol.storage.store(key, value, expires_s, subkey=own.peer_id))
        stored = await protocol.call_store(PeerID.from_base58(peer), [key], [value], expires_s, subkeys=[own.peer_id])
        return bool(stored[0]) if stored else None

    async def _holders(self, place: int) -> list[PeerId]:
        """The nodes nearest to the key of `place`, perhaps this one among them: searched anew every NEAR_S, and when
        our own neighbours change. No value is under the key beside it, which has the same nearest nodes."""
        key = DHTID(key_of(self._run_id, place) ^ 1)
        now_s = asyncio.get_running_loop().time()
        here = [uid for uid, _ in self._node.protocol.routing_table.get_nearest_neighbors(key, HOLDERS)]
        until_s, before, holders = self._nearest.get(place, (0.0, [], []))
        if now_s >= until_s or before != here:
            near = await self._node.find_nearest_nodes([key], k_nearest=HOLDERS)
            holders = [PeerId(peer.to_base58()) for peer in near[key].values()]
            self._nearest[place] = now_s + NEAR_S, here, holders
        return holders

    def _forget(self, place: int) -> None:
        self._nearest.pop(place, None)

    async def _search(self, place: int) -> None:
        await self._node.get_many_by_id([key_of(self._run_id, place)], math.inf)  # the validator takes what comes

    async def _clock_ahead(self, peer: PeerId) -> float | None:
        begun = self._unix_s()
        try:
            stub = self._node.protocol.get_stub(PeerID.from_base58(peer))
            dht_time = (await stub.rpc_ping(dht_pb2.PingRequest(), timeout=RPC_TIMEOUT_S)).dht_time
        except Exception:  # noqa: BLE001  hivemind's stubs raise many kinds, and a silent peer has no say
            return None
        ahead_s = surely_ahead_s(dht_time, begun, self._unix_s())
        return ahead_s if dht_time and math.isfinite(ahead_s) else None

    async def look_around(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SMALL_CALL_S):
                await self._node.find_nearest_nodes([self._node.node_id])

    def here(self) -> set[PeerId]:
        return {PeerId(peer.to_base58()) for peer in self._node.protocol.routing_table.peer_id_to_uid}

    async def greet(self, peer: PeerId) -> bool:
        try:
            met = await self._node.protocol.call_ping(PeerID.from_base58(peer), validate=True, strict=True)
        except ValidationError as error:
            if "local time" in str(error):
                raise LocalFault(
                    f"this machine's clock or {short(peer)}'s is off: {cause_of(error)}; set it by NTP"
                ) from None
            raise RemoteFault(cause_of(error)) from None
        return met is not None

    def forget_silence(self) -> None:
        self._node.blacklist.clear()  # hivemind's list of unresponsive peers: our own p2pd was the cause
        super().forget_silence()

"""The real Directory: signed records in hivemind's DHT, on the same p2pd as the calls.

The DHT only gives hints. Each stage has `shards` keys; each node owns one subkey, under the key that its peer id
selects, and stores nothing else. All keys are known in advance and all values are verified SignedRecords. Crashed nodes
delay nothing, frozen ones seconds. So every wait is bounded, and a timeout returns less than was asked for instead of
failing.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from statistics import median_low
from typing import Any

from google.protobuf.message import DecodeError
from hivemind.dht import DHTNode
from hivemind.dht.protocol import ValidationError
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer, timed_storage

from swarmnode.errors import LocalFault, RemoteFault, Unavailable, Unreachable
from swarmnode.ids import PeerId, RunId, digest64, seeded, short
from swarmnode.membership.admission import Admission
from swarmnode.membership.record import CLOCK_SKEW_MAX_S, SIGNED_BYTES_MAX, check_record, open_record, pass_of
from swarmnode.ports import Call, Telemetry
from swarmnode.transport.address import dialable_of, first_that_accepts
from swarmnode.transport.contact import Contacts, whom_to_try
from swarmnode.transport.libp2p import Libp2pTransport
from swarmnode.wire import call_pb2
from swarmnode.wire import record_pb2 as wire

SHARDS = 1  # keys per stage; more than about 500 subkeys a key slow stores down (measured)
TTL_MAX_S = 300.0  # DHT records cannot be deleted, so they must expire soon
LOOKUP_TIMEOUT_S = 5.0  # guess: a lookup takes 4-18 ms, and one frozen node costs RPC_TIMEOUT_S
ANNOUNCE_TIMEOUT_S = 5.0  # guess: 23 ms, and the same for a frozen node
RPC_TIMEOUT_S = 2.0  # guess: below the announce periods for which records live
JOIN_TIMEOUT_S = 30.0  # guess: covers a bootstrap started at the same time on a busy machine
JOIN_DELAY_S = 0.3
REJOIN_PERIOD_S = 3.0  # guess: between two looks for lost contacts
MEET_TIMEOUT_S = 5.0  # guess: dead contacts may not hold up a start
TOLD_EVERY = 20  # guess: failures with a bootstrap for one event
ASKED_MAX = 8  # guess: contacts asked how far the run is
TOTALS_MAX = 1024  # guess: replicas whose claims are compared
CLOCKS_MAX = 5  # guess: neighbours whose clocks are compared with ours at a time
VERIFIED_MAX = 4096  # records known to be valid; 4 MiB


def _key(run_id: RunId, stage: int, shard: int) -> str:
    return f"{run_id}/{stage}/{shard}"


def shard_of(peer: PeerId, shards: int) -> int:
    """The index of the stage key under which `peer` publishes."""
    return digest64("shard", peer) % shards


class RecordValidator(RecordValidatorBase):  # type: ignore[misc]
    """Decides what this node stores for others and accepts from them: records that pass `check_record`, under the right
    key, for a bounded time.

    Runs on every store and every entry read, so verified values are cached. Expired entries pass: hivemind drops them
    by its own clock.
    """

    def __init__(
        self,
        run_id: RunId,
        stages: int,
        shards: int,
        ttl_max_s: float,
        admission: Admission | None = None,
        stored: Callable[[wire.Record], None] = lambda record: None,
    ) -> None:
        """`stored` is told each new record."""
        self._stored = stored
        self._run_id = run_id
        self._admission = admission
        self._shards = shards
        self._ttl_max_s = ttl_max_s
        self._places = {
            DHTID.generate(source=_key(run_id, stage, shard)).to_bytes(): (stage, shard)
            for stage in range(stages)
            for shard in range(shards)
        }
        self._verified: OrderedDict[bytes, wire.Record] = OrderedDict()

    def validate(self, entry: DHTRecord) -> bool:
        """Whether `entry` may be stored and returned; never raises."""
        place = self._places.get(entry.key)
        if place is None or entry.expiration_time > timed_storage.get_dht_time() + self._ttl_max_s + CLOCK_SKEW_MAX_S:
            return False
        try:
            new = entry.value not in self._verified
            subkey, record = self._unpack(entry.subkey), self._open(entry.value)
        except (RemoteFault, ValueError, TypeError):
            return False
        right = (
            subkey == record.peer_id
            and (record.stage, shard_of(PeerId(record.peer_id), self._shards)) == place
            and round(entry.expiration_time * 1000) == record.expires_unix_ms
            and (self._admission is None or self._admission.judge(PeerId(record.peer_id), pass_of(record))[0])
        )
        if right and new:
            self._stored(record)
        return right

    def _open(self, value: bytes) -> wire.Record:
        known = self._verified.get(value)
        if known is not None:
            return known
        if len(value) > SIGNED_BYTES_MAX + 8:
            raise RemoteFault(f"value of {len(value)} bytes; at most {SIGNED_BYTES_MAX}")
        signed = wire.SignedRecord()
        try:
            signed.ParseFromString(self._unpack(value))
        except DecodeError:
            raise RemoteFault("value that is not a SignedRecord") from None
        record = check_record(signed, run_id=self._run_id)
        self._verified[value] = record
        if len(self._verified) > VERIFIED_MAX:
            self._verified.popitem(last=False)
        return record

    @staticmethod
    def _unpack(raw: bytes) -> Any:
        try:
            return MSGPackSerializer.loads(raw)
        except Exception:  # noqa: BLE001  msgpack and hivemind's extensions raise many kinds on a stranger's bytes
            raise RemoteFault("value that does not unpack") from None


class DhtDirectory:
    """Implements ports.Directory. `create` joins the DHT, `close` leaves it. The transport stays open."""

    def __init__(
        self,
        transport: Libp2pTransport,
        node: Any,
        bootstrap: Sequence[tuple[PeerId, Sequence[str]]],
        run_id: RunId,
        shards: int,
        ttl_max_s: float,
        telemetry: Telemetry | None,
        contacts: Contacts,
    ) -> None:
        self._transport = transport
        self._node = node
        self._bootstrap = [(peer, addresses) for peer, addresses in bootstrap if peer != transport.peer_id]
        self.contacts = contacts
        for peer, addresses in self._bootstrap:
            contacts.tell(peer, addresses)
        self._run_id = run_id
        self._shards = shards
        self._ttl_max_s = ttl_max_s
        self._telemetry = telemetry
        self._keeping: asyncio.Task[None] | None = None
        self._chance = seeded(run_id, "clocks", transport.peer_id)

    @classmethod
    async def create(
        cls,
        transport: Libp2pTransport,
        bootstrap: Sequence[tuple[PeerId, Sequence[str]]],
        run_id: RunId,
        stages: int,
        *,
        shards: int = SHARDS,
        ttl_max_s: float = TTL_MAX_S,
        join_timeout_s: float = JOIN_TIMEOUT_S,
        admission: Admission | None = None,
        telemetry: Telemetry | None = None,
        contacts: Contacts | None = None,
    ) -> DhtDirectory:
        """A directory that joined through one of `bootstrap`, or starts a new DHT if that is empty.

        `contacts` are peers from earlier runs. They are asked beside the bootstraps, and again whenever they are lost.

        Starts the transport: from now on others may learn this node's address. Raises Unreachable if no bootstrap
        answers within `join_timeout_s`, LocalFault if this machine's clock is wrong.
        """
        contacts = Contacts() if contacts is None else contacts
        totals = OrderedDict[PeerId, int]()

        def stored(record: wire.Record) -> None:
            peer = PeerId(record.peer_id)
            if peer == transport.peer_id or record.expires_unix_ms <= 1000 * timed_storage.get_dht_time():
                return
            contacts.hear(peer, dialable_of(record.addresses), timed_storage.get_dht_time())
            if record.state == wire.NODE_STATE_TRAINING:
                totals[peer] = record.progress.total
                totals.move_to_end(peer)
                if len(totals) > TOTALS_MAX:
                    totals.popitem(last=False)
                contacts.trained(run_id, median_low(totals.values()))

        node = await DHTNode.create(
            p2p=transport.daemon,
            node_id=DHTID.generate(source=transport.peer_id),
            record_validator=RecordValidator(run_id, stages, shards, ttl_max_s, admission, stored),
            wait_timeout=RPC_TIMEOUT_S,
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
            reuse_get_requests=False,
        )
        transport.start()
        directory = cls(transport, node, bootstrap, run_id, shards, ttl_max_s, telemetry, contacts)
        try:
            await directory._join(join_timeout_s)
        except BaseException:
            await directory.close()
            raise
        directory._keeping = transport.spawn(directory._keep_joined())
        transport.after_restart.append(directory._rejoin)
        return directory

    async def close(self) -> None:
        """Stop answering the DHT's requests."""
        if self._keeping is not None:
            self._keeping.cancel()
            self._transport.after_restart.remove(self._rejoin)
            self._keeping = None
        with contextlib.suppress(P2PDaemonError, OSError, TimeoutError):
            async with asyncio.timeout(RPC_TIMEOUT_S):
                await self._node.shutdown()

    # The port.

    async def announce(self, record: wire.SignedRecord) -> bool:
        """Publish our record until its expiry, which must be later than the previous one's. False if no peer stored it
        within ANNOUNCE_TIMEOUT_S."""
        own = check_record(record, run_id=self._run_id)
        peer = PeerId(own.peer_id)
        try:
            async with asyncio.timeout(ANNOUNCE_TIMEOUT_S):
                stored = await self._node.store(
                    _key(self._run_id, own.stage, shard_of(peer, self._shards)),
                    record.SerializeToString(),
                    own.expires_unix_ms / 1000.0,
                    subkey=own.peer_id,
                )
        except (TimeoutError, P2PDaemonError, OSError):
            stored = False
        if not stored:
            self._event("directory.failed", "warning", what="announce", stage=own.stage)
        return bool(stored)

    async def lookup(self, stage: int) -> list[wire.SignedRecord]:
        """Verified, unexpired records of `stage`, sorted by peer: those found within LOOKUP_TIMEOUT_S, perhaps none."""
        found = await asyncio.gather(
            *(self._entries(_key(self._run_id, stage, shard)) for shard in range(self._shards))
        )
        now, newest = timed_storage.get_dht_time(), {}
        for entry in (entry for entries in found for entry in entries):
            signed = wire.SignedRecord()
            try:
                signed.ParseFromString(entry)
                record = open_record(signed, run_id=self._run_id, now_unix_s=now, ttl_max_s=self._ttl_max_s)
            except (DecodeError, RemoteFault, TypeError):
                continue  # the validator accepted it, so it has expired since
            if record.stage == stage:
                newest[record.peer_id] = signed
                self._hear(PeerId(record.peer_id), record.addresses)
        return [newest[peer] for peer in sorted(newest)]

    async def lookups(self, stages: Sequence[int]) -> list[list[wire.SignedRecord]]:
        return await asyncio.gather(*map(self.lookup, stages))

    async def claimed(self) -> int:
        peers = dict.fromkeys(
            [*(peer for peer, _ in self._bootstrap), *(p for p, _ in self.contacts.latest(ASKED_MAX))]
        )
        told = await asyncio.gather(*map(self._claimed_by, peers))
        return max(self.contacts.samples.get(self._run_id, 0), *told, 0)

    async def _claimed_by(self, peer: PeerId) -> int:
        asked = Call(call_pb2.Request(run_id=self._run_id, ping=call_pb2.Ping()))
        try:
            answer = await self._transport.call(peer, asked, timeout_s=RPC_TIMEOUT_S, reply_bytes_max=0)
        except (RemoteFault, Unavailable):
            return 0
        return answer.header.pong.samples

    async def _entries(self, key: str) -> list[bytes]:
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                found = await self._node.get(key, latest=True)
        except (TimeoutError, P2PDaemonError, OSError):
            self._event("directory.failed", "warning", what="lookup", key=key)
            found = self._node.protocol.storage.get(DHTID.generate(source=key))  # values that others stored with us
            if found is None or not hasattr(found.value, "items"):
                return []
            return [MSGPackSerializer.loads(value) for _, (value, _) in found.value.items()]
        if found is None or not isinstance(found.value, dict):
            return []
        return [entry.value for entry in found.value.values() if isinstance(entry.value, bytes)]

    async def clocks_ahead(self) -> list[float]:
        """Seconds that some neighbours' clocks are ahead of ours, of those that answer."""
        near = sorted(self._here())
        asked = self._chance.sample(near, min(CLOCKS_MAX, len(near)))
        answers = await asyncio.gather(*map(self._clock_ahead, asked))
        return [ahead_s for ahead_s in answers if ahead_s is not None]

    async def _clock_ahead(self, peer: PeerId) -> float | None:
        begun = timed_storage.get_dht_time()
        try:
            stub = self._node.protocol.get_stub(PeerID.from_base58(peer))
            told = (await stub.rpc_ping(dht_pb2.PingRequest(), timeout=RPC_TIMEOUT_S)).dht_time
        except Exception:  # noqa: BLE001  hivemind's stubs raise many kinds, and a silent peer has no say
            return None
        ahead_s = told - (begun + timed_storage.get_dht_time()) / 2.0
        return ahead_s if told and math.isfinite(ahead_s) else None

    # Membership.

    async def _join(self, timeout_s: float) -> None:
        if not self._bootstrap:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOKUP_TIMEOUT_S):  # then `_keep_joined` goes on
                    await self._ask_bootstraps({})
            return
        reasons: dict[PeerId, str] = {}
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    if await self._ask_bootstraps(reasons):
                        return
                    await asyncio.sleep(JOIN_DELAY_S)
        except TimeoutError:
            tried = "; ".join(f"{peer} at {', '.join(addresses)}" for peer, addresses in self._bootstrap)
            why = next(iter(reasons.values()), "no answer")
            raise Unreachable(
                f"no bootstrap answers within {timeout_s:.0f} s (tried {tried}; last: {why}): "
                "is one running there, and does its firewall let the port in?"
            ) from None

    async def _ask_bootstraps(self, reasons: dict[PeerId, str]) -> bool:
        """Contact bootstraps and former peers at once, and our neighbours through those that answer."""
        for peer, _ in self._bootstrap:  # they are due whatever was tried before
            self.contacts.known[peer].retry()
        met = await self._try_lost(reasons)
        if met:
            await self._look_around()
        return met

    async def _look_around(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                await self._node.find_nearest_nodes([self._node.node_id])

    async def _try_lost(self, reasons: dict[PeerId, str] | None = None) -> bool:
        """Dial contacts that are missing; return whether one answered."""
        now, here, reasons = timed_storage.get_dht_time(), self._here(), {} if reasons is None else reasons
        lost = whom_to_try(self.contacts.known, here, now)
        met = await asyncio.gather(*(self._meet(peer, self.contacts.known[peer].addresses, reasons) for peer in lost))
        for peer, answered in zip(lost, met, strict=True):
            self.contacts.tried(peer, answered, now)
            if answered and here:
                self._event("directory.merged", "info", peer=short(peer), here=len(here))
        return any(met)

    def _here(self) -> set[PeerId]:
        return {PeerId(peer.to_base58()) for peer in self._node.protocol.routing_table.peer_id_to_uid}

    def _hear(self, peer: PeerId, addresses: Sequence[str]) -> None:
        if peer != self._transport.peer_id:
            self._transport.remember(peer, addresses)
            self.contacts.hear(peer, dialable_of(addresses), timed_storage.get_dht_time())

    async def _meet(self, peer: PeerId, addresses: Sequence[str], reasons: dict[PeerId, str]) -> bool:
        tries = self.contacts.known[peer].failures
        try:
            async with asyncio.timeout(None if self.contacts.known[peer].fixed else MEET_TIMEOUT_S):
                if await first_that_accepts(addresses) is None:
                    raise Unavailable(f"no process listens at {', '.join(addresses)}")
                await self._transport.connect(peer, addresses)
                met = await self._node.protocol.call_ping(PeerID.from_base58(peer), validate=True, strict=True)
        except TimeoutError:
            met, reasons[peer] = None, f"no answer within {MEET_TIMEOUT_S:.0f} s"
        except (Unavailable, RemoteFault, P2PDaemonError) as error:
            met, reasons[peer] = None, str(error)
        except ValidationError as error:
            if "local time" in str(error):
                raise LocalFault(f"this machine's clock or {short(peer)}'s is off: {error}; set it by NTP") from None
            met, reasons[peer] = None, str(error)
        if all(peer != told for told, _ in self._bootstrap) or (met is None and tries % TOLD_EVERY):
            return met is not None
        self._event(
            "bootstrap.unreachable" if met is None else "bootstrap.connected",
            "warning" if met is None else "info",
            peer=short(peer),
            **({"why": reasons.get(peer, "no answer")} if met is None else {}),
        )
        return met is not None

    async def _keep_joined(self) -> None:
        """Look for lost contacts: a partition may have healed, p2pd or all nodes restarted, or a swarm split in two."""
        while True:
            if not self._here():
                await self._rejoin()
            elif await self._try_lost():
                await self._look_around()
            await asyncio.sleep(REJOIN_PERIOD_S)

    async def _rejoin(self) -> None:
        """Clear hivemind's list of unresponsive peers (our own p2pd was the cause), and ask the bootstraps."""
        self._node.blacklist.clear()
        with contextlib.suppress(LocalFault):  # a wrong clock: the node reports it at its next start
            await self._ask_bootstraps({})

    def _event(self, event: str, level: str, **fields: object) -> None:
        if self._telemetry is not None:
            self._telemetry.event(event, level=level, **fields)

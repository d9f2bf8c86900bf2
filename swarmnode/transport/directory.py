"""The real Directory: signed records in hivemind's DHT, on the same p2pd as the calls.

The DHT only gives hints. Each place (a stage, or nodes that only feed) has a key; each node owns one subkey of it, its
peer id, and only it may store that. All keys are known in advance and all values are verified SignedRecords. Crashed
nodes delay nothing, frozen ones seconds. So every wait is bounded, and a timeout returns less than was asked for
instead of failing.

A find of the DHT moves all records under a key from each of its HOLDERS, and so does a store. So both are only used to
learn which nodes those are. A look asks two holders and a member for the records that are new here (RecordsRequest); a
refresh asks one member, now and then a holder instead: news spread among members as rumours do (Demers et al. 1987,
"Epidemic algorithms"), and no node sends more than another. Nodes that do not speak this are asked as the DHT does.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Coroutine, Sequence
from statistics import median_low
from typing import Any

from hivemind.dht import DHTNode
from hivemind.dht.protocol import ValidationError
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer, timed_storage

from swarmnode.errors import LocalFault, RemoteFault, Unavailable, Unreachable
from swarmnode.ids import PeerId, RunId, seeded, short
from swarmnode.membership.admission import Admission
from swarmnode.membership.liveness import SMALL_CALL_S
from swarmnode.membership.record import SIGNED_BYTES_MAX, check_record
from swarmnode.ports import Answer, Call, Telemetry
from swarmnode.remembered import Remembered
from swarmnode.transport.address import dialable_of, first_that_accepts
from swarmnode.transport.contact import RETRY_MIN_S, Contacts, whom_to_try
from swarmnode.transport.libp2p import Libp2pTransport
from swarmnode.transport.record_book import (
    HOLDERS,
    HOLDERS_ASKED,
    NEAR_S,
    NEWS_MAX,
    PLACE_MAX,
    RPC_TIMEOUT_S,
    RecordBook,
)
from swarmnode.wire import call_pb2
from swarmnode.wire import record_pb2 as wire

TTL_MAX_S = 300.0  # DHT records cannot be deleted, so they must expire soon
MUTE_S = 30.0  # guess: who did not answer, or speaks an older version, is asked again
JOIN_TIMEOUT_S = 30.0  # guess: covers a bootstrap started at the same time on a busy machine
JOIN_DELAY_S = 0.3
TOLD_EVERY = 20  # guess: failures with a bootstrap for one event
ASKED_MAX = 8  # guess: contacts asked how far the run is
TELLING = (wire.NODE_STATE_TRAINING, wire.NODE_STATE_DRAINING, wire.NODE_STATE_LEFT)
CLOCKS_MAX = 5  # guess: neighbours whose clocks are compared with ours at a time


def key_of(run_id: RunId, place: int) -> DHTID:
    """The DHT's key of the records of `place`."""
    return DHTID.generate(source=f"{run_id}/{place}/0")


async def claimed_by(transport: Libp2pTransport, peer: PeerId) -> int | None:
    """Samples that the run has trained as `peer` knows; None if it does not answer."""
    try:
        ping = Call(call_pb2.Request(ping=call_pb2.Ping()))
        answer = await transport.call(peer, ping, timeout_s=RPC_TIMEOUT_S, reply_bytes_max=0)
    except (RemoteFault, Unavailable):
        return None
    return answer.header.pong.samples


class RecordValidator(RecordValidatorBase):  # type: ignore[misc]
    """Decides what this node stores for others and takes from their dictionaries: records that `book` takes, under the
    right key and subkey. Runs on every store and every entry read."""

    def __init__(self, run_id: RunId, places: int, book: RecordBook) -> None:
        self._book = book
        self._places = {key_of(run_id, place).to_bytes(): place for place in range(places)}

    def validate(self, entry: DHTRecord) -> bool:
        """Whether `entry` may be stored and returned; never raises."""
        place, signed = self._places.get(entry.key), wire.SignedRecord()
        if place is None or len(entry.value) > SIGNED_BYTES_MAX + 8:
            return False
        try:
            signed.ParseFromString(MSGPackSerializer.loads(entry.value))
            record = wire.Record.FromString(signed.record)
            subkey = MSGPackSerializer.loads(entry.subkey)
        except Exception:  # noqa: BLE001  msgpack and hivemind's extensions raise many kinds on a stranger's bytes
            return False
        return (
            subkey == record.peer_id
            and round(entry.expiration_time * 1000) == record.expires_unix_ms
            and self._book.take(place, signed, timed_storage.get_dht_time())
        )


class DhtDirectory:
    """Implements ports.Directory. `create` joins the DHT, `close` leaves it. The transport stays open."""

    def __init__(
        self,
        transport: Libp2pTransport,
        node: Any,
        bootstrap: Sequence[tuple[PeerId, Sequence[str]]],
        run_id: RunId,
        book: RecordBook,
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
        self._book = book
        self.prefer(lambda peer: False, lambda: False)
        self._own: wire.SignedRecord | None = None  # our last record
        self._nearest: dict[int, tuple[float, list[DHTID], list[PeerId]]] = {}  # place -> (until, neighbours, holders)
        self._mute = Remembered[PeerId, float]()  # peers that do not answer RecordsRequest, until when
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
        totals = Remembered[PeerId, int]()

        def taken(record: wire.Record) -> None:
            peer = PeerId(record.peer_id)
            if peer == transport.peer_id:
                return
            usable = dialable_of(record.addresses)
            transport.remember(peer, usable)
            contacts.hear(peer, usable, timed_storage.get_dht_time())
            if record.state in TELLING:
                totals[peer] = record.progress.total
                contacts.trained(run_id, median_low(totals.values()))

        book = RecordBook(run_id, stages, ttl_max_s, admission, taken)
        node = await DHTNode.create(
            p2p=transport.daemon,
            node_id=DHTID.generate(source=transport.peer_id),
            record_validator=RecordValidator(run_id, stages, book),
            num_replicas=HOLDERS,
            wait_timeout=RPC_TIMEOUT_S,
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
            reuse_get_requests=False,
        )
        transport.start()
        directory = cls(transport, node, bootstrap, run_id, book, telemetry, contacts)
        try:
            await directory._join(join_timeout_s)
        except BaseException:
            await directory.close()
            raise
        transport.serve("records", directory._answer, tensor_bytes_max=0)
        directory._keeping = transport.spawn(directory._keep_joined())
        transport.after_restart.append(directory._rejoin)
        return directory

    def prefer(self, works: Callable[[PeerId], bool], doubtful: Callable[[], bool]) -> None:
        """Know records of peers for which `works` is true beside a flood of others; show few of these while strangers
        are `doubtful`."""
        me = self._transport.peer_id
        self._book.prefer(lambda peer: peer == me or works(peer), doubtful)

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
        within SMALL_CALL_S."""
        own = check_record(record, run_id=self._run_id)
        self._own, stored = record, list[bool | None]()
        if not self._book.take(own.stage, record, timed_storage.get_dht_time()):
            return False
        try:
            async with asyncio.timeout(SMALL_CALL_S):
                holders = await self._holders(own.stage)
                stored = await asyncio.gather(*(self._store_at(peer, own, record) for peer in holders))
        except (TimeoutError, P2PDaemonError, OSError):
            pass
        if None in stored or not stored:
            self._nearest.pop(own.stage, None)
        if not any(stored):
            self._event("directory.failed", "warning", reason="nobody stored our record", stage=own.stage)
        return any(stored)

    async def _store_at(self, peer: PeerId, own: wire.Record, record: wire.SignedRecord) -> bool | None:
        """Whether `peer` stored our record; None if it did not answer."""
        key, value = key_of(self._run_id, own.stage), MSGPackSerializer.dumps(record.SerializeToString())
        expires_s, protocol = own.expires_unix_ms / 1000.0, self._node.protocol
        if peer == self._transport.peer_id:
            return bool(protocol.storage.store(key, value, expires_s, subkey=own.peer_id))
        stored = await protocol.call_store(PeerID.from_base58(peer), [key], [value], expires_s, subkeys=[own.peer_id])
        return bool(stored[0]) if stored else None

    async def lookup(self, stage: int) -> list[wire.SignedRecord]:
        """Verified, unexpired records of `stage`, sorted by peer: those found within SMALL_CALL_S, perhaps none."""
        return await self._read(stage, self._look)

    async def lookups(self, stages: Sequence[int]) -> list[list[wire.SignedRecord]]:
        return await asyncio.gather(*map(self.lookup, stages))

    async def refresh(self, stages: Sequence[int]) -> list[list[wire.SignedRecord]]:
        return await asyncio.gather(*(self._read(stage, self._ask_one) for stage in stages))

    async def _read(self, place: int, ask: Callable[[int], Coroutine[Any, Any, None]]) -> list[wire.SignedRecord]:
        try:
            async with asyncio.timeout(SMALL_CALL_S):
                await ask(place)
        except (TimeoutError, P2PDaemonError, OSError):
            self._event("directory.failed", "warning", reason="nobody answers a look-up", stage=place)
        known = self._book.known(place, timed_storage.get_dht_time())
        return [known[peer].signed for peer in sorted(known)]

    async def _look(self, place: int) -> None:
        """Learn what HOLDERS_ASKED holders and a member know."""
        holders = self._speaking(await self._holders(place))
        chosen = self._chance.sample(holders, min(HOLDERS_ASKED, len(holders)))
        members = [peer for peer in self._members(place) if peer not in chosen]
        chosen += self._chance.sample(members, min(1, len(members)))
        if not any(await asyncio.gather(*(self._learn(peer, place) for peer in chosen))):
            self._nearest.pop(place, None)
            await self._node.get_many_by_id([key_of(self._run_id, place)], math.inf)  # the validator takes what comes

    async def _ask_one(self, place: int) -> None:
        """Learn what one member knows, or with the chance of one of HOLDERS among the members a holder."""
        members = self._members(place)
        if self._chance.random() * len(members) < HOLDERS:
            members = self._speaking(await self._holders(place))
        if not members or not await self._learn(self._chance.choice(members), place):
            await self._look(place)

    def _members(self, place: int) -> list[PeerId]:
        return self._speaking(sorted(self._book.known(place, timed_storage.get_dht_time())))

    def _speaking(self, peers: Sequence[PeerId]) -> list[PeerId]:
        """The ones of `peers` that may answer a RecordsRequest, without this node."""
        now_s, mute = asyncio.get_running_loop().time(), self._mute
        return [peer for peer in peers if peer != self._transport.peer_id and mute.get(peer, 0.0) <= now_s]

    async def _learn(self, peer: PeerId, place: int) -> bool:
        """Take the records of `place` that `peer` has and this node lacks; whether it answered."""
        for _ in range(PLACE_MAX // NEWS_MAX):
            known = self._book.known(place, timed_storage.get_dht_time()).values()
            request = call_pb2.RecordsRequest(
                place=place,
                peers=[one.mark for one in known],
                expires_unix_ms=[one.expires_unix_ms for one in known],
            )
            call = Call(call_pb2.Request(run_id=self._run_id, record=self._own, records=request))
            try:
                answer = await self._transport.call(peer, call, timeout_s=RPC_TIMEOUT_S, reply_bytes_max=0)
            except (RemoteFault, Unavailable):
                self._mute[peer] = asyncio.get_running_loop().time() + MUTE_S
                return False
            news = answer.header.records.records
            taken = self._book.take_all(place, news, timed_storage.get_dht_time())
            if len(news) < NEWS_MAX or not taken:
                break
        return True

    async def _answer(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "records"."""
        request, now_s, record = call.header.records, timed_storage.get_dht_time(), call.header.record
        if request.place >= self._book.places or len(request.peers) != len(request.expires_unix_ms):
            raise RemoteFault(f"records of place {request.place}, of {len(request.peers)} peers")
        self._book.take(None, record, now_s, of=peer)
        had = dict(zip(request.peers, request.expires_unix_ms, strict=True))
        return Answer(call_pb2.Reply(records=call_pb2.Records(records=self._book.news(request.place, had, now_s))))

    async def _holders(self, place: int) -> list[PeerId]:
        """The nodes nearest to the key of `place`, perhaps this one among them: searched anew every NEAR_S, and when
        our own neighbours change. No value is under the key beside it, which has the same nearest nodes."""
        key, now_s = DHTID(key_of(self._run_id, place) ^ 1), asyncio.get_running_loop().time()
        here = [uid for uid, _ in self._node.protocol.routing_table.get_nearest_neighbors(key, HOLDERS)]
        until_s, before, holders = self._nearest.get(place, (0.0, [], []))
        if now_s >= until_s or before != here:
            near = await self._node.find_nearest_nodes([key], k_nearest=HOLDERS)
            holders = [PeerId(peer.to_base58()) for peer in near[key].values()]
            self._nearest[place] = now_s + NEAR_S, here, holders
        return holders

    async def claimed(self) -> int:
        peers = dict.fromkeys(
            [*(peer for peer, _ in self._bootstrap), *(p for p, _ in self.contacts.latest(ASKED_MAX))]
        )
        totals = await asyncio.gather(*(claimed_by(self._transport, peer) for peer in peers))
        answers, own = [total for total in totals if total is not None], self.contacts.samples.get(self._run_id, 0)
        if peers and not answers and not own:
            raise Unavailable(f"none of the {len(peers)} machines known to this one answers")
        return max(own, *answers, 0)

    async def clocks_ahead(self) -> list[float]:
        """Seconds that some neighbours' clocks are ahead of ours, of those that answer."""
        near = sorted(self._here())
        chosen = self._chance.sample(near, min(CLOCKS_MAX, len(near)))
        answers = await asyncio.gather(*map(self._clock_ahead, chosen))
        return [ahead_s for ahead_s in answers if ahead_s is not None]

    async def _clock_ahead(self, peer: PeerId) -> float | None:
        begun = timed_storage.get_dht_time()
        try:
            stub = self._node.protocol.get_stub(PeerID.from_base58(peer))
            dht_time = (await stub.rpc_ping(dht_pb2.PingRequest(), timeout=RPC_TIMEOUT_S)).dht_time
        except Exception:  # noqa: BLE001  hivemind's stubs raise many kinds, and a silent peer has no say
            return None
        ahead_s = dht_time - (begun + timed_storage.get_dht_time()) / 2.0
        return ahead_s if dht_time and math.isfinite(ahead_s) else None

    # Membership.

    async def _join(self, timeout_s: float) -> None:
        if not self._bootstrap:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SMALL_CALL_S):  # then `_keep_joined` goes on
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
            async with asyncio.timeout(SMALL_CALL_S):
                await self._node.find_nearest_nodes([self._node.node_id])

    async def _try_lost(self, reasons: dict[PeerId, str] | None = None) -> bool:
        """Dial contacts that are missing; return whether one answered."""
        now, here, reasons = timed_storage.get_dht_time(), self._here(), {} if reasons is None else reasons
        lost = whom_to_try(self.contacts.known, here, now)
        met = await asyncio.gather(*(self._meet(peer, self.contacts.known[peer].addresses, reasons) for peer in lost))
        for peer, answered in zip(lost, met, strict=True):
            self.contacts.record_try(peer, answered, now)
            if answered and here:
                self._event("directory.merged", "info", peer=short(peer), here=len(here))
        return any(met)

    def _here(self) -> set[PeerId]:
        return {PeerId(peer.to_base58()) for peer in self._node.protocol.routing_table.peer_id_to_uid}

    async def _meet(self, peer: PeerId, addresses: Sequence[str], reasons: dict[PeerId, str]) -> bool:
        tries, fixed = self.contacts.known[peer].failures, self.contacts.known[peer].fixed
        try:
            async with asyncio.timeout(None if fixed else SMALL_CALL_S):
                if fixed and await first_that_accepts(addresses) is None:
                    raise Unavailable(f"no process listens at {', '.join(addresses)}")
                await self._transport.connect(peer, addresses)
                met = await self._node.protocol.call_ping(PeerID.from_base58(peer), validate=True, strict=True)
        except TimeoutError:
            met, reasons[peer] = None, f"no answer within {SMALL_CALL_S:.0f} s"
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
            await asyncio.sleep(RETRY_MIN_S)

    async def _rejoin(self) -> None:
        """Clear hivemind's list of unresponsive peers (our own p2pd was the cause), and ask the bootstraps."""
        self._node.blacklist.clear()
        with contextlib.suppress(LocalFault):  # a wrong clock: the node reports it at its next start
            await self._ask_bootstraps({})

    def _event(self, event: str, level: str, **fields: object) -> None:
        if self._telemetry is not None:
            self._telemetry.event(event, level=level, **fields)

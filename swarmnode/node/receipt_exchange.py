"""Receipts for microbatches: clients sign them on request, and the node that did the work keeps them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from swarmnode.errors import RemoteFault, Unavailable
from swarmnode.identity import Identity
from swarmnode.ids import PeerId, RunId
from swarmnode.membership.receipt import Work, check_receipt, sign_receipt
from swarmnode.ports import Answer, Call, Clock, Telemetry, Transport
from swarmnode.wire import call_pb2 as wire

FIRST_S = 4.0  # guess: a volunteer who looks just after joining sees receipts
PERIOD_S = 30.0  # guess: between two rounds of asking; a kill loses the receipts of so long
TIMEOUT_S = 5.0
CLIENTS_MAX = 32  # asked in one round; guess: the feeders and hops before us


class ReceiptExchange:
    """Handler of "receipt", and the asking. `keep` is given every receipt that verifies, the newest of its client."""

    def __init__(
        self,
        run_id: RunId,
        identity: Identity,
        work: Work,
        clock: Clock,
        telemetry: Telemetry,
        keep: Callable[[wire.Receipt], Awaitable[None]],
    ) -> None:
        self._run_id = run_id
        self._identity = identity
        self._work = work
        self._clock = clock
        self._telemetry = telemetry
        self._keep = keep
        self._began_unix_s = int(clock.unix_s())

    def serve(self, transport: Transport) -> None:
        """Register."""
        transport.serve("receipt", self.sign, tensor_bytes_max=0)

    async def sign(self, peer: PeerId, call: Call) -> Answer:
        """A receipt for the work of `peer` for this process so far. Raises Unavailable when there is none."""
        if (done := self._work.done.get(peer)) is None:
            raise Unavailable("nothing was worked off for this node")
        until = max(self._began_unix_s, int(self._clock.unix_s()))
        return Answer(
            wire.Reply(receipt=sign_receipt(self._identity, self._run_id, peer, done, self._began_unix_s, until))
        )

    async def collect(self, transport: Transport) -> None:
        """Ask clients for receipts until cancelled: soon at first, then every PERIOD_S."""
        period_s = FIRST_S
        while True:
            await asyncio.sleep(period_s)
            await self.once(transport)
            period_s = min(PERIOD_S, 2.0 * period_s)

    async def once(self, transport: Transport) -> None:
        """Ask each of the last CLIENTS_MAX clients once."""
        for client in list(self._work.clients)[-CLIENTS_MAX:]:
            request = Call(wire.Request(receipt=wire.ReceiptRequest()))
            try:
                answer = await transport.call(client, request, timeout_s=TIMEOUT_S, reply_bytes_max=0)
                receipt = answer.header.receipt
                check_receipt(receipt, self._run_id, transport.peer_id)
                if receipt.client != client:
                    raise RemoteFault("a receipt of somebody else")
            except (RemoteFault, Unavailable) as error:
                self._telemetry.event("receipt.failed", level="debug", peer=client, reason=str(error))
                continue
            if receipt.microbatches:
                await self._keep(receipt)

"""Service for auditors: recompute a hop, and show the evidence of one's own answers.

Both are bounded: a recomputed hop costs arithmetic, a kept answer costs memory.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from swarmnode.base.errors import Busy, RemoteFault, Unavailable
from swarmnode.base.ids import MICROBATCH_ID_BYTES, PeerId, stage_name
from swarmnode.base.metrics import name
from swarmnode.base.ports import Answer, Call, Compute, Priority, Replica, Telemetry, WireTensor
from swarmnode.base.token_bucket import PeerBudget
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.data.microbatch_shape import check_activations, check_inputs, check_samples, check_tokens
from swarmnode.run.manifest import Manifest
from swarmnode.run.manifest.check import COUNT_MAX
from swarmnode.trust.statement import Fingerprint, HopEvidence

T = TypeVar("T")
Sign = Callable[[wire.Statement], None]
Text = Callable[[Sequence[int]], Awaitable[WireTensor | None]]

AT_ONCE_MAX = 2  # guess: hops recomputed at once for all callers; one per caller
PER_MINUTE_MAX = 60  # guess: per caller, which audits a few per cent of what it sends
KEPT_TIMES = 4  # guess: times limits.in_flight_max; answers kept to be shown until they have crossed the caller's line
KEPT_SHARE = 0.25  # guess: share of the tape memory for kept answers; KEPT_LEAST are kept however large
KEPT_LEAST = 4


def recomputed_statement(
    asked: wire.Recompute,
    client: PeerId,
    given: tuple[WireTensor, WireTensor, WireTensor | None],
    made: Sequence[WireTensor],
    report: wire.Recomputed,
    print_of: Fingerprint,
) -> wire.Statement:
    """The statement on a hop that was recomputed for `client`, of the x, tokens and gradient `given` the tensors
    `made`, without run, server and signature."""
    x, tokens, gradient = given
    return wire.Statement(
        microbatch_id=asked.microbatch_id,
        stage=asked.stage,
        position=asked.position,
        client=client,
        x=print_of(x),
        tokens=print_of(tokens),
        gradient=print_of(made[-1]),
        loss_sum=report.loss_sum if gradient is None else 0.0,
        sent=b"" if gradient is None else print_of(made[0]),
        got=b"" if gradient is None else print_of(gradient),
        inner_steps=report.inner_steps,
        mark=report.mark,
    )


@dataclass(eq=False)
class RecomputeService:
    """A replica's service to auditors. `text` returns tokens [B, T+1] of training samples, None if they are not at
    hand; no `text`: this node feeds nothing. `sign` completes and signs a statement as this node; None: recomputed
    hops are not signed."""

    manifest: Manifest
    stage: int
    replica: Replica
    compute: Compute
    boundary_digest: bytes
    telemetry: Telemetry
    text: Text | None = None
    sign: Sign | None = None

    def __post_init__(self) -> None:
        self._shown: OrderedDict[tuple[bytes, int], HopEvidence] = OrderedDict()
        self._nbytes = 0
        self._under_way = set[PeerId]()
        self._rate = PeerBudget(PER_MINUTE_MAX / 60.0, PER_MINUTE_MAX)

    def keep(self, microbatch: bytes, position: int, shown: HopEvidence) -> None:
        """Keep the evidence of the answer for `microbatch` for a while."""
        self._shown[(microbatch, position)] = shown
        self._nbytes += shown.nbytes
        limits = self.manifest.limits
        most = KEPT_TIMES * limits.in_flight_max
        nbytes_max = KEPT_SHARE * limits.tape_bytes_max
        while len(self._shown) > most or (len(self._shown) > KEPT_LEAST and self._nbytes > nbytes_max):
            _, dropped = self._shown.popitem(last=False)
            self._nbytes -= dropped.nbytes

    async def serve_opening(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "opening". Raises Unavailable if the answer is not kept, RemoteFault for a malformed id."""
        request = call.header.opening
        if len(request.microbatch_id) != MICROBATCH_ID_BYTES:
            raise RemoteFault(f"microbatch id of {len(request.microbatch_id)} bytes; expected {MICROBATCH_ID_BYTES}")
        shown = self._shown.get((bytes(request.microbatch_id), request.position))
        if shown is None:
            raise Unavailable("this answer is no longer kept here")
        return Answer(wire.Reply(opening=wire.Opened(next=shown.next)), (shown.sent, shown.got))

    async def serve_recompute(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "recompute". Raises RemoteFault for a malformed request, Busy for one too many."""
        request = call.header.recompute
        if request.stage != self.stage:
            raise RemoteFault(f"hop of {stage_name(request.stage)} sent to a replica of {stage_name(self.stage)}")
        check_samples(self.manifest, request.samples, request.boundary_digest, self.boundary_digest)
        if self.stage == 0:
            return await self._fed(peer, request, call)
        last = self.stage == self.manifest.pipeline.stages - 1
        x, tokens = check_inputs(self.manifest, request.samples, call.tensors[:2])
        if len(call.tensors) != (2 if last else 3):
            raise RemoteFault(f"hop to recompute with {len(call.tensors)} tensors; expected {2 if last else 3}")
        if not last:
            check_activations(self.manifest, request.samples, call.tensors[2], "gradient")
        gradient = None if last else call.tensors[2]

        def work() -> tuple[wire.Recomputed, tuple[WireTensor, ...]]:
            loss_sum, made = hop_again(self.replica, x, tokens, request.samples, gradient)
            reply = wire.Recomputed(loss_sum=loss_sum)
            if self.sign is not None:
                reply.inner_steps = self.replica.inner_steps
                reply.mark = self.replica.mark() if request.marks else b""
                mine = recomputed_statement(request, peer, (x, tokens, gradient), made, reply, self.replica.fingerprint)
                self.sign(mine)
                reply.signature = mine.signature
            return reply, made

        reply, made = await self._done(peer, request.samples, work)
        return Answer(wire.Reply(recompute=reply), made)

    async def _fed(self, peer: PeerId, asked: wire.Recompute, call: Call) -> Answer:
        """Send the tokens of a call through the first stage, or read the text of the samples it names. Raises
        Unavailable if this node has no text."""
        given = check_tokens(self.manifest, asked.samples, call.tensors) if call.tensors else None
        tokens = await self._read(asked) if given is None else given

        def work() -> tuple[wire.Recomputed, WireTensor]:
            mark = self.replica.mark() if asked.marks else b""
            return wire.Recomputed(inner_steps=self.replica.inner_steps, mark=mark), sent_again(self.replica, tokens)

        reply, y = await self._done(peer, asked.samples, work)
        return Answer(wire.Reply(recompute=reply), (tokens, y) if given is None else (y,))

    async def _read(self, asked: wire.Recompute) -> WireTensor:
        if asked.first_sample >= COUNT_MAX:
            raise RemoteFault(f"samples from {asked.first_sample}; no text has as many")
        indices = range(asked.first_sample, asked.first_sample + asked.samples)
        tokens = None if self.text is None else await self.text(indices)
        if tokens is None:
            raise Unavailable("this replica has no text")
        return tokens

    async def _done(self, peer: PeerId, samples: int, work: Callable[[], T]) -> T:
        """The value of `work` for `peer`, on the compute thread. Raises Busy for one too many."""
        self._admit(peer)
        try:
            outcome = await self.compute.run(Priority.BACKWARD, samples, work)
        finally:
            self._under_way.discard(peer)
        self.telemetry.count(name.REDONE)
        return outcome

    def _admit(self, peer: PeerId) -> None:
        if peer in self._under_way or len(self._under_way) >= AT_ONCE_MAX:
            raise Busy("this replica is recomputing enough hops already", retry_after_s=1.0)
        if not self._rate.take(peer, asyncio.get_running_loop().time()):
            raise Busy(f"{PER_MINUTE_MAX} hops were recomputed for you within a minute", retry_after_s=10.0)
        self._under_way.add(peer)


def sent_again(replica: Replica, tokens: WireTensor) -> WireTensor:
    """The activations that the first stage makes of `tokens` with its current weights, not with their running mean. On
    the compute thread."""
    return replica.forward(tokens, keep=True, graph=False, tokens=tokens)[0]


def hop_again(
    replica: Replica, x: WireTensor, tokens: WireTensor, samples: int, gradient: WireTensor | None
) -> tuple[float, tuple[WireTensor, ...]]:
    """Recompute one hop; nothing is accumulated. On the compute thread. Raises RemoteFault.

    Without `gradient` (last stage): (loss in nats, the gradient of x). Else (0, the activations sent on, and the
    gradient of x unless x are tokens).
    """
    if gradient is None:
        result = replica.loss(x, tokens, samples, train=True, accumulate=False)
        assert result.gradient is not None
        return result.loss_sum, (result.gradient,)
    y, tape = replica.forward(x, keep=True, tokens=tokens)
    assert tape is not None
    x_gradient = replica.backward(tape, gradient, samples, accumulate=False)
    return 0.0, (y,) if x_gradient is None else (y, x_gradient)

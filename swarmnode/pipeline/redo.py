"""What a replica does for those who check others: it does a hop again, and shows what it answered by itself.

Both are bounded: a hop done again takes arithmetic, an answer kept takes memory.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from swarmnode.errors import Busy, RemoteFault, Unavailable
from swarmnode.ids import MICROBATCH_ID_BYTES, PeerId
from swarmnode.manifest import Manifest
from swarmnode.manifest.check import COUNT_MAX
from swarmnode.metrics import name
from swarmnode.pipeline.request import check_activations, check_inputs, check_samples
from swarmnode.ports import Answer, Call, Compute, Priority, Replica, Telemetry, WireTensor
from swarmnode.wire import call_pb2 as wire

T = TypeVar("T")
Text = Callable[[Sequence[int]], WireTensor | None]

AT_ONCE_MAX = 2  # guess: hops done again at once, for all callers together; one for each
PER_MINUTE_MAX = 60  # guess: the same, for one caller; it checks a few percent of what it sends
CALLERS_MAX = 1024  # guess: whose last minute is remembered
KEPT_MAX = 32  # guess: answers kept to be shown; who wants to see one asks within a second
KEPT_SHARE = 0.25  # guess: of what tapes may take, for the tensors of answers kept; four are kept however large
KEPT_LEAST = 4


@dataclass(frozen=True, slots=True)
class Shown:
    """What an answer was made of: the activations sent on, their gradient, and what the server of those stated."""

    sent: WireTensor
    got: WireTensor
    next: wire.Statement

    @property
    def nbytes(self) -> int:
        return self.sent.nbytes + self.got.nbytes


class Redoing:
    """One replica's service to auditors."""

    def __init__(
        self,
        manifest: Manifest,
        stage: int,
        replica: Replica,
        compute: Compute,
        boundary_digest: bytes,
        telemetry: Telemetry,
        text: Text = lambda indices: None,
    ) -> None:
        """`text` gives tokens [B, T+1] of samples of the run's training text, None where it is not at hand."""
        self._text = text
        self._manifest = manifest
        self._stage = stage
        self._replica = replica
        self._compute = compute
        self._boundary_digest = boundary_digest
        self._telemetry = telemetry
        self._shown: OrderedDict[tuple[bytes, int], Shown] = OrderedDict()
        self._nbytes = 0
        self._under_way = set[PeerId]()
        self._asked: OrderedDict[PeerId, deque[float]] = OrderedDict()

    def keep(self, microbatch: bytes, position: int, shown: Shown) -> None:
        """Remember what the answer for `microbatch` was made of, for a while."""
        self._shown[(microbatch, position)] = shown
        self._nbytes += shown.nbytes
        most = KEPT_SHARE * self._manifest.limits.tape_bytes_max
        while len(self._shown) > KEPT_MAX or (len(self._shown) > KEPT_LEAST and self._nbytes > most):
            _, dropped = self._shown.popitem(last=False)
            self._nbytes -= dropped.nbytes

    async def serve_opening(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "opening". Raises Unavailable for an answer that is not kept."""
        asked = call.header.opening
        if len(asked.microbatch_id) != MICROBATCH_ID_BYTES:
            raise RemoteFault(f"microbatch id of {len(asked.microbatch_id)} bytes; {MICROBATCH_ID_BYTES} are due")
        shown = self._shown.get((bytes(asked.microbatch_id), asked.position))
        if shown is None:
            raise Unavailable("this answer is not kept here")
        return Answer(wire.Reply(opening=wire.Opened(next=shown.next)), (shown.sent, shown.got))

    async def serve_redo(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "redo". Raises RemoteFault for a malformed request, Busy for one too many."""
        asked = call.header.redo
        if asked.stage != self._stage:
            raise RemoteFault(f"hop of stage {asked.stage} sent to a replica of stage {self._stage}")
        check_samples(self._manifest, asked.samples, asked.boundary_digest, self._boundary_digest)
        if self._stage == 0:
            return await self._fed(peer, asked, call)
        last = self._stage == self._manifest.pipeline.stages - 1
        x, tokens = check_inputs(self._manifest, asked.samples, call.tensors[:2])
        if len(call.tensors) != (2 if last else 3):
            raise RemoteFault(f"hop to be done again with {len(call.tensors)} tensors; {2 if last else 3} are due")
        if not last:
            check_activations(self._manifest, asked.samples, call.tensors[2], "gradient")
        gradient = None if last else call.tensors[2]
        work = partial(hop_again, self._replica, x, tokens, asked.samples, gradient)
        loss_sum, tensors = await self._done(peer, asked.samples, work)
        return Answer(wire.Reply(redo=wire.Redone(loss_sum=loss_sum)), tensors)

    async def _fed(self, peer: PeerId, asked: wire.Redo, call: Call) -> Answer:
        """Read the text of a microbatch and send its tokens through the first stage. Raises Unavailable where there is
        no text."""
        if call.tensors or asked.first_sample >= COUNT_MAX:
            raise RemoteFault(f"{len(call.tensors)} tensors for samples from {asked.first_sample}; none are due")
        tokens = self._text(range(asked.first_sample, asked.first_sample + asked.samples))
        if tokens is None:
            raise Unavailable("this replica has no text")
        work = partial(self._replica.forward, tokens, keep=True, graph=False, tokens=tokens)  # not the running mean
        y, _ = await self._done(peer, asked.samples, work)
        return Answer(wire.Reply(redo=wire.Redone()), (tokens, y))

    async def _done(self, peer: PeerId, samples: int, work: Callable[[], T]) -> T:
        """The value of `work` for `peer`, on the compute thread. Raises Busy for one too many."""
        self._admit(peer)
        try:
            found = await self._compute.run(Priority.BACKWARD, samples, work)
        finally:
            self._under_way.discard(peer)
        self._telemetry.count(name.REDONE)
        return found

    def _admit(self, peer: PeerId) -> None:
        now_s = asyncio.get_running_loop().time()
        if peer in self._under_way or len(self._under_way) >= AT_ONCE_MAX:
            raise Busy("enough hops are being done again here", retry_after_s=1.0)
        times = self._asked.pop(peer, None) or deque(maxlen=PER_MINUTE_MAX)
        if len(times) == PER_MINUTE_MAX and now_s - times[0] < 60.0:
            self._asked[peer] = times
            raise Busy(f"{PER_MINUTE_MAX} hops were done again for you in a minute", retry_after_s=10.0)
        times.append(now_s)
        self._asked[peer] = times
        if len(self._asked) > CALLERS_MAX:
            self._asked.popitem(last=False)
        self._under_way.add(peer)


def hop_again(
    replica: Replica, x: WireTensor, tokens: WireTensor, samples: int, gradient: WireTensor | None
) -> tuple[float, tuple[WireTensor, ...]]:
    """(loss in nats, the gradient of x) of the last stage, where there is no `gradient`; else (0, the activations sent
    on, and the gradient of x where x are not tokens). Nothing is added. On the compute thread; raises RemoteFault."""
    if gradient is None:
        found = replica.loss(x, tokens, samples, train=True, accumulate=False)
        assert found.gradient is not None
        return found.loss_sum, (found.gradient,)
    y, tape = replica.forward(x, keep=True, tokens=tokens)
    assert tape is not None
    given = replica.backward(tape, gradient, samples, accumulate=False)
    return 0.0, (y,) if given is None else (y, given)

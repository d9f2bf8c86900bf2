"""Is what feeders send the run's text, and what their stage makes of it?

A replica that is sent microbatches by a feeder has a few of them done again by another feeder: that reads the same
samples from its own copy of the text and sends them through its own first stage. Tokens must be equal, activations
alike. Where two feeders contradict each other, a third decides; where there are only two, our own copy of the text
does, and for activations our own arithmetic with the weights of each.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from swarmnode.errors import DataError, LocalFault, RemoteFault, Unavailable
from swarmnode.ids import PeerId, short
from swarmnode.pipeline.audit import ALIKE, wrong_of_two
from swarmnode.pipeline.auditor import REPLY_SLACK_BYTES, TIMEOUT_S, Auditor
from swarmnode.pipeline.request import TOKEN_DTYPES, check_activations
from swarmnode.ports import Call, WireTensor
from swarmnode.wire import call_pb2 as wire


@dataclass(frozen=True, slots=True)
class Fed:
    """What a feeder sent: samples `first` to `first + samples`, their tokens, and the activations of its stage."""

    feeder: PeerId
    microbatch: bytes
    first: int
    samples: int
    tokens: WireTensor
    x: WireTensor


Read = Callable[[Sequence[int]], Awaitable[WireTensor]]
"""Tokens [B, T+1] of samples, from our own copy of the text. Raises DataError, LocalFault."""

WeighFeeder = Callable[[PeerId, Fed], Awaitable[WireTensor]]
"""The activations of what was fed, done here with the weights that a feeder gives. Raises Unavailable, RemoteFault."""


class Upstream:
    """One replica's checks of the feeders that send to it; part of `auditor`."""

    def __init__(self, auditor: Auditor, read: Read, weigh: WeighFeeder) -> None:
        self._auditor = auditor
        self._read = read
        self._weigh = weigh

    def saw(self, fed: Fed) -> None:
        """A microbatch came from a feeder and was trained: it may be checked."""
        self._auditor.perhaps(fed.feeder, lambda: self._check(fed))

    async def _check(self, fed: Fed) -> None:
        auditor, contradicted = self._auditor, list[tuple[PeerId, WireTensor, WireTensor]]()
        failures: list[str] = []
        for peer in auditor.others(0, fed.feeder):
            try:
                tokens, y = await self._redone(peer, fed)
            except (Unavailable, RemoteFault) as error:
                failures.append(f"{short(peer)}: {error}")
                continue
            if await self._agree(fed, (fed.tokens, fed.x), (tokens, y)):
                auditor.confirmed(fed.feeder, 0, f"{short(peer)} feeds the same")
                return
            for _, *before in contradicted:
                if await self._agree(fed, (before[0], before[1]), (tokens, y)):
                    self._false(fed, fed.feeder, "two other feeders feed otherwise")
                    return
            contradicted.append((peer, tokens, y))
        if not contradicted:
            auditor.tell(fed.feeder, 0, "undone", "; ".join(failures) or "no other feeder")
            return
        await self._referee(fed, *contradicted[0])

    async def _referee(self, fed: Fed, other: PeerId, tokens: WireTensor, y: WireTensor) -> None:
        """Two feeders contradict each other, and no third is there."""
        try:
            if not _same(fed.tokens, tokens):
                own = await self._read(range(fed.first, fed.first + fed.samples))
                liars = [peer for peer, said in ((fed.feeder, fed.tokens), (other, tokens)) if not _same(own, said)]
                reason = "its samples are not the run's text"
            else:
                cosines = [
                    await self._auditor.cosine(said, await self._weigh(peer, fed), fed.samples)
                    for peer, said in ((fed.feeder, fed.x), (other, y))
                ]
                reason = f"cosine of activations and of what own weights make: {cosines[0]:.3f}, {cosines[1]:.3f}"
                false = wrong_of_two(cosines)
                liars = [peer for peer, is_wrong in zip((fed.feeder, other), false, strict=True) if is_wrong]
        except (Unavailable, RemoteFault, DataError, LocalFault) as error:
            self._auditor.tell(fed.feeder, 0, "undecided", str(error))
            return
        if len(liars) == 1:
            self._false(fed, liars[0], reason)
        else:
            self._auditor.tell(fed.feeder, 0, "undecided", reason)

    def _false(self, fed: Fed, liar: PeerId, reason: str) -> None:
        self._auditor.tell(liar, 0, "wrong", reason)
        self._auditor.wrong(liar, fed.microbatch, reason)

    async def _redone(self, peer: PeerId, fed: Fed) -> tuple[WireTensor, WireTensor]:
        """(tokens, activations) of the same samples, by another feeder. Raises Unavailable, RemoteFault."""
        asked = wire.Redo(
            stage=0,
            samples=fed.samples,
            boundary_digest=self._auditor.boundary_digest,
            first_sample=fed.first,
        )
        most = fed.x.nbytes + fed.tokens.nbytes + REPLY_SLACK_BYTES
        answer = await self._auditor.ask(peer, Call(wire.Request(redo=asked)), timeout_s=TIMEOUT_S, most=most)
        if len(answer.tensors) != 2:
            raise RemoteFault(f"{len(answer.tensors)} tensors of samples fed again; tokens and activations are due")
        tokens, y = answer.tensors
        if tokens.shape != fed.tokens.shape or tokens.dtype not in TOKEN_DTYPES:
            raise RemoteFault(f"tokens {tokens.dtype}{list(tokens.shape)}; {list(fed.tokens.shape)} are due")
        check_activations(self._auditor.manifest, fed.samples, y, "activations")
        return tokens, y

    async def _agree(self, fed: Fed, one: tuple[WireTensor, WireTensor], other: tuple[WireTensor, WireTensor]) -> bool:
        return _same(one[0], other[0]) and await self._auditor.cosine(one[1], other[1], fed.samples) >= ALIKE


def _same(one: WireTensor, other: WireTensor) -> bool:
    """Whether two token tensors are equal."""
    return one.dtype == other.dtype and bytes(memoryview(one.data)) == bytes(memoryview(other.data))

"""Check that feeders send the run's text, and activations that their stage makes of it.

A replica that gets microbatches from a feeder compares the tokens of a few of them with those that other feeders read
under the same numbers, and the activations with those that other replicas of the first stage make of these tokens. Who
is alike once is right, and two others that agree with each other outvote one. Where voters are too few, our own copy of
the text decides about tokens, and a recomputation here with the weights of each about activations.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from swarmnode.errors import DataError, LocalFault, RemoteFault, Unavailable
from swarmnode.ids import PeerId, short
from swarmnode.pipeline.audit import ALIKE, OWN_LEAST
from swarmnode.pipeline.auditor import REPLY_SLACK_BYTES, TIMEOUT_S, Auditor
from swarmnode.pipeline.backlog import TOKEN_DTYPES, check_activations
from swarmnode.ports import Call, WireTensor
from swarmnode.wire import call_pb2 as wire


@dataclass(frozen=True, slots=True)
class FeederInput:
    """A feeder's input: samples `first` to `first + samples`, their tokens, and the activations that it made of them at
    the first stage."""

    feeder: PeerId
    microbatch: bytes
    first: int
    samples: int
    tokens: WireTensor
    x: WireTensor


Read = Callable[[Sequence[int]], Awaitable[WireTensor]]
"""Tokens [B, T+1] of samples, from our own copy of the text. Raises DataError, LocalFault, Unavailable."""

WeighFeeder = Callable[[PeerId, FeederInput], Awaitable[WireTensor]]
"""The activations of a feeder's input, computed here with a given feeder's weights. Raises Unavailable, RemoteFault."""


def same_tokens(one: WireTensor, other: WireTensor) -> bool:
    """Whether two token tensors are equal."""
    return one.dtype == other.dtype and bytes(memoryview(one.data)) == bytes(memoryview(other.data))


class InputAuditor:
    """A replica's checks of the feeders that send to it; part of `auditor`."""

    def __init__(self, auditor: Auditor, read: Read, weigh: WeighFeeder) -> None:
        self._auditor = auditor
        self._read = read
        self._weigh = weigh

    def observe_input(self, fed: FeederInput) -> None:
        """Consider a trained microbatch from a feeder for a check."""
        self._auditor.perhaps(fed.feeder, lambda: self.check(fed))

    async def check(self, fed: FeederInput) -> None:
        """Check the text of a feeder, then what it made of it."""
        made = dict[PeerId, WireTensor]()
        if await self._check_text(fed, made):
            await self.check_activations(fed, made)

    async def _check_text(self, fed: FeederInput, made: dict[PeerId, WireTensor]) -> bool:
        """Compare the tokens with those of other readers of the text until two agree; whether they are right. `made`
        gets the activations of the reader that agrees."""
        auditor, readings, failures = self._auditor, list[tuple[PeerId, WireTensor]](), list[str]()
        for peer in auditor.other_feeders(fed.feeder):
            try:
                tokens, activations = await self._text_of(peer, fed)
            except (Unavailable, RemoteFault) as error:
                failures.append(f"{short(peer)}: {error}")
                continue
            if same_tokens(tokens, fed.tokens):
                made[peer] = activations
                return True
            if any(same_tokens(tokens, before) for _, before in readings):
                return self._other_text(fed)
            readings.append((peer, tokens))
        if not readings:
            auditor.tell(fed.feeder, 0, "undone", "; ".join(failures) or "no other feeder")
            return False
        try:
            own = await self._read(range(fed.first, fed.first + fed.samples))
        except (Unavailable, RemoteFault, DataError, LocalFault) as error:
            auditor.tell(fed.feeder, 0, "undecided", "; ".join([*failures, str(error)]))
            return False
        if not same_tokens(own, fed.tokens):
            return self._other_text(fed)
        return True

    def _other_text(self, fed: FeederInput) -> bool:
        self._auditor.record_false(fed.feeder, 0, fed.microbatch, "its samples are not the run's text")
        return False

    async def _text_of(self, peer: PeerId, fed: FeederInput) -> Sequence[WireTensor]:
        """Tokens of the same samples, read by `peer`, and what it makes of them. Raises Unavailable, RemoteFault."""
        digest = self._auditor.boundary_digest
        request = wire.Recompute(stage=0, samples=fed.samples, boundary_digest=digest, first_sample=fed.first)
        most = fed.x.nbytes + fed.tokens.nbytes + REPLY_SLACK_BYTES
        call = Call(wire.Request(recompute=request))
        answer = await self._auditor.ask(peer, call, about=fed.feeder, timeout_s=TIMEOUT_S, most=most)
        if len(answer.tensors) != 2:
            raise RemoteFault(f"{len(answer.tensors)} tensors of samples that were read")
        tokens, activations = answer.tensors
        if tokens.shape != fed.tokens.shape or tokens.dtype not in TOKEN_DTYPES:
            raise RemoteFault(f"tokens {tokens.dtype}{list(tokens.shape)}; {list(fed.tokens.shape)} are due")
        check_activations(self._auditor.manifest, fed.samples, activations, "activations")
        return answer.tensors

    async def check_activations(self, fed: FeederInput, made: dict[PeerId, WireTensor]) -> None:
        """Compare the activations with those that other replicas of the first stage make of the tokens, first with
        those that some `made` already."""
        auditor, contradicted, failures = self._auditor, list[tuple[PeerId, WireTensor]](), list[str]()
        for peer in dict.fromkeys([*made, *auditor.others(0, fed.feeder)]):
            try:
                y = made[peer] if peer in made else await self._activations_of(peer, fed)
            except (Unavailable, RemoteFault) as error:
                failures.append(f"{short(peer)}: {error}")
                continue
            cosine = await auditor.cosine(fed.x, y, fed.samples)
            if cosine >= ALIKE:
                auditor.record_right(fed.feeder, 0, f"{short(peer)} makes the same of it")
                return
            for _, before in contradicted:
                if await auditor.cosine(before, y, fed.samples) >= ALIKE:
                    reason = f"cosine {cosine:.3f} to activations that two others agree on"
                    if cosine < OWN_LEAST:  # others may be of weights that are some dozens of steps older
                        auditor.record_false(fed.feeder, 0, fed.microbatch, reason)
                    else:
                        auditor.tell(fed.feeder, 0, "undecided", reason)
                    return
            contradicted.append((peer, y))
        if not contradicted:
            auditor.tell(fed.feeder, 0, "undone", "; ".join(failures) or "no other replica of the first stage")
            return
        await self._referee(fed, *contradicted[0])

    async def _referee(self, fed: FeederInput, other: PeerId, y: WireTensor) -> None:
        """Decide between two replicas that contradict each other when there is no third, by the weights of each."""
        auditor, cosines = self._auditor, list[float]()
        try:
            for peer, activations in ((fed.feeder, fed.x), (other, y)):
                cosines.append(await auditor.cosine(activations, await self._weigh(peer, fed), fed.samples))
        except (Unavailable, RemoteFault, LocalFault) as error:
            auditor.tell(fed.feeder, 0, "undecided", str(error))
            return
        reason = f"cosine of activations and of those its own weights make: {cosines[0]:.3f}, {cosines[1]:.3f}"
        liars = [peer for peer, one in zip((fed.feeder, other), cosines, strict=True) if one < OWN_LEAST]
        if liars and max(cosines) >= ALIKE:
            auditor.record_false(liars[0], 0, fed.microbatch, reason)
        else:
            auditor.tell(fed.feeder, 0, "undecided", reason)

    async def _activations_of(self, peer: PeerId, fed: FeederInput) -> WireTensor:
        """Activations that `peer` makes of the same tokens. Raises Unavailable, RemoteFault."""
        request = wire.Recompute(stage=0, samples=fed.samples, boundary_digest=self._auditor.boundary_digest)
        call = Call(wire.Request(recompute=request), (fed.tokens,))
        most = fed.x.nbytes + REPLY_SLACK_BYTES
        answer = await self._auditor.ask(peer, call, about=fed.feeder, timeout_s=TIMEOUT_S, most=most)
        if len(answer.tensors) != 1:
            raise RemoteFault(f"{len(answer.tensors)} tensors of refed tokens; expected activations")
        check_activations(self._auditor.manifest, fed.samples, answer.tensors[0], "activations")
        return answer.tensors[0]

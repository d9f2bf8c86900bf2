"""Check that feeders send the run's text, and activations that their stage makes of it.

A replica that gets microbatches from a feeder compares the tokens of a few of them with those that other feeders read
under the same numbers. Who is alike once is right, and two others that agree with each other outvote one. Where voters
are too few, our own copy of the text decides. The activations are an answer of the first stage to these tokens, checked
as answers of the other stages are (auditor.py). Its feeder does not sign it: what one replica finds convinces no other.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from swarmnode.base.errors import DataError, LocalFault, RemoteFault, Unavailable
from swarmnode.base.ids import PeerId, short
from swarmnode.base.ports import Call, WireTensor
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.data.microbatch_shape import TOKEN_DTYPES, check_activations
from swarmnode.net.membership.judge import ASKED_S
from swarmnode.trust.auditor import Auditor
from swarmnode.trust.exact_check import Voter
from swarmnode.trust.statement import HopClaim
from swarmnode.trust.verdict import Evidence
from swarmnode.trust.witness import REPLY_SLACK_BYTES

Read = Callable[[Sequence[int]], Awaitable[WireTensor]]
"""Tokens [B, T+1] of samples, from our own copy of the text. Raises DataError, LocalFault, Unavailable."""


def same_tokens(one: WireTensor, other: WireTensor) -> bool:
    """Whether two token tensors are equal."""
    return one.dtype == other.dtype and bytes(memoryview(one.data)) == bytes(memoryview(other.data))


class InputAuditor:
    """A replica's checks of the feeders that send to it; part of `auditor`."""

    def __init__(self, auditor: Auditor, read: Read) -> None:
        self._auditor = auditor
        self._read = read

    def refuses(self, process: wire.Process, tokens: WireTensor, x: WireTensor) -> bool:
        """Whether not to take a microbatch: its feeder stands aside, and another one can feed. At times its own weights
        judge what it sent."""
        feeder = PeerId(process.feeder)
        if not (self._auditor.audits.means(0).aside(feeder) and self._auditor.withholds(feeder, 0)):
            return False
        if self._auditor.audits.weighable(feeder, asyncio.get_running_loop().time()):
            self._auditor.observe_answer(self._claim(process, tokens, x), self._auditor.examine)
        return True

    def observe_input(self, process: wire.Process, tokens: WireTensor, x: WireTensor) -> None:
        """Consider a microbatch of a feeder, which was trained on, for a check."""
        self._auditor.spawn(self._observing(self._claim(process, tokens, x), process.first_sample))

    def _claim(self, process: wire.Process, tokens: WireTensor, x: WireTensor) -> HopClaim:
        stated = wire.Statement(microbatch_id=process.microbatch_id, server=process.feeder, client=self._auditor.me)
        stated.inner_steps = process.inner_steps
        stated.mark = process.mark
        return HopClaim(stated, process.samples, tokens, tokens, x)

    async def _observing(self, claim: HopClaim, first: int) -> None:
        with contextlib.suppress(RemoteFault):  # activations that cannot be read are refused where they are used
            claim = await self._auditor.sketched(claim)
            self._auditor.observe_answer(claim, partial(self.check, first=first))

    async def check(self, claim: HopClaim, *, first: int) -> None:
        """Check the text of the samples from `first` on, then what the feeder made of it."""
        made = list[Voter]()
        if await self._check_text(claim, first, made):
            await self._auditor.check(claim, made)

    async def _check_text(self, claim: HopClaim, first: int, made: list[Voter]) -> bool:
        """Compare the tokens with those of other readers of the text until two agree; whether they are right. `made`
        gets the activations of the reader that agrees."""
        auditor = self._auditor
        readings = list[tuple[PeerId, WireTensor]]()
        failures = list[str]()
        for peer in auditor.witnesses.other_feeders(claim.server):
            try:
                tokens, voter = await self._text_of(peer, claim, first)
            except (Unavailable, RemoteFault) as error:
                failures.append(f"{short(peer)}: {error}")
                continue
            if same_tokens(tokens, claim.tokens):
                made.append(voter)
                return True
            if any(same_tokens(tokens, before) for _, before in readings):
                return self._other_text(claim)
            readings.append((peer, tokens))
        if not readings:
            auditor.findings.tell(claim.server, 0, "undone", "; ".join(failures) or "no other feeder")
            return False
        try:
            own = await self._read(range(first, first + claim.samples))
        except (Unavailable, RemoteFault, DataError, LocalFault) as error:
            auditor.findings.tell(claim.server, 0, "undecided", "; ".join([*failures, str(error)]))
            return False
        return same_tokens(own, claim.tokens) or self._other_text(claim)

    def _other_text(self, claim: HopClaim) -> bool:
        named = bytes(claim.statement.microbatch_id), "other tokens under the same numbers"
        self._auditor.findings.conclude(claim.server, 0, Evidence.OTHER_TEXT, *named)
        return False

    async def _text_of(self, peer: PeerId, claim: HopClaim, first: int) -> tuple[WireTensor, Voter]:
        """Tokens of the same samples, read by `peer`, and what it makes of them. Raises Unavailable, RemoteFault."""
        digest = self._auditor.witnesses.boundary_digest
        request = wire.Recompute(stage=0, samples=claim.samples, boundary_digest=digest, first_sample=first, marks=True)
        most = claim.gradient.nbytes + claim.tokens.nbytes + REPLY_SLACK_BYTES
        call = Call(wire.Request(recompute=request))
        answer = await self._auditor.witnesses.ask(peer, call, timeout_s=ASKED_S, most=most)
        if len(answer.tensors) != 2:
            raise RemoteFault(f"{len(answer.tensors)} tensors of samples that were read")
        tokens, activations = answer.tensors
        if tokens.shape != claim.tokens.shape or tokens.dtype not in TOKEN_DTYPES:
            raise RemoteFault(f"tokens {tokens.dtype}{list(tokens.shape)}; {list(claim.tokens.shape)} are due")
        check_activations(self._auditor.manifest, claim.samples, activations, "activations")
        return tokens, (peer, await self._auditor.witnesses.fed_again(answer, activations, claim.samples))

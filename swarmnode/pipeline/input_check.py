"""Check that feeders send the run's text, and activations that their stage makes of it.

A replica that gets microbatches from a feeder has another feeder redo a few of them: it reads the same samples from its
own copy of the text and runs them through its own first stage. Tokens must be equal and activations similar. If two
feeders contradict each other, a third decides. If there are only two, our own copy of the text decides; for
activations, a recomputation here with the weights of each.

Of a microbatch that a feeder without a stage sent through a replica of the first stage, each answers for its own part
(relayed_check.py).
"""

from __future__ import annotations

from swarmnode.errors import DataError, LocalFault, RemoteFault, Unavailable
from swarmnode.ids import PeerId, short
from swarmnode.pipeline.audit import ALIKE
from swarmnode.pipeline.auditor import REPLY_SLACK_BYTES, TIMEOUT_S, Auditor
from swarmnode.pipeline.fed_input import FeederInput, Read, WeighFeeder, same_tokens
from swarmnode.pipeline.relayed_check import RelayedInputAuditor, check_tokens_of, liars_by_weights
from swarmnode.pipeline.request_check import check_activations
from swarmnode.ports import Call, WireTensor
from swarmnode.wire import call_pb2 as wire


class InputAuditor:
    """A replica's checks of the feeders that send to it; part of `auditor`."""

    def __init__(self, auditor: Auditor, read: Read, weigh: WeighFeeder) -> None:
        self._auditor = auditor
        self._read = read
        self._weigh = weigh
        self._relayed = RelayedInputAuditor(auditor, read, weigh)

    def saw(self, fed: FeederInput) -> None:
        """Consider a trained microbatch from a feeder for a check."""
        if fed.server == fed.feeder:
            self._auditor.perhaps(fed.feeder, lambda: self._check(fed))
        else:
            self._auditor.perhaps(fed.feeder, lambda: self._relayed.check_text(fed))
            self._auditor.perhaps(fed.server, lambda: self._relayed.check_activations(fed))

    async def _check(self, fed: FeederInput) -> None:
        auditor, contradicted = self._auditor, list[tuple[PeerId, WireTensor, WireTensor]]()
        failures: list[str] = []
        for peer in auditor.others(0, fed.feeder):
            try:
                tokens, y = await self._recomputed(peer, fed)
            except (Unavailable, RemoteFault) as error:
                failures.append(f"{short(peer)}: {error}")
                continue
            if await self._agree(fed, (fed.tokens, fed.x), (tokens, y)):
                auditor.confirmed(fed.feeder, 0, f"{short(peer)} feeds the same")
                return
            for _, *before in contradicted:
                if await self._agree(fed, (before[0], before[1]), (tokens, y)):
                    await self._outvoted(fed, tokens, y)
                    return
            contradicted.append((peer, tokens, y))
        if not contradicted:
            auditor.tell(fed.feeder, 0, "undone", "; ".join(failures) or "no other feeder")
            return
        await self._referee(fed, *contradicted[0])

    async def _outvoted(self, fed: FeederInput, tokens: WireTensor, y: WireTensor) -> None:
        """Record that two other feeders agree on `tokens` and `y`. Activations not wholly unlike may be of weights that
        are some dozens of steps older."""
        if not same_tokens(fed.tokens, tokens):
            self._auditor.convicted(fed.feeder, 0, fed.microbatch, "two other feeders read other text")
            return
        cosine = await self._auditor.cosine(fed.x, y, fed.samples)
        self._auditor.outvoted(fed.feeder, fed.microbatch, cosine)

    async def _referee(self, fed: FeederInput, other: PeerId, tokens: WireTensor, y: WireTensor) -> None:
        """Decide between two feeders that contradict each other when there is no third."""
        try:
            if not same_tokens(fed.tokens, tokens):
                own = await self._read(range(fed.first, fed.first + fed.samples))
                said_by = ((fed.feeder, fed.tokens), (other, tokens))
                liars = [peer for peer, said in said_by if not same_tokens(own, said)]
                reason = "its samples are not the run's text"
            else:
                by = ((fed.feeder, fed.x), (other, y))
                liars, reason = await liars_by_weights(self._auditor, self._weigh, fed, by)
        except (Unavailable, RemoteFault, DataError, LocalFault) as error:
            self._auditor.tell(fed.feeder, 0, "undecided", str(error))
            return
        if len(liars) == 1:
            self._auditor.convicted(liars[0], 0, fed.microbatch, reason)
        else:
            self._auditor.tell(fed.feeder, 0, "undecided", reason)

    async def _recomputed(self, peer: PeerId, fed: FeederInput) -> tuple[WireTensor, WireTensor]:
        """(tokens, activations) of the same samples, by another feeder. Raises Unavailable, RemoteFault."""
        asked = wire.Recompute(
            stage=0,
            samples=fed.samples,
            boundary_digest=self._auditor.boundary_digest,
            first_sample=fed.first,
        )
        most = fed.x.nbytes + fed.tokens.nbytes + REPLY_SLACK_BYTES
        answer = await self._auditor.ask(peer, Call(wire.Request(recompute=asked)), timeout_s=TIMEOUT_S, most=most)
        if len(answer.tensors) != 2:
            raise RemoteFault(f"{len(answer.tensors)} tensors of refed samples; expected tokens and activations")
        tokens, y = answer.tensors
        check_tokens_of(fed, tokens)
        check_activations(self._auditor.manifest, fed.samples, y, "activations")
        return tokens, y

    async def _agree(
        self, fed: FeederInput, one: tuple[WireTensor, WireTensor], other: tuple[WireTensor, WireTensor]
    ) -> bool:
        return same_tokens(one[0], other[0]) and await self._auditor.cosine(one[1], other[1], fed.samples) >= ALIKE

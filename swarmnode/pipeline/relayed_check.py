"""Check a microbatch that a feeder without a stage sent through a replica of the first stage.

The feeder has signed its tokens, so it answers for the text, and the replica for the activations it made of them. The
tokens are compared with those that other feeders read under the same numbers, and with our own copy of the text. The
activations are compared with those that other replicas of the first stage make of the same tokens. Where voters are too
few, our own copy decides about tokens, and a recomputation here with the weights of each about activations.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarmnode.errors import DataError, LocalFault, RemoteFault, Unavailable
from swarmnode.ids import PeerId, short
from swarmnode.pipeline.audit import ALIKE, wrong_of_two
from swarmnode.pipeline.auditor import REPLY_SLACK_BYTES, TIMEOUT_S, Auditor
from swarmnode.pipeline.fed_input import FeederInput, Read, WeighFeeder, same_tokens
from swarmnode.pipeline.request_check import TOKEN_DTYPES, check_activations
from swarmnode.ports import Call, WireTensor
from swarmnode.wire import call_pb2 as wire


async def liars_by_weights(
    auditor: Auditor, weigh: WeighFeeder, fed: FeederInput, said_by: Sequence[tuple[PeerId, WireTensor]]
) -> tuple[list[PeerId], str]:
    """(those of two contradicting peers whose activations are not what their own weights make, the reason): a
    recomputation here of the input `fed` with the weights of each. Raises Unavailable, RemoteFault, LocalFault."""
    cosines = [await auditor.cosine(said, await weigh(peer, fed), fed.samples) for peer, said in said_by]
    liars = [peer for (peer, _), false in zip(said_by, wrong_of_two(cosines), strict=True) if false]
    return liars, f"cosine of activations and of those its own weights make: {cosines[0]:.3f}, {cosines[1]:.3f}"


def check_tokens_of(fed: FeederInput, tokens: WireTensor) -> None:
    """Raises RemoteFault unless `tokens`, read again for `fed`, have the form of its own."""
    if tokens.shape != fed.tokens.shape or tokens.dtype not in TOKEN_DTYPES:
        raise RemoteFault(f"tokens {tokens.dtype}{list(tokens.shape)}; {list(fed.tokens.shape)} are due")


class RelayedInputAuditor:
    """Part of a replica's InputAuditor: the checks where feeder and first stage are two machines."""

    def __init__(self, auditor: Auditor, read: Read, weigh: WeighFeeder) -> None:
        self._auditor = auditor
        self._read = read
        self._weigh = weigh

    # ---- the feeder's text

    async def check_text(self, fed: FeederInput) -> None:
        """Compare the tokens with those of other readers of the text until two agree."""
        auditor, read, failures = self._auditor, list[tuple[PeerId, WireTensor]](), list[str]()
        for peer, place in auditor.other_feeders(fed.feeder):
            try:
                read.append((peer, await self._text_of(peer, place, fed)))
            except (Unavailable, RemoteFault) as error:
                failures.append(f"{short(peer)}: {error}")
                continue
            if self._decided(fed, read):
                return
        try:
            read.append((auditor.me, await self._read(range(fed.first, fed.first + fed.samples))))
        except (Unavailable, RemoteFault, DataError, LocalFault) as error:
            failures.append(str(error))
        if not self._decided(fed, read, owns=True):
            auditor.tell(fed.feeder, auditor.feeders, "undone" if not read else "undecided", "; ".join(failures))

    def _decided(self, fed: FeederInput, read: list[tuple[PeerId, WireTensor]], owns: bool = False) -> bool:
        """Tell the outcome once it is certain: another reader has the same tokens, or two others agree on other ones.
        `owns`: our own copy is the last of `read` and counts as two."""
        auditor = self._auditor
        for peer, tokens in read:
            if same_tokens(tokens, fed.tokens):
                auditor.confirmed(fed.feeder, auditor.feeders, f"{short(peer)} reads the same")
                return True
        last = read[-1] if read else None
        own = owns and last is not None and last[0] == auditor.me
        if last is not None and (own or any(same_tokens(last[1], tokens) for _, tokens in read[:-1])):
            auditor.convicted(fed.feeder, auditor.feeders, fed.microbatch, "its samples are not the run's text")
            return True
        return False

    async def _text_of(self, peer: PeerId, place: int, fed: FeederInput) -> WireTensor:
        """Tokens of the same samples, read by `peer` at `place`. Raises Unavailable, RemoteFault."""
        digest = self._auditor.boundary_digest if place == 0 else b""
        asked = wire.Recompute(stage=place, samples=fed.samples, boundary_digest=digest, first_sample=fed.first)
        most = fed.x.nbytes + fed.tokens.nbytes + REPLY_SLACK_BYTES
        answer = await self._auditor.ask(peer, Call(wire.Request(recompute=asked)), timeout_s=TIMEOUT_S, most=most)
        if len(answer.tensors) != (2 if place == 0 else 1):
            raise RemoteFault(f"{len(answer.tensors)} tensors of samples that were read")
        check_tokens_of(fed, answer.tensors[0])
        return answer.tensors[0]

    # ---- the replica's activations

    async def check_activations(self, fed: FeederInput) -> None:
        """Compare the activations with those that other replicas of the first stage make of the tokens."""
        auditor, contradicted, failures = self._auditor, list[tuple[PeerId, WireTensor]](), list[str]()
        for peer in auditor.others(0, fed.server):
            try:
                y = await self._activations_of(peer, fed)
            except (Unavailable, RemoteFault) as error:
                failures.append(f"{short(peer)}: {error}")
                continue
            if await self._alike(fed, fed.x, y):
                auditor.confirmed(fed.server, 0, f"{short(peer)} makes the same of it")
                return
            if any([await self._alike(fed, before, y) for _, before in contradicted]):
                auditor.outvoted(fed.server, fed.microbatch, await auditor.cosine(fed.x, y, fed.samples))
                return
            contradicted.append((peer, y))
        if not contradicted:
            auditor.tell(fed.server, 0, "undone", "; ".join(failures) or "no other replica of the first stage")
            return
        await self._referee(fed, *contradicted[0])

    async def _referee(self, fed: FeederInput, other: PeerId, y: WireTensor) -> None:
        """Decide between two replicas that contradict each other when there is no third."""
        try:
            liars, reason = await liars_by_weights(self._auditor, self._weigh, fed, ((fed.server, fed.x), (other, y)))
        except (Unavailable, RemoteFault, LocalFault) as error:
            self._auditor.tell(fed.server, 0, "undecided", str(error))
            return
        if len(liars) == 1:
            self._auditor.convicted(liars[0], 0, fed.microbatch, reason)
        else:
            self._auditor.tell(fed.server, 0, "undecided", reason)

    async def _activations_of(self, peer: PeerId, fed: FeederInput) -> WireTensor:
        """Activations that `peer` makes of the same tokens. Raises Unavailable, RemoteFault."""
        asked = wire.Recompute(stage=0, samples=fed.samples, boundary_digest=self._auditor.boundary_digest)
        call = Call(wire.Request(recompute=asked), (fed.tokens,))
        answer = await self._auditor.ask(peer, call, timeout_s=TIMEOUT_S, most=fed.x.nbytes + REPLY_SLACK_BYTES)
        if len(answer.tensors) != 1:
            raise RemoteFault(f"{len(answer.tensors)} tensors of refed tokens; expected activations")
        check_activations(self._auditor.manifest, fed.samples, answer.tensors[0], "activations")
        return answer.tensors[0]

    async def _alike(self, fed: FeederInput, one: WireTensor, other: WireTensor) -> bool:
        return await self._auditor.cosine(one, other, fed.samples) >= ALIKE

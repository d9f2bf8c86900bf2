"""The door to what judges peers: all that pipeline, rounds and states ask of it, without knowing how it decides.

    may I use this peer     `passed_over`, `withholds`, `refuses`, `confirmed`
    here is an answer       `claim`, `measured`, `observe_answer`, `observe_input`; ours: `prints`, `sign`, `keep`
    here is a packet        `gossip.outer.Outer.guard`, made by `trust.robust.guard`
    here is a state         `transfer.download.Compare`, made by `trust.state_check.StateCheck`

A run that audits nothing has strangers to nobody: it has `Trusting`, and imports nothing of swarmnode/trust.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from swarmnode.base.errors import Unavailable
from swarmnode.base.ids import PeerId
from swarmnode.base.ports import Answer, Call, WireTensor
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.run.manifest import Manifest

ASKED_S = 30.0  # guess: for one hop that is made again, or text that is read for it

Claim = object
"""An answer of another replica that verified, with the tensors that it is about; only a judge looks inside."""


def judges(manifest: Manifest) -> bool:
    """Whether peers of this run are judged."""
    return manifest.pipeline.audit_share > 0.0


@dataclass(frozen=True, slots=True)
class TensorFingerprints:
    """Fingerprints of the tensors of one hop; `sent` and `got` are empty at the last stage. `mark`: of the server's
    slow weights (ports.Replica.mark), empty where they moved meanwhile or nobody asked; `steps`: its inner steps at the
    forward."""

    x: bytes
    tokens: bytes
    gradient: bytes
    sent: bytes = b""
    got: bytes = b""
    mark: bytes = b""
    steps: int = field(default=0, kw_only=True)


class Judge(Protocol):
    """The judge of one replica's peers. `claim`, `measured` and `prints` run on the compute thread."""

    def passed_over(self, stage: int, train: bool) -> Collection[PeerId]:
        """Replicas of `stage` that do not get the next microbatch, in training or validation."""
        ...

    def withholds(self, peer: PeerId, stage: int) -> bool:
        """Whether not to use an answer of `peer`, of `stage`: it still has to answer, or nothing would clear it."""
        ...

    def refuses(self, process: wire.Process, tokens: WireTensor, x: WireTensor) -> bool:
        """Whether not to take a microbatch of its feeder; then it may be examined."""
        ...

    def confirmed(self, peer: PeerId) -> int:
        """Answers of `peer` in a row that were checked and right."""
        ...

    def claim(
        self, process: wire.Process, peer: PeerId, report: wire.Processed, tensors: Sequence[WireTensor]
    ) -> Claim | None:
        """The answer of `peer` to `process` as it arrived there, verified: `tensors` are what we sent, tokens, and its
        gradient. None where answers are not signed. Raises RemoteFault."""
        ...

    def measured(self, claim: Claim) -> Claim:
        """`claim` with what checks compare. Raises RemoteFault."""
        ...

    def prints(
        self,
        process: wire.Process,
        tensors: Sequence[WireTensor],
        claim: Claim | None,
        mark: bytes,
        steps: int,
    ) -> TensorFingerprints | None:
        """Fingerprints of our own hop: its x, tokens and gradient, and the next server's `claim`; `mark` and inner
        `steps` are of the weights at its forward. None where answers are not signed."""
        ...

    def sign(self, process: wire.Process, client: PeerId, prints: TensorFingerprints, report: wire.Processed) -> None:
        """Add our signed statement of our answer to `client` to `report`, whose inner steps are set."""
        ...

    def keep(self, process: wire.Process, sent: WireTensor, got: WireTensor, claim: Claim) -> None:
        """Keep what our answer to `process` was made of for a while: its caller may ask."""
        ...

    def observe_answer(self, claim: Claim) -> None:
        """Consider an answer, which was used or withheld."""
        ...

    def observe_input(self, process: wire.Process, tokens: WireTensor, x: WireTensor) -> None:
        """Consider a microbatch of a feeder, which was trained on."""
        ...

    async def serve_opening(self, peer: PeerId, call: Call) -> Answer: ...

    async def serve_recompute(self, peer: PeerId, call: Call) -> Answer: ...

    async def serve_accusation(self, peer: PeerId, call: Call) -> Answer: ...


class Trusting:
    """A judge that believes everybody."""

    def passed_over(self, stage: int, train: bool) -> Collection[PeerId]:
        return ()

    def withholds(self, peer: PeerId, stage: int) -> bool:
        return False

    def refuses(self, process: wire.Process, tokens: WireTensor, x: WireTensor) -> bool:
        return False

    def confirmed(self, peer: PeerId) -> int:
        return 0

    def claim(
        self, process: wire.Process, peer: PeerId, report: wire.Processed, tensors: Sequence[WireTensor]
    ) -> Claim | None:
        return None

    def measured(self, claim: Claim) -> Claim:
        return claim

    def prints(
        self,
        process: wire.Process,
        tensors: Sequence[WireTensor],
        claim: Claim | None,
        mark: bytes,
        steps: int,
    ) -> TensorFingerprints | None:
        return None

    def sign(self, process: wire.Process, client: PeerId, prints: TensorFingerprints, report: wire.Processed) -> None:
        raise AssertionError("answers of this run are not signed")

    def keep(self, process: wire.Process, sent: WireTensor, got: WireTensor, claim: Claim) -> None: ...

    def observe_answer(self, claim: Claim) -> None: ...

    def observe_input(self, process: wire.Process, tokens: WireTensor, x: WireTensor) -> None: ...

    async def serve_opening(self, peer: PeerId, call: Call) -> Answer:
        raise Unavailable("this run does not audit answers")

    serve_recompute = serve_opening
    serve_accusation = serve_opening

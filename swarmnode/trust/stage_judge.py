"""The judge of one replica's peers (judge.Judge): its parts, put together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from swarmnode.base.ids import PeerId
from swarmnode.base.ports import Answer, Call, Replica, WireTensor
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.net.membership.judge import Claim, TensorFingerprints
from swarmnode.trust.accusation import Accusations
from swarmnode.trust.auditor import Auditor
from swarmnode.trust.input_check import InputAuditor
from swarmnode.trust.recompute import RecomputeService
from swarmnode.trust.statement import HopClaim, HopEvidence


@dataclass(slots=True)
class StageJudge:
    """`recompute` serves auditors of our answers. `auditor` signs our answers and checks those to us, `inputs` checks
    what feeders send, `accusations` the findings of other auditors."""

    replica: Replica
    recompute: RecomputeService
    auditor: Auditor
    inputs: InputAuditor
    accusations: Accusations

    def passed_over(self, stage: int, train: bool) -> Collection[PeerId]:
        return self.auditor.passed_over(stage, train)

    def withholds(self, peer: PeerId, stage: int) -> bool:
        return self.auditor.withholds(peer, stage)

    def refuses(self, process: wire.Process, tokens: WireTensor, x: WireTensor) -> bool:
        return self.inputs.refuses(process, tokens, x)

    def confirmed(self, peer: PeerId) -> int:
        return self.auditor.audits.in_row(peer)

    def claim(
        self, process: wire.Process, peer: PeerId, report: wire.Processed, tensors: Sequence[WireTensor]
    ) -> Claim | None:
        x, tokens, gradient = tensors
        prints = TensorFingerprints(*map(self.replica.fingerprint, tensors))
        stated = self.auditor.statements.checked(process, peer, report, prints)
        return HopClaim(stated, process.samples, x, tokens, gradient)

    def measured(self, claim: Claim) -> Claim:
        assert isinstance(claim, HopClaim)
        sketch = self.auditor.sketch(claim.gradient, claim.tokens, claim.samples)
        self.accusations.usual_norm(claim.statement.stage).record(claim.gradient, claim.samples)
        return replace(claim, sketch=sketch)

    def prints(
        self,
        process: wire.Process,
        tensors: Sequence[WireTensor],
        claim: Claim | None,
        mark: bytes,
        steps: int,
    ) -> TensorFingerprints | None:
        assert claim is None or isinstance(claim, HopClaim)
        x, tokens, gradient = tensors
        of = self.replica.fingerprint
        self.accusations.usual_norm(process.itinerary[process.position]).record(gradient, process.samples)
        mark = mark if mark == self.replica.mark() else b""
        if claim is None:
            return TensorFingerprints(of(x), of(tokens), of(gradient), mark=mark, steps=steps)
        then = claim.statement
        return TensorFingerprints(of(x), then.tokens, of(gradient), then.x, then.gradient, mark, steps=steps)

    def sign(self, process: wire.Process, client: PeerId, prints: TensorFingerprints, report: wire.Processed) -> None:
        self.auditor.statements.sign(process, client, prints, report)

    def keep(self, process: wire.Process, sent: WireTensor, got: WireTensor, claim: Claim) -> None:
        assert isinstance(claim, HopClaim)
        self.recompute.keep(bytes(process.microbatch_id), process.position, HopEvidence(sent, got, claim.statement))

    def observe_answer(self, claim: Claim) -> None:
        assert isinstance(claim, HopClaim)
        self.auditor.observe_answer(claim)

    def observe_input(self, process: wire.Process, tokens: WireTensor, x: WireTensor) -> None:
        self.inputs.observe_input(process, tokens, x)

    async def serve_opening(self, peer: PeerId, call: Call) -> Answer:
        return await self.recompute.serve_opening(peer, call)

    async def serve_recompute(self, peer: PeerId, call: Call) -> Answer:
        return await self.recompute.serve_recompute(peer, call)

    async def serve_accusation(self, peer: PeerId, call: Call) -> Answer:
        return await self.accusations.serve(peer, call)

"""Findings about peers' answers at one caller: what the verdict table says of each is done, and told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from swarmnode.base.ids import PeerId
from swarmnode.base.metrics import name
from swarmnode.base.ports import Telemetry
from swarmnode.net.membership.swarm import Swarm
from swarmnode.trust.audit import Audits
from swarmnode.trust.verdict import Evidence, Judgement, verdict

OUTCOMES = {Judgement.RIGHT: "right", Judgement.FALSE: "wrong"}


class Findings:
    """Concludes and tells. `exclude` is called with one that was found to lie."""

    def __init__(
        self,
        audits: Audits,
        swarm: Callable[[], Swarm],
        telemetry: Telemetry,
        exclude: Callable[[PeerId, str], None],
    ) -> None:
        self._audits = audits
        self._swarm = swarm
        self._telemetry = telemetry
        self._exclude = exclude

    def conclude(
        self,
        peer: PeerId,
        stage: int,
        evidence: Evidence,
        microbatch: bytes,
        reason: str,
        *,
        comparable: bool = False,
    ) -> Judgement:
        """The verdict on `peer`, of `stage`, of `evidence` about `microbatch`, which is recorded."""
        now_s = asyncio.get_running_loop().time()
        found = verdict(evidence, len(self._swarm().serving(stage)), comparable=comparable)
        means = self._audits.means(stage)
        out = self._audits.record(peer, found, microbatch, now_s)
        if found in (Judgement.FALSE, Judgement.UNEXPLAINED, Judgement.ASIDE):
            means.put_aside(peer, now_s)
        elif evidence is Evidence.OWN_SAME:
            means.excuse(peer)
        if found is Judgement.FALSE:
            self._telemetry.count(name.PEER_FAULTS, kind="wrong")
        if out:
            self._exclude(peer, f"its answers are false; {reason}")
        self.tell(peer, stage, OUTCOMES.get(found, "undecided"), f"{evidence.value}: {reason}")
        return found

    def unshown(self, peer: PeerId, stage: int, reason: str) -> None:
        """`peer` did not show the evidence of an answer."""
        if self._audits.unshown(peer):
            self._exclude(peer, f"it does not show the evidence of its answers: {reason}")
        self.tell(peer, stage, "unshown", reason)

    def tell(self, peer: PeerId, stage: int, outcome: str, reason: str) -> None:
        """Count a check and log it."""
        self._telemetry.count(name.AUDITS, outcome=outcome)
        level = {"right": "debug", "undone": "debug", "undecided": "info"}.get(outcome, "warning")
        self._telemetry.event("audit.done", level=level, peer=peer, stage_of_peer=stage, outcome=outcome, reason=reason)

"""The result of a simulated run, beside its estimate by formula (plan.py)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from swarmnode.app.planner.learning_efficiency import learned
from swarmnode.app.planner.plan import Plan
from swarmnode.run.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Simulated:
    """`tokens_per_s` of the run, and the inner steps between two meetings of a replica about the same weights, as they
    were; 0: replicas do not meet, or did not meet twice."""

    tokens_per_s: float
    meets_every_steps: float

    def of(self, found: Plan, manifest: Manifest, tokens: float) -> Plan:
        """`found`, with the speed and the meetings that were simulated."""
        if not found.tokens_per_s:
            return found
        efficiency = learned(manifest, found.replicas_min, tokens, self.meets_every_steps or None)
        more = self.tokens_per_s / found.tokens_per_s
        return dataclasses.replace(
            found,
            samples_per_s=found.samples_per_s * more,
            tokens_per_s=self.tokens_per_s,
            days=found.days / more if more else found.days,
            efficiency=efficiency.reckoned,
            likely=(efficiency.least, efficiency.most),
            share=found.share * more,
        )

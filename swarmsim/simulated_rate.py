"""Speed and meetings of a manifest on a fleet, simulated; `swarmnode plan --simulate` prints them by its estimate."""

from __future__ import annotations

from collections.abc import Callable

from swarmnode.app.planner.fleet import MachineKind
from swarmnode.app.planner.plan import plan
from swarmnode.app.planner.simulated import Simulated
from swarmnode.app.planner.stage_memory import able
from swarmnode.base.errors import UsageError
from swarmnode.run.manifest import Manifest
from swarmsim.life import simulate
from swarmsim.scenario import RecoveryBounds, Scenario

SIMULATED_NODES_MAX = 2000
CPU_S_PER_HOP = 7e-4  # measured: a microbatch at one stage, on a busy machine
PATIENCE_S = 60.0  # guess: CPU seconds that a user waits for a check
SIMULATED_S_MIN = 30.0  # windows have grown by then


def simulated_rate(
    manifest: Manifest, kinds: tuple[MachineKind, ...], seconds: float, notice: Callable[[str], None]
) -> Simulated:
    """The speed and the meetings in the second half of `seconds` of virtual time, on machines that can serve a stage.

    `notice` is told where the time is shortened. Raises UsageError if there are too many machines, or nothing was
    trained."""
    kinds = able(manifest, kinds)  # the plan counts no others either
    nodes = sum(kind.count for kind in kinds)
    if nodes > SIMULATED_NODES_MAX:
        raise UsageError(f"--simulate: {nodes} nodes; at most {SIMULATED_NODES_MAX} are simulated")
    rate = plan(manifest, kinds, 1.0).tokens_per_s / manifest.model.context / manifest.inner.microbatch
    cpu_s = rate * seconds * manifest.pipeline.stages * CPU_S_PER_HOP
    if cpu_s > PATIENCE_S:
        shorter_s = max(SIMULATED_S_MIN, seconds * PATIENCE_S / cpu_s)
        notice(
            f"{rate:,.0f} microbatches a second: {seconds:g} s of them would take about {cpu_s / 60.0:.0f} min of one "
            f"processor; simulated are {min(seconds, shorter_s):.0f} s",
        )
        seconds = min(seconds, shorter_s)
    bounds = RecoveryBounds(window_s=1.0, throughput=0.0)
    state_share = min(1.0, 1e6 / max(1.0, manifest.model.layers * manifest.model.width**2))
    scenario = Scenario("plan", seconds=seconds, fleet=kinds, manifest=manifest, bounds=bounds, state_share=state_share)
    outcome = simulate(scenario, 0)
    half = [sample for sample in outcome.curve if sample.at_s >= outcome.storm.at_s / 2]
    if not half:
        raise UsageError(f"--simulate: it ended early: {(outcome.failures or ['nothing was trained'])[0][:300]}")
    first = half[0]
    last = half[-1]
    rate = (last.samples - first.samples) / max(1.0, last.at_s - first.at_s)
    return Simulated(rate * manifest.model.context, outcome.meets_every_steps(first.at_s))

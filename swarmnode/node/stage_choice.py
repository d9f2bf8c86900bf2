"""The stage that a node serves first, and after one whose text it cannot have."""

from __future__ import annotations

from swarmnode.ids import seeded
from swarmnode.membership.place import places
from swarmnode.node.node_context import NodeContext
from swarmnode.node.run_text import RunText
from swarmnode.node.stage_change import costs, living_members
from swarmnode.pipeline.believed_rate import bounded
from swarmnode.pipeline.rebalance import RebalanceRules, choose_stage


async def choose(context: NodeContext, text: RunText, asked: int | None) -> int:
    """The stage `asked` for, or the one that needs a replica most, after a look at all members of the run."""
    manifest, presence, pinger = context.manifest, context.presence, context.pinger
    await presence.look(places(manifest))
    stage, reason = asked, "asked for"
    if stage is None:
        await text.look()
        rng, pipeline = seeded(manifest.seed, "stage", context.me), manifest.pipeline
        shares, rules = costs(manifest), RebalanceRules(pipeline.rebalance_ratio, pipeline.min_keep)
        swarm = bounded(await living_members(presence, pinger, context.ports.clock, context.telemetry), shares)
        empty = [at for at in range(pipeline.stages) if not swarm.serving(at)]
        stage = context.restorer.saved.best(empty, text.unable)
        reason = "nobody serves it, and its trained state is saved here"
        if stage is None:
            stage, reason = choose_stage(swarm, shares, rules, rng, text.unable)
    context.telemetry.event("stage.chosen", serves=stage, reason=reason)
    return stage

"""The stage that a node serves first, and after one whose text it cannot have.

A node announces its choice before it downloads anything, and looks again: nodes that join at the same time see each
other's reservations and take different stages (pipeline/rebalance.py).
"""

from __future__ import annotations

import asyncio

from swarmnode.ids import seeded
from swarmnode.membership.place import places
from swarmnode.membership.swarm import Swarm
from swarmnode.node.node_context import NodeContext
from swarmnode.node.run_text import RunText
from swarmnode.node.stage_change import costs, living_members
from swarmnode.pipeline.believed_rate import bounded
from swarmnode.pipeline.rebalance import RebalanceRules, choose_stage, reserved_stage

SETTLE_S = 0.5  # guess: until the reservation of a node that joins at the same time can be read
LOOKS_MAX = 4  # guess: most see the same after one


async def choose(context: NodeContext, text: RunText, asked: int | None) -> int:
    """The stage `asked` for, or the one that needs a replica most, after a look at all members of the run."""
    manifest, presence, pinger = context.manifest, context.presence, context.pinger
    await presence.look(places(manifest))
    stage, reason = asked, "asked for"
    if stage is None:
        await text.look()
        rng, pipeline = seeded(manifest.seed, "stage", context.me), manifest.pipeline
        shares, rules = costs(manifest), RebalanceRules(pipeline.rebalance_ratio, pipeline.min_keep)
        living = await living_members(presence, pinger, context.ports.clock, context.telemetry)
        empty = [at for at in range(pipeline.stages) if not living.serving(at)]
        own = context.restorer.saved.best(empty, text.unable)
        if own is not None:
            stage, reason = own, "nobody serves it, and its trained state is saved here"
            await presence.reserve(stage)
        else:
            gone = {m.peer for m in presence.peer_table.swarm().members()} - {m.peer for m in living.members()}
            stage, reason = choose_stage(bounded(living, shares), shares, rules, rng, text.unable)
            for _ in range(LOOKS_MAX):
                before = stage
                await presence.reserve(stage)
                await asyncio.sleep(SETTLE_S)
                await presence.look(places(manifest))
                here = Swarm.of(
                    (m for m in presence.peer_table.swarm().members() if m.peer not in gone), pipeline.stages
                )
                told = bounded(here, shares), context.me, shares, rules, manifest.seed, text.unable
                stage, why = reserved_stage(*told)
                if stage == before:
                    break
                reason = why
    context.telemetry.event("stage.chosen", serves=stage, reason=reason)
    return stage

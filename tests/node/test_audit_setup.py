"""Weights that took more steps since an answer than a replica can have taken contradict its statement."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

from swarmnode.node.audit_setup import REPLAY_SPAN_S, HopReplayer
from swarmnode.node.node_ports import NodeContext
from tests.support.village import manifest


async def test_steps_since_an_answer_are_not_judged_by_a_moment_in_which_nothing_was_trained() -> None:
    """The first answer that is judged: a download on a busy machine, and no sample came meanwhile."""
    total = [1000]
    context = SimpleNamespace(
        manifest=manifest(), run_id="", ports=None, transport=None, restorer=None, presence=SimpleNamespace()
    )
    context.presence.samples_total = lambda: total[0]
    replayer = HopReplayer(cast(NodeContext, context))
    now_s = asyncio.get_running_loop().time()
    replayer._begun = (now_s - 1.0, total[0])
    assert replayer._steps_since(now_s - 1.0) > 500.0
    replayer._begun = (now_s - 2 * REPLAY_SPAN_S, total[0])
    assert replayer._steps_since(now_s - 1.0) == 0.0, "a run that stood still for so long"
    total[0] += 1000
    assert 0.0 < replayer._steps_since(now_s - 1.0) < 10_000.0

"""Decisions when a node joins. Pure: a frozen view in, (answer, reason) out."""

from __future__ import annotations

from swarmnode.ids import PeerId
from swarmnode.membership.swarm import Swarm
from swarmnode.recovery.recovery_source import donors_of

SYNC_WAIT_MAX_S = 60.0  # guess: rounds may take hours; a machine with a verified state should not idle for so long


def ready_to_serve(
    swarm: Swarm, stage: int, me: PeerId, *, received: bool, waited_s: float, round_in_s: float = 0.0
) -> tuple[bool, str]:
    """(ready, the reason): a newcomer with its state may take microbatches after a round at weight 0. It does not wait
    when no other replica serves the stage, nor when the next round, due in `round_in_s` at the earliest, is far off."""
    if received:
        return True, "received a round"
    if not donors_of(swarm, stage, me):
        return True, f"nobody else serves stage {stage}"
    if round_in_s > SYNC_WAIT_MAX_S:
        return True, f"no round comes within {round_in_s:.0f} s"
    if waited_s >= SYNC_WAIT_MAX_S:
        return True, f"no round came within {SYNC_WAIT_MAX_S:g} s"
    return False, "waiting for the first round"

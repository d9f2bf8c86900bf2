"""Decisions at the turns of a node's life. Pure: a frozen view in, (answer, reason) out."""

from __future__ import annotations

from statistics import median_low

from swarmnode.ids import PeerId, digest64
from swarmnode.membership.swarm import Swarm
from swarmnode.membership.view import rank

SLOW_SHARE = 0.5  # guess: of the median speed of a stage's replicas
SYNC_WAIT_MAX_S = 60.0  # guess: rounds may take hours; a machine with a verified state does not stand by for them


def donors_of(swarm: Swarm, stage: int, me: PeerId) -> tuple[PeerId, ...]:
    """Replicas that can give the state of `stage`, in an order of `me`'s own: by lot, but that the slower half of the
    median comes last. A copy waits for the piece of work that is being done, which a slow machine does for a minute
    (simulated: swarm48); to announce more than others do brings nobody forward."""
    serving = [member for member in swarm.serving(stage) if member.peer != me]
    if not serving:
        return ()
    enough, salt = SLOW_SHARE * median_low([member.samples_per_second for member in serving]), digest64("donors", me)
    serving.sort(key=lambda member: (member.samples_per_second < enough, rank(member.peer, salt)))
    return tuple([member.peer for member in serving])


def ready_to_serve(
    swarm: Swarm, stage: int, me: PeerId, *, received: bool, waited_s: float, round_in_s: float = 0.0
) -> tuple[bool, str]:
    """Whether a newcomer with its state may take microbatches: after a round at weight 0, or when nobody else can, or
    when the next round is not to be waited for: it comes in `round_in_s` at the earliest."""
    if received:
        return True, "received a round"
    if not donors_of(swarm, stage, me):
        return True, f"nobody else serves stage {stage}"
    if round_in_s > SYNC_WAIT_MAX_S:
        return True, f"no round comes within {round_in_s:.0f} s"
    if waited_s >= SYNC_WAIT_MAX_S:
        return True, f"no round came within {SYNC_WAIT_MAX_S:g} s"
    return False, "waiting for the first round"

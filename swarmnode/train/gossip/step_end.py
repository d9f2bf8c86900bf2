"""When a step is over in a pipeline whose stages average gradients before each step.

Step k of every stage is the set of microbatches that feeders stamped k. A feeder stamps one k after its own replica
took step k-1, so nobody needs a mean of step k while microbatches of k travel, and stages cannot wait in a circle:

    feeder        trains its share of step k; when all of it is back, tells LISTENERS of each later stage, which a hash
                  draws anew for each step, the same at all feeders, and meets its own stage
    later stage   meets, and takes step k, once a replica has heard so of all feeders; it passes that on to its mates
    microbatch    of step k+1 waits at a stage until that stage took step k: all stages work with the same weights. It
                  proves to the second stage that its feeder is through with k. A later one takes the word of the stage
                  between for that, but only after a while: so no key that a hash draws and that says nothing holds up
                  a stage

A feeder that is silent while most others are through is waited for as long as a slow member of a round, and from then
on not until it tells again: a feeder that died, or a key that only announces itself, delays one step.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Collection, Iterable

from swarmnode.base.errors import RemoteFault, Unavailable
from swarmnode.base.ids import PeerId, RunId, digest64
from swarmnode.base.ports import Call
from swarmnode.base.remembered import Remembered
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.net.membership.liveness import SMALL_CALL_S
from swarmnode.net.membership.swarm import GOSSIPING, StageContext

LISTENERS = 4  # guess: replicas of a stage that all feeders tell; one that lives and hears all of them is enough
FEW_WAIT = 4.0  # guess: where few feeders are through, so many times as long: most of them must have left


class StepEnds:
    """The steps that feeders told a replica of a later stage are over. Pure: told of calls and loop times."""

    def __init__(self) -> None:
        self._through = Remembered[PeerId, int]()  # the last step that each feeder is through with
        self._silent: dict[PeerId, int] = {}  # feeders waited for in vain, and the step in which they were
        self._waits = 0  # the step that is waited for
        self._since_s = 0.0  # loop time when a first feeder was seen to be through with it

    def heard(self, feeder: PeerId, step: int) -> None:
        """`feeder` is through with `step` and all before it."""
        if step <= self._through.get(feeder, 0):
            return
        self._through[feeder] = step
        if feeder in self._silent and step > self._silent[feeder]:
            del self._silent[feeder]

    def newest(self, feeders: Collection[PeerId]) -> int:
        """The last step that at least half of the `feeders` waited for are through with."""
        steps = sorted((self._through.get(feeder, 0) for feeder in self._awaited(feeders)), reverse=True)
        return steps[(len(steps) - 1) // 2] if steps else 0

    def wait_s(self, step: int, feeders: Collection[PeerId], patience_s: float, now_s: float) -> float:
        """Seconds until `step` is over here, whoever is silent: 0 if it is over, infinite while no feeder is through
        with it. At 0 the feeders that were waited for in vain are waited for no longer."""
        awaited = self._awaited(feeders)
        through = [feeder for feeder in awaited if self._through.get(feeder, 0) >= step]
        if not through:
            return math.inf
        if step != self._waits:
            self._waits = step
            self._since_s = now_s
        if len(through) == len(awaited):
            return 0.0
        if 2 * len(through) < len(awaited):
            patience_s *= FEW_WAIT
        left_s = max(0.0, self._since_s + patience_s - now_s)
        if left_s == 0.0:
            self._silent.update((feeder, step) for feeder in awaited if feeder not in through)
        return left_s

    def _awaited(self, feeders: Collection[PeerId]) -> list[PeerId]:
        return [feeder for feeder in feeders if feeder not in self._silent]


def listeners(run_id: RunId, stage: int, step: int, members: Iterable[PeerId]) -> list[PeerId]:
    """The `members` of a stage that feeders tell of the end of a step."""
    return sorted(members, key=lambda peer: digest64("step_end", run_id, stage, step, peer))[:LISTENERS]


async def tell_step_end(here: StageContext, step: int) -> None:
    """Tell the listeners of all later stages that this feeder is through with `step`."""
    peers = list[PeerId]()
    for stage in range(here.stage + 1, len(here.swarm().stages)):
        peers += listeners(here.run_id, stage, step, gossiping(here, stage))
    await _tell(here, step, peers)


async def pass_on_step_end(here: StageContext, step: int, but: Collection[PeerId]) -> None:
    """Tell the replicas of this stage that all feeders are through with `step`, but those that know. Where all are
    listeners, all know."""
    members = gossiping(here, here.stage)
    if len(members) > LISTENERS:
        await _tell(here, step, [peer for peer in members if peer != here.me and peer not in but])


def gossiping(here: StageContext, stage: int) -> list[PeerId]:
    """The replicas of `stage` that take part in rounds."""
    return [member.peer for member in here.swarm().stages[stage] if member.state in GOSSIPING]


async def _tell(here: StageContext, step: int, peers: Iterable[PeerId]) -> None:
    """Tell `peers` of the end of `step`. One that cannot be reached hears of it from its mates."""
    call = Call(wire.Request(run_id=here.run_id, step_end=wire.StepEnd(step=step)))

    async def tell(peer: PeerId) -> None:
        with contextlib.suppress(RemoteFault, Unavailable):
            await here.transport.call(peer, call, timeout_s=SMALL_CALL_S, reply_bytes_max=0)

    async with asyncio.TaskGroup() as tasks:
        for peer in peers:
            tasks.create_task(tell(peer))

"""The swarm as a node counts it while most strangers do not work: without keys that only announce themselves.

Records cost nothing. How many replicas a stage has decides the size of microbatches, how many are in flight, and which
node moves to which stage; an attacker who announces hundreds of keys would decide all of it. While replicas that were
never seen at work answer when they are tried, records are believed as they are. Else, of the stages at whose work a
node looks, those replicas count that it has seen at work, and no other stage counts more than the largest of these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from swarmnode.ids import PeerId
from swarmnode.membership.swarm import Member, Swarm


class BelievedSwarm:
    """Makes `Swarm` views of the members that count."""

    def __init__(
        self, me: PeerId, seen: Collection[PeerId], strangers_work: Callable[[], Iterable[bool]], *, stages: int
    ) -> None:
        """`seen`: peers seen at work here. `strangers_work` tells of each kind of work in which strangers are tried
        whether most of them do it."""
        self._me = me
        self._seen = seen
        self._strangers_work = strangers_work
        self._stages = stages
        self._last: tuple[Swarm, int, Swarm] | None = None  # of which view, with how many seen at work: the answer

    @property
    def doubtful(self) -> bool:
        """Whether most strangers that were tried did nothing."""
        return not all(self._strangers_work())

    def of(self, swarm: Swarm, own: int | None, sends_to: Collection[int]) -> Swarm:
        """The view of `swarm` for a node of stage `own` that sends microbatches to the stages `sends_to`. It sees the
        work of these, of its own stage, and of the one before; without a stage, that of the first."""
        if not self.doubtful:
            return swarm
        if self._last is None or self._last[0] is not swarm or self._last[1] != len(self._seen):
            self._last = swarm, len(self._seen), self._of(swarm, own, sends_to)
        return self._last[2]

    def _of(self, swarm: Swarm, own: int | None, sends_to: Collection[int]) -> Swarm:
        looks_at = {*sends_to, *((own - 1, own) if own is not None and own < self._stages else (0,))}
        known = [self._known(members) if stage in looks_at else () for stage, members in enumerate(swarm.stages)]
        most = max(map(len, known))
        stages = [
            found or (members if stage in looks_at or not most else members[:most])
            for stage, (found, members) in enumerate(zip(known, swarm.stages, strict=True))
        ]
        return Swarm.frozen(
            stages, without_stage=self._known(swarm.without_stage) or swarm.without_stage[: most or None]
        )

    def _known(self, members: Sequence[Member]) -> tuple[Member, ...]:
        return tuple([member for member in members if member.peer == self._me or member.peer in self._seen])

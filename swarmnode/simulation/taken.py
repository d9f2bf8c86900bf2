"""What a machine that is taken away has in work and has not passed on yet, and how much of it is brought home."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarmnode.node.node import Node
    from swarmnode.simulation.inhabitant import Inhabitant


@dataclass(frozen=True, slots=True)
class Taken:
    """At the moment it was told: microbatches held, samples learnt since its last round."""

    notice_s: float
    node: Node | None
    held: int
    unsent: int

    @classmethod
    def of(cls, person: Inhabitant, notice_s: float) -> Taken:
        parts = person.node._parts() if person.node is not None and person.alive else None
        if parts is None:
            return cls(notice_s, None, 0, 0)
        return cls(notice_s, person.node, parts.held(), parts.gossip.unsent)

    @property
    def finished(self) -> int:
        """Of `held`, by the end."""
        farewell = self.node.farewell if self.node is not None else None
        return 0 if farewell is None else self.held - max(0, min(self.held, farewell.held - farewell.finished))

    @property
    def sent(self) -> int:
        """Of `unsent`, by the end: in a round that came meanwhile, or as a bequest."""
        farewell = self.node.farewell if self.node is not None else None
        return 0 if farewell is None else self.unsent - min(self.unsent, farewell.unsent - farewell.sent)

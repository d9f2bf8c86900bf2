"""Work at risk on a preempted machine, and how much of it is saved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarmnode.train.node.span import PartNode
    from swarmsim.sim_node import SimNode


@dataclass(frozen=True, slots=True)
class PreemptionRecord:
    """State at the moment of the notice: microbatches held, and samples learnt since the last round."""

    notice_s: float
    node: PartNode | None
    held: int
    unsent: int

    @classmethod
    def of(cls, sim_node: SimNode, notice_s: float) -> list[PreemptionRecord]:
        """A record for each stage that the machine serves; one of nothing where it serves none."""
        served = [(node, node.served) for node in sim_node.nodes if sim_node.alive]
        found = [
            cls(notice_s, node, here.held_work.held, here.gossip.unsent) for node, here in served if here is not None
        ]
        return found or [cls(notice_s, None, 0, 0)]

    @property
    def finished(self) -> int:
        """Number of `held` microbatches finished by the end."""
        drain_report = self.node.drain_report if self.node is not None else None
        return (
            0 if drain_report is None else self.held - max(0, min(self.held, drain_report.held - drain_report.finished))
        )

    @property
    def sent(self) -> int:
        """Number of `unsent` samples passed on by the end, in a round or as a final delta."""
        drain_report = self.node.drain_report if self.node is not None else None
        return 0 if drain_report is None else self.unsent - min(self.unsent, drain_report.unsent - drain_report.sent)

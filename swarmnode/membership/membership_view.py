"""Membership as other parts of a node see it: the port that the node's presence implements."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from swarmnode.ids import PeerId
from swarmnode.membership.peer_table import PeerTable
from swarmnode.membership.progress import Progress
from swarmnode.membership.run_progress import RunProgress


class MembershipView(Protocol):
    """A node's knowledge of the swarm and of the run's progress. `look` refreshes it."""

    @property
    def me(self) -> PeerId: ...

    @property
    def peer_table(self) -> PeerTable: ...

    @property
    def progress(self) -> Progress: ...

    @property
    def run_progress(self) -> RunProgress: ...

    async def look(self, stages: Iterable[int]) -> None:
        """Read the directory's records of `stages` once."""
        ...

    async def claimed(self) -> int:
        """Samples of the run that the directory's meeting points remember."""
        ...

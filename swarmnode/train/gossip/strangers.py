"""Replicas that were never met are kept out of most rounds, while most of those that a round is tried with do not come.

Keys cost nothing: an attacker can announce hundreds of replicas that are none, and then nearly every honest replica
draws one of them as its partner, and averages with nobody. While most of the strangers that were tried came, they are
partners like all others. Else only rounds that a hash names, one in OPEN_EVERY, are open to them: all replicas name the
same ones, and in the others those that have met before meet each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from swarmnode.base.ids import PeerId, RunId, digest64
from swarmnode.base.remembered import Remembered
from swarmnode.net.membership.trust import SHARE, Trials

OPEN_EVERY = round(1.0 / SHARE)  # a newcomer waits for so many rounds beside a flood, and has its share of them


class Strangers:
    """The record of one replica on those it had never met when a round was tried with them."""

    def __init__(self, run_id: RunId, stage: int, met: Callable[[PeerId], int]) -> None:
        """`met`: packets of a replica that were taken here."""
        self._run_id = run_id
        self._stage = stage
        self._met = met
        self._came = Trials()
        self._vain = Remembered[PeerId, None]()  # those that were tried in vain

    def among(self, members: Iterable[PeerId]) -> list[PeerId]:
        """The `members` that were never met."""
        return [peer for peer in members if not self._met(peer)]

    def record_try(self, came: bool, peer: PeerId | None = None) -> None:
        """Note whether a packet of a partner, `peer`, that was never met before `came`."""
        self._came.add(came)
        if not came and peer is not None:
            self._vain[peer] = None

    def proven(self, peer: PeerId) -> bool:
        """Whether many strangers were tried, most of them came, and `peer` was not tried in vain."""
        return self._came.enough and self.come and peer not in self._vain

    @property
    def come(self) -> bool:
        """Whether most of those that were tried lately came."""
        return not self._came.mostly_vain

    def kept_out(self, members: Sequence[PeerId], me: PeerId) -> set[PeerId]:
        """The `members` that only open rounds take: nobody while strangers come, or while none but strangers is
        known."""
        if self.come:
            return set()
        others = {*members} - {me}
        strangers = {*self.among(others)}
        return strangers if strangers != others else set()

    def is_open(self, round_index: int) -> bool:
        """Whether strangers meet in this round in any case. By hash, so that each stride meets in open and others."""
        return digest64("open", self._run_id, self._stage, round_index) % OPEN_EVERY == 0

"""The share of choices for replicas that never answered.

Keys cost nothing, so an attacker can announce thousands of replicas that are none. Each would get a microbatch, which
is late then. While most of the unknown replicas that were tried answered, there is no limit. Else they get a small
share of the choices together, however many they are: the smaller, the fewer of them answer, and the longer a choice
waits in vain. A try that takes ten times as long as an answer is made a tenth as often, so that the time lost does not
depend on how slowly an attacker refuses.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swarmnode.ema import Ema, EmaStart
from swarmnode.ids import PeerId

MOSTLY = 0.5  # guess: no limit while so many of about the last ten answered
FLOOD = 8  # guess: of so many tries most were in vain; one newcomer with a bad line is no flood
SHARE, SHARE_LEAST = 0.25, 1.0 / 64.0  # guess: of choices, times the share that answered; and at least


@dataclass(slots=True)
class UnknownPeers:
    """The replicas of a stage that never answered, and how those fared that were tried."""

    peers: dict[PeerId, None] = field(default_factory=dict)
    _answered: Ema = field(default_factory=lambda: Ema(start=EmaStart.MEAN))
    _lost_s: Ema = field(default_factory=lambda: Ema(start=EmaStart.MEAN))  # by a choice in vain
    _vain: int = 0  # requests refused since any replica of the stage answered
    _vain_since_s: float = 0.0  # loop time of the first of these

    def enter(self, peer: PeerId) -> None:
        """Note a replica that is new here."""
        self.peers[peer] = None

    def forget(self, peer: PeerId) -> None:
        """Note that `peer` is gone."""
        self.peers.pop(peer, None)

    def answered(self, peer: PeerId) -> None:
        """Note an answer of `peer`, which is known from now on."""
        self._vain = 0
        if peer in self.peers:
            del self.peers[peer]
            self._answered.add(1.0)

    def failed(self, peer: PeerId, lost_s: float = 0.0) -> None:
        """Note a fault of `peer`, which cost `lost_s`."""
        if peer in self.peers:
            self._answered.add(0.0)
            self._lost_s.add(lost_s)

    def refused(self, now: float) -> None:
        """Note at loop time `now` that a replica of the stage refused a request, for whatever reason."""
        self._vain_since_s = self._vain_since_s if self._vain else now
        self._vain += 1

    def in_vain(self, now: float, least_s: float) -> bool:
        """Whether many requests were refused and none answered, for `least_s` at least."""
        return self._vain >= FLOOD and now - self._vain_since_s >= least_s

    @property
    def flooded(self) -> bool:
        """Whether most of many that were tried did not answer."""
        return bool(self.peers) and self._answered.count >= FLOOD and self._answered.value < MOSTLY

    def share(self, usual_s: float) -> float:
        """The share of choices that unknown replicas may have, where an answer takes `usual_s`; 0: not known yet."""
        found = self._answered.value if self._answered.known else 1.0
        if not self.peers or found >= MOSTLY:
            return 1.0
        share, lost_s = max(SHARE_LEAST, SHARE * found), self._lost_s.value
        return share * usual_s / lost_s if lost_s > usual_s > 0.0 else share

"""The outer step of a round: with the packets of its partners or, where none of them is believed, with the packet of
another replica (fallback_partner.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from swarmnode.base.errors import PeerTimeout, RemoteFault, Unavailable
from swarmnode.base.ids import PeerId, short
from swarmnode.base.metrics import name
from swarmnode.base.ports import EQUAL, OuterReport, Packet, Priority
from swarmnode.net.membership.swarm import StageContext
from swarmnode.train.gossip.acceptance import Acceptance
from swarmnode.train.gossip.fallback_partner import FallbackPartner
from swarmnode.train.gossip.outgoing_packet import OutgoingPacket


@dataclass(frozen=True, slots=True)
class OuterStepResult:
    """The end of a round: the replicas averaged with, what the outer step did, and why that was not as planned."""

    met: Sequence[PeerId]
    report: OuterReport
    reason: str
    fallback: bool = False  # `met` gave its packet and got none in return

    def count_believed(self, came: int) -> int:
        """Replicas whose packets were believed, of those whose packets `came` or of the one that stood in. This
        replica's own packet, sent back, is none."""
        mine = self.report.verdicts[: 1 if self.fallback else came]
        return sum(verdict.keep > 0.0 and verdict.reason != EQUAL for verdict in mine)

    @property
    def is_far(self) -> bool:
        """Whether of the way to each packet that was believed less than half was taken."""
        return self.report.believed and all(verdict.keep < 0.5 for verdict in self.report.verdicts)

    def fields(self) -> dict[str, Any]:
        """The fields of the event that reports the round."""
        facts: dict[str, Any] = {"peer": self.met[0] if self.met else None, "reason": self.reason}
        if self.fallback:
            facts["fallback"] = True
        report = self.report
        return facts | {"delta_norm": report.delta_norm, "step_norm": report.step_norm, "apart": report.apart}


@dataclass(frozen=True, slots=True)
class OuterStep:
    """Takes one replica's outer steps. Verdicts on packets are signed in the tasks of its rounds."""

    here: StageContext
    acceptance: Acceptance
    fallback: FallbackPartner

    async def take(
        self,
        tasks: asyncio.TaskGroup,
        ours: OutgoingPacket,
        came: dict[PeerId, Packet],
        final_deltas: Sequence[Packet],
        to_ask: Callable[[], Sequence[PeerId]] | None,
        within_s: float,
        reason: str,
        *,
        others_here: bool,
    ) -> OuterStepResult:
        """The outer step of the round whose boundary is marked, with the packets that `came` and `final_deltas`.

        `to_ask`: the replicas to ask for a packet, within `within_s` seconds, if none of these is believed; None: there
        are none. `reason`: what was planned for the round. `others_here`: the stage has other replicas."""
        packets = [*came.values(), *final_deltas]
        weight = 0.0 if others_here and not packets else ours.weight
        met = list[PeerId]()
        if packets or to_ask is None:
            report, reason = await self._apply(ours, weight, packets, reason, lone=to_ask is None)
            met = self.acceptance.judged(tasks, ours.round_index, came, report)
            self.acceptance.record_final_deltas(final_deltas, report.verdicts[len(came) :], ours.round_index)
            if report.believed or to_ask is None:
                return OuterStepResult(met, report, reason)
        if not met:  # a newcomer has nothing to give, and is a partner nevertheless
            end_s = asyncio.get_running_loop().time() + within_s
            for peer in to_ask():
                packet = await self._asked(peer, ours, end_s, reason)
                if packet is None:
                    continue
                report, reason = await self._apply(ours, ours.weight, [packet], reason, lone=False)
                self.acceptance.judged(tasks, ours.round_index, {peer: packet}, report)
                self.here.telemetry.count(name.FALLBACK_PACKETS, outcome="taken" if report.believed else "refused")
                if report.believed:
                    return OuterStepResult([peer], report, f"{short(peer)} stood in: {reason}", fallback=True)
        report, _ = await self._apply(ours, weight, [], reason)
        return OuterStepResult(met, report, reason)

    async def _asked(self, peer: PeerId, ours: OutgoingPacket, end_s: float, reason: str) -> Packet | None:
        """The packet that `peer` gives before the loop's time `end_s`, or None."""
        left_s = end_s - asyncio.get_running_loop().time()
        if left_s <= 0.0:
            return None
        try:
            packet = await self.fallback.ask(peer, ours.round_index, ours.nbytes, left_s)
        except (RemoteFault, Unavailable) as error:
            why = f"no answer within {left_s:.3g} s" if isinstance(error, PeerTimeout) else str(error)
            self.here.telemetry.count(name.FALLBACK_PACKETS, outcome="none")
            self.here.telemetry.event("exchange.fallback", round=ours.round_index, peer=peer, given=False, reason=why)
            return None
        self.here.telemetry.event("exchange.fallback", round=ours.round_index, peer=peer, given=True, reason=reason)
        return packet

    async def _apply(
        self, ours: OutgoingPacket, weight: float, packets: Sequence[Packet], reason: str, *, lone: bool = True
    ) -> tuple[OuterReport, str]:
        """(the report of the outer step; why the last packet was refused, `reason` where none was)."""
        step = partial(self.here.replica.apply_in_parts, ours.round_index, weight, packets, lone=lone)
        report = await self.here.compute.run(Priority.OUTER, 0, step)
        for verdict in report.verdicts:
            if verdict.keep == 0.0:
                reason = f"packet refused ({verdict.step}): {verdict.reason}"
        return report, reason

"""The outer step with what came of a round's partners, or, where none of that is believed, with what another replica
has to give (standin.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from swarmnode.errors import PeerTimeout, RemoteFault, Unavailable
from swarmnode.gossip.acceptance import Acceptance
from swarmnode.gossip.calling import Message
from swarmnode.gossip.standin import StandIns
from swarmnode.ids import PeerId, short
from swarmnode.metrics import name
from swarmnode.ports import Compute, OuterReport, Packet, Priority, Replica, Telemetry


@dataclass(frozen=True, slots=True)
class Took:
    """Of one round: whom it was with, what the outer step did, and why it was not as planned."""

    met: Sequence[PeerId]
    report: OuterReport
    reason: str
    standin: bool = False  # `met` gave its packet, and got none

    def fields(self) -> dict[str, Any]:
        """Of the event that says how the round ended."""
        found: dict[str, Any] = {"peer": self.met[0] if self.met else None, "reason": self.reason}
        if self.standin:
            found["standin"] = True
        report = self.report
        return found | {"delta_norm": report.delta_norm, "step_norm": report.step_norm, "apart": report.apart}


@dataclass(frozen=True, slots=True)
class Taking:
    """One replica's outer steps. Verdicts are signed in the tasks of its rounds."""

    replica: Replica
    compute: Compute
    acceptance: Acceptance
    standins: StandIns
    telemetry: Telemetry

    async def take(
        self,
        tasks: asyncio.TaskGroup,
        ours: Message,
        came: dict[PeerId, Packet],
        bequests: Sequence[Packet],
        to_ask: Callable[[], Sequence[PeerId]] | None,
        within_s: float,
        reason: str,
        *,
        others_here: bool,
    ) -> Took:
        """The outer step of the round whose boundary is marked; `to_ask` tells who may stand in, within so many
        seconds (None: nobody), `reason` is what the round was to be."""
        packets = [*came.values(), *bequests]
        weight, met = 0.0 if others_here and not packets else ours.weight, list[PeerId]()
        if packets or to_ask is None:
            report, reason = await self._apply(ours, weight, packets, reason, lone=to_ask is None)
            met = self.acceptance.judged(tasks, ours.round_index, came, report)
            if report.believed or to_ask is None:
                return Took(met, report, reason)
        if not met:  # a newcomer has nothing to give, and is a partner nevertheless
            end_s = asyncio.get_running_loop().time() + within_s
            for peer in to_ask():
                packet = await self._asked(peer, ours, end_s, reason)
                if packet is None:
                    continue
                report, reason = await self._apply(ours, ours.weight, [packet], reason, lone=False)
                self.acceptance.judged(tasks, ours.round_index, {peer: packet}, report)
                self.telemetry.count(name.STAND_INS, outcome="taken" if report.believed else "refused")
                if report.believed:
                    return Took([peer], report, f"{short(peer)} stood in: {reason}", standin=True)
        report, _ = await self._apply(ours, weight, [], reason)
        return Took(met, report, reason)

    async def _asked(self, peer: PeerId, ours: Message, end_s: float, reason: str) -> Packet | None:
        """The packet of `peer`, if it gives one before the loop's `end_s`."""
        left_s = end_s - asyncio.get_running_loop().time()
        if left_s <= 0.0:
            return None
        try:
            packet = await self.standins.ask(peer, ours.round_index, ours.nbytes, left_s)
        except (RemoteFault, Unavailable) as error:
            why = f"no answer within {left_s:.3g} s" if isinstance(error, PeerTimeout) else str(error)
            self.telemetry.count(name.STAND_INS, outcome="none")
            self.telemetry.event("exchange.standin", round=ours.round_index, peer=peer, given=False, reason=why)
            return None
        self.telemetry.event("exchange.standin", round=ours.round_index, peer=peer, given=True, reason=reason)
        return packet

    async def _apply(
        self, ours: Message, weight: float, packets: Sequence[Packet], reason: str, *, lone: bool = True
    ) -> tuple[OuterReport, str]:
        """(the outer step's report; the reason, or that of the last packet refused)."""
        step = partial(self.replica.apply, ours.round_index, weight, packets, lone=lone)
        report = await self.compute.run(Priority.OUTER, 0, step)
        for verdict in report.verdicts:
            if verdict.keep == 0.0:
                reason = f"packet refused ({verdict.step}): {verdict.reason}"
        if report.probed is not None:
            refused = any(verdict.step == "loss" for verdict in report.verdicts)
            self.telemetry.count(name.LOSS_PROBES, outcome="refused" if refused else "kept")
            self.telemetry.event("exchange.probed", round=ours.round_index, change=report.probed, refused=refused)
        return report, reason

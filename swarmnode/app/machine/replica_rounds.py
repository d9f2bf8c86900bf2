"""The rounds of a replica: its packet, and the outer step with the packets of others, which moves fast weights, too."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from swarmnode.app.machine.memory_retry import MemoryRetry
from swarmnode.base.parted_work import Parts, run_whole
from swarmnode.base.ports import Data, OuterReport, Packet, StreamingMessage
from swarmnode.model.stage import StageReplica
from swarmnode.train.gossip.outer import Outer


class ReplicaRounds:
    """Drafts and steps of `outer`, whose fast weights are those of `stage`."""

    def __init__(self, stage: StageReplica, outer: Outer, retry: MemoryRetry) -> None:
        self._stage = stage
        self._outer = outer
        self._retry = retry

    def draft(self, round_index: int) -> StreamingMessage:
        """The packet of `round_index`, whose boundary is marked, before it is written."""
        if self._outer.steps_early:
            self._before_step()
        draft = self._retry.in_round(lambda: self._outer.draft(round_index))
        return draft.written_beside() if self._outer.splits else draft

    def apply(self, round_index: int, own_weight: float, packets: Sequence[Packet], *, lone: bool) -> OuterReport:
        """The outer step with `packets`, all of it at once."""
        if self._outer.splits:
            return run_whole(self.apply_in_parts(round_index, own_weight, packets, lone=lone))
        self._before_step()
        report = self._retry.in_round(lambda: self._outer.apply(round_index, own_weight, packets, lone=lone))
        if lone or report.believed:
            self._hold()
        return report

    def apply_in_parts(
        self, round_index: int, own_weight: float, packets: Sequence[Packet], *, lone: bool
    ) -> Parts[OuterReport]:
        """The outer step with `packets` where slow weights are beside the device: they step there, fast ones follow."""
        outer = self._outer
        self._retry.in_round(partial(outer.prepare, packets))

        def slow() -> OuterReport:
            report = outer.apply_slow(round_index, own_weight, packets, lone=lone)
            if lone or report.believed:
                self._stage.hold(outer.phi)
            return report

        report: OuterReport = yield from self._retry.beside(slow)
        if lone or report.believed:
            self._before_step()
            self._retry.in_round(outer.follow)
            self._retry.in_round(lambda: self._stage.hold(outer.theta))
        return report

    def apply_pieces(
        self, round_index: int, means: Sequence[Data | None], taken: Sequence[bool], final_deltas: Sequence[Packet]
    ) -> OuterReport:
        """The outer step by the `means` of pieces."""
        self._before_step()
        report = self._retry.in_round(lambda: self._outer.in_pieces.apply(round_index, means, taken, final_deltas))
        self._hold()
        return report

    def _before_step(self) -> None:
        """Tapes keep the fast weights as they are now."""
        self._stage.stash.before_step(inner=False)

    def _hold(self) -> None:
        # Coding errors of packets lie partly outside the subspace. The step is linear: this projects each packet.
        self._retry.in_round(lambda: self._stage.hold(self._outer.theta, self._outer.phi))

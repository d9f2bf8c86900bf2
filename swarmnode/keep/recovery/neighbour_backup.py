"""Backups in a ring: a few nodes of each stage keep the latest state of the next stage, the last stage's of the first.

A stage whose replicas all die at once is restored from its backup instead of rebuilt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

from swarmnode.base.errors import RemoteFault, Unavailable
from swarmnode.base.ids import PeerId, RunId, digest64, rank, short, stage_name
from swarmnode.base.ports import Answer, Call, State
from swarmnode.base.wire import call_pb2
from swarmnode.keep.recovery.recovery_source import keeps
from swarmnode.keep.recovery.renewal import RenewalTimer
from swarmnode.keep.recovery.state_fetcher import StateFetcher
from swarmnode.keep.transfer.donor import DonorLimits
from swarmnode.keep.transfer.download import DownloadLimits
from swarmnode.keep.transfer.snapshot import SLOW, WHOLE, Snapshot, StateSlice
from swarmnode.keep.transfer.state_slices import ROUNDS_APART_MAX, drawn_now, slices_of
from swarmnode.model.section import Sizes, snapshot_nbytes
from swarmnode.net.membership.progress import Progress
from swarmnode.net.membership.run_progress import MembershipView
from swarmnode.net.membership.swarm import GIVING, StageContext, Swarm
from swarmnode.run.manifest import RecoverySpec
from swarmnode.run.manifest.gossip_compat import meets

GENTLE = DownloadLimits(attempts_max=2, parallel=1, sources=1, pause_s=1.0, rest=3.0, busy_max_s=0.0, waited_for=False)
"""For renewals, which no node waits for: one chunk at a time on a quarter of the line, none from busy donors. Guess."""

# As state_check.APART_MAX, between a state and the one kept, which is up to ROUNDS_APART_MAX rounds older. Measured
# once: .77 in the first rounds of the tiny preset, whose weights move most then.
KEPT_APART_MAX = 0.9
RETRY_MAX_S = DonorLimits().retry_max_s  # between two tries while all donors are busy with newcomers

URGENT = DownloadLimits(attempts_max=3, pause_s=0.1, busy_max_s=0.0)
"""For handovers: the donor is about to leave. Guess."""


def to_keep(bytes_max: int, sizes: Sizes, ends: tuple[int, int]) -> tuple[StateSlice | None, str]:
    """The part of a stage of `sizes` elements that fits a backup of `bytes_max`, None for nothing, and why.

    It is all of the stage, or, of a first or last stage, the slow weights of its embedding or head (`ends`: first
    element, count), which no neighbour has. Every node decides alike.
    """
    first, count = ends
    whole = snapshot_nbytes(sizes)
    least = snapshot_nbytes(dict.fromkeys(SLOW.sections, count))
    if whole <= bytes_max:
        return WHOLE, f"all {whole} bytes of it"
    if count and least <= bytes_max:
        return StateSlice(
            SLOW.sections, first, count
        ), f"{least} bytes of embedding or head; all of it would be {whole}"
    return None, f"nothing: {least if count else whole} bytes are more than the {bytes_max} that a node keeps"


def renewal(
    swarm: Swarm,
    stage: int,
    me: PeerId,
    run_id: RunId,
    spec: RecoverySpec,
    round_now: int,
    works: Callable[[PeerId], bool] = lambda peer: True,
) -> tuple[bool, str]:
    """Whether `me` should keep the state of `stage` now, and why (not). `works`: whether a peer was seen at work."""
    if round_now == 0:
        return False, "the run has not finished a round"
    if not keeps(swarm, stage, run_id, spec.keepers, me, works):
        return False, f"others keep {stage_name(stage)}"
    if not any(member.peer != me for member in swarm.serving(stage)):
        return False, f"nobody serves {stage_name(stage)}"
    return True, f"it is kept here and by {spec.keepers - 1} more"


class NeighbourBackup:
    """A node's backup of the stage after its own, renewed as often as its line carries it (renewal.py)."""

    def __init__(self, here: StageContext, membership: MembershipView) -> None:
        manifest = here.manifest
        replica = here.replica
        self._here = here
        self._membership = membership
        self._apart = replica.apart
        self._spec = manifest.recovery
        self._diverging = not meets(manifest.gossip)  # replicas that never meet differ without a fault
        self._period_s = manifest.limits.announce_period_s
        self.stage = (here.stage + 1) % manifest.pipeline.stages
        self._alone = manifest.pipeline.stages == 1
        self._round_samples = manifest.gossip.round_samples
        self._sizes = replica.sizes_of(self.stage)
        self._cut, self._reason = to_keep(self._spec.snapshot_bytes_max, self._sizes, replica.ends_of(self.stage))
        self._fetcher = StateFetcher(here, membership, replica)
        self.snapshot: Snapshot | None = None  # what is kept
        self._timer = RenewalTimer(self._spec)
        self._held = False  # while this node is paused: nothing is downloaded

    def hold(self, held: bool) -> None:
        """Download nothing while `held`, because this node is paused."""
        self._held = held

    def kept(self, stage: int) -> Snapshot | None:
        """The snapshot kept of `stage`, None without one."""
        return self.snapshot if stage == self.stage else None

    @property
    def kept_round(self) -> int | None:
        """The round of the snapshot kept, for this node's record."""
        return None if self.snapshot is None else self.snapshot.round_index

    async def run(self) -> None:
        """Renew the backup when it is due, until cancelled. Returns at once when this run keeps none."""
        if self._cut is None or self._spec.keepers == 0 or self._alone:
            self._here.telemetry.event("recovery.kept", of_stage=self.stage, nbytes=0, reason=self._reason)
            return
        pause_s = self._period_s
        while True:
            due, reason = self._due()
            failed = due and not self._held and not await self._renew(self._cut, reason)
            pause_s = max(self._period_s, min(2.0 * pause_s, RETRY_MAX_S)) if failed else self._period_s
            await asyncio.sleep(pause_s)

    def _due(self) -> tuple[bool, str]:
        me = self._here.me
        total = self._membership.progress.total
        works = self._membership.run_progress.clock.history.at_work.__contains__
        round_now = total // self._round_samples
        # Replicas that never meet cannot be told from keys: all count.
        known = (lambda peer: True) if self._diverging else works
        keeps, why = renewal(self._here.swarm(), self.stage, me, self._here.run_id, self._spec, round_now, known)
        return self._timer.due(asyncio.get_running_loop().time(), total) if keeps else (False, why)

    async def inherit(self, peer: PeerId, call: Call) -> Answer:
        """Handler of "handover": keep the state of `peer`, the last replica of the next stage, which leaves.

        Returns when the state is here. Raises Unavailable when states are not kept whole here, RemoteFault for a peer
        that does not serve that stage, or whose state is far from the one kept.
        """
        request = call.header.handover
        if request.stage != self.stage:
            raise RemoteFault(f"handover of {stage_name(request.stage)}; {stage_name(self.stage)} is kept here")
        if self._cut != WHOLE or self._alone:
            raise Unavailable(f"of {stage_name(self.stage)} is kept {self._reason}")
        swarm = self._here.swarm()
        giver = next((m for m in swarm.stages[self.stage] if m.peer == peer and m.state in GIVING), None)
        if giver is None:
            raise RemoteFault(f"handover by {short(peer)}, who does not serve {stage_name(self.stage)}")
        # A last stage keeps the first one, and knows its replicas by their records only.
        if self.stage and peer not in self._membership.run_progress.clock.history.at_work:
            raise RemoteFault(f"handover by {short(peer)}, who was never seen at work")
        offer = await self._fetch(WHOLE, [peer], URGENT, "its last replica leaves")
        return Answer(call_pb2.Reply(handed=call_pb2.Handed(round=offer.round)))

    async def _renew(self, cut: StateSlice, reason: str) -> bool:
        """Fetch the part `cut` anew. Returns whether that worked."""
        salt = digest64("renewal", self._here.me)
        donors = sorted(self._serving(), key=lambda peer: rank(peer, salt))
        try:
            await self._fetch(cut, donors, GENTLE, reason)
        except Unavailable as error:
            self._here.telemetry.event(
                "recovery.kept", level="warning", of_stage=self.stage, nbytes=0, reason=str(error)
            )
            return False
        return True

    def _serving(self) -> list[PeerId]:
        return [member.peer for member in self._here.swarm().serving(self.stage)]

    async def _compare(self, state: State, offer: call_pb2.Snapshot, givers: Collection[PeerId]) -> None:
        """Raise RemoteFault for a state that other replicas contradict.

        Where none of them can say, a state far from the one kept is refused.
        """
        if self._diverging:
            return
        check = self._fetcher.judge(self.stage, self._serving)
        if check is None:
            return
        words = await check.compare(state, offer, givers)
        if words or self.snapshot is None or offer.round - self.snapshot.round_index > ROUNDS_APART_MAX:
            return
        at = drawn_now(self._sizes["phi"], self._here.me, offer.id.hex())
        far = self._apart(slices_of(state.sections["phi"], at), slices_of(self.snapshot.state.sections["phi"], at))
        if far > KEPT_APART_MAX:
            raise RemoteFault(f"slow weights {far:.3g} of their length from those kept here, and nobody confirms them")

    async def _fetch(
        self, cut: StateSlice, donors: Sequence[PeerId], limits: DownloadLimits, reason: str
    ) -> call_pb2.Snapshot:
        now_s = asyncio.get_running_loop().time
        begun = now_s()
        client = self._fetcher.client(self.stage, limits, cut=cut)
        compare = self._compare if cut == WHOLE else None
        state, offer = await self._fetcher.download(client, lambda: donors, compare)
        kept = self.snapshot
        samples = Progress.from_wire(offer.progress).total
        if kept is None or samples >= kept.samples:  # a handover may have come while this was on its way
            self.snapshot = Snapshot.of_offer(offer, state, cut.first)
            line_s = (now_s() - begun) / (1.0 + limits.rest)
            self._timer.made(now_s(), samples, line_s * self._spec.keepers / self._spec.snapshot_share)
        self._here.telemetry.event(
            "recovery.kept",
            level="info" if kept is None or limits is URGENT else "debug",
            of_stage=self.stage,
            round=offer.round,
            nbytes=offer.nbytes,
            seconds=round(now_s() - begun, 3),
            reason=reason,
        )
        return offer

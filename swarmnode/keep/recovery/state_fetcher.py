"""Fetch states of stages for one replica: from peers, judged by other peers, or from a copy in this node's memory.

A restore, a move to another stage and a neighbour's backup fetch in this one way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from swarmnode.base.bounds import STAGES_MAX
from swarmnode.base.concurrency import gather_or_cancel
from swarmnode.base.errors import RemoteFault, Unavailable
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.ports import Replica, State, Telemetry, Transport
from swarmnode.base.wire import access_pb2
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.keep.recovery.recovery_source import donors_of
from swarmnode.keep.transfer.download import Accept, Compare, DonorClient, DownloadLimits
from swarmnode.keep.transfer.snapshot import SLOW, WHOLE, Snapshot, StateSlice, newcomer_part
from swarmnode.model.section import Sizes, section_sizes
from swarmnode.model.split import stages_of
from swarmnode.net.membership.judge import judges
from swarmnode.net.membership.run_progress import SLACK_ROUNDS, MembershipView
from swarmnode.run.manifest import Manifest
from swarmnode.run.manifest.gossip_compat import meets

FIRST_ROUNDS = SLACK_ROUNDS  # of the run, in which a replica may not have done its first
BACKUP_LIMITS = DownloadLimits(sources=1)  # backups of different keepers are of rounds far apart

Peers = Callable[[], Sequence[PeerId]]
"""Peers as they are known now, best first."""


class StateJudge(Protocol):
    """Here is a state: who confirms it? `totals` are the sample counts told by peers that confirmed the last."""

    totals: list[int]

    async def compare(self, state: State, offer: wire.Snapshot, givers: Collection[PeerId]) -> Sequence[object]:
        """Samples of peers that confirm the state that `givers` gave. Raises RemoteFault where others contradict it."""
        ...


class Surroundings(Protocol):
    """The parts of a node that fetching uses: a RestoreContext, a StageContext and a NodeContext have them."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def run_id(self) -> RunId: ...

    @property
    def transport(self) -> Transport: ...

    @property
    def telemetry(self) -> Telemetry: ...


@dataclass(slots=True)
class StateFetcher:
    """Fetches states of any stage for `replica`, and counts the bytes `received`. A stage number from STAGES_MAX on is
    of `earlier`, the manifest by which the stages were cut before."""

    here: Surroundings
    membership: MembershipView
    replica: Replica
    earlier: Manifest | None = None
    received: int = 0

    def client(
        self, stage: int, limits: DownloadLimits | None = None, round_min: int = 0, cut: StateSlice = WHOLE
    ) -> DonorClient:
        """Asks peers for the part `cut` of the state of `stage`, of round `round_min` or later."""
        here = self.here
        progress = self.membership.run_progress
        return DonorClient(
            here.transport,
            here.run_id,
            stage,
            self._sizes(stage),
            here.telemetry,
            lambda: progress.rounds_max,
            limits or DownloadLimits(),
            cut,
            round_min,
        )

    def judge(
        self, stage: int, others: Peers = tuple, keepers: Peers = tuple, within: StateSlice = SLOW
    ) -> StateJudge | None:
        """A check of states of `stage` by replicas, `others`, and by `keepers` of snapshots. None where nobody is
        judged, and where replicas never meet: they differ without a fault."""
        manifest = self.here.manifest
        if not judges(manifest) or not meets(manifest.gossip):
            return None
        from swarmnode.keep.recovery.state_check import StateCheck  # a run whose members trust each other has none

        return StateCheck(self.client(stage), others, self.replica.apart, keepers=keepers, within=within)

    def replicas(self, stage: int, first: Collection[PeerId] = ()) -> Peers:
        """Replicas that can give the state of `stage`. Those in `first` come first: they answered a moment ago."""

        def known() -> Sequence[PeerId]:
            now = donors_of(self.membership.peer_table.swarm(), stage, self.membership.me)
            return [peer for peer in now if peer in first] + [peer for peer in now if peer not in first]

        return known

    async def download(
        self, client: DonorClient, donors: Peers, compare: Compare | None = None, accept: Accept | None = None
    ) -> tuple[State, wire.Snapshot]:
        """DonorClient.download; counts the bytes. Raises Unavailable."""
        state, offer = await client.download(donors, compare=compare, accept=accept)
        self.received += offer.nbytes
        return state, offer

    def newcomer_part(self, stage: int, round_now: int) -> StateSlice:
        """The part of the state of `stage` that a newcomer needs in the run's round `round_now`."""
        return newcomer_part(self.here.manifest.gossip, self._sizes(stage)) if round_now else WHOLE

    async def of_replicas(
        self,
        stage: int,
        donors: Peers,
        judge: StateJudge | None,
        round_now: int,
        *,
        accept: Accept | None = None,
        limits: DownloadLimits | None = None,
        round_min: int = 0,
    ) -> tuple[State, wire.Snapshot]:
        """The state of a replica of `stage`, as much of it as a newcomer needs in the run's round `round_now`. Raises
        Unavailable."""
        whole = self.client(stage, limits, round_min)
        compare = None if judge is None else judge.compare
        cut = self.newcomer_part(stage, round_now)
        state, offer = await self.download(replace(whole, cut=cut), donors, compare, accept)
        if cut != WHOLE and not offer.round and round_now <= FIRST_ROUNDS:
            # Before its first round the fast weights hold all that was learned.
            return await self.download(whole, donors, compare, accept)
        return state, offer

    async def of_keepers(
        self,
        stage: int,
        keepers: Sequence[PeerId],
        own: Snapshot | None,
        cut: StateSlice = WHOLE,
        accept: Accept | None = None,
    ) -> Snapshot:
        """The part `cut` of the first snapshot to be had of those that `keepers`, latest first, keep of `stage`.

        `own`, this node's backup if it is a keeper itself, needs no download, and serves when the other keepers fail.
        Raises Unavailable.
        """
        if own is None or keepers[0] != self.membership.me:
            judge = self.judge(stage, keepers=lambda: keepers, within=SLOW if cut == WHOLE else cut)
            compare = None if judge is None else judge.compare
            try:
                client = self.client(stage, BACKUP_LIMITS, cut=cut)
                state, offer = await self.download(client, lambda: keepers, compare, accept)
                return Snapshot.of_offer(offer, state, cut.first)
            except Unavailable:
                if own is None:
                    raise
        assert own is not None
        part = own.part(cut) if own.sizes == self._sizes(stage) else own
        if accept is not None:
            await accept(part.state)
        return part

    async def slow_weights(self, stage: int) -> tuple[State, wire.Snapshot]:
        """The slow weights of a replica of `stage`. Raises Unavailable."""
        donors = self.replicas(stage)
        judge = self.judge(stage, donors)
        compare = None if judge is None else judge.compare
        return await self.download(self.client(stage, cut=SLOW), donors, compare)

    async def of_archives(
        self, stage: int, peers: Sequence[PeerId], warranted: Callable[[PeerId, access_pb2.Warrant], tuple[bool, str]]
    ) -> tuple[State, wire.Snapshot]:
        """The slow weights of `stage` from those of `peers` that archive for the owner (`warranted`), the latest round
        first. Raises Unavailable."""
        offers = await self.offers(stage, SLOW, peers)
        archives = [peer for peer, offer in offers if warranted(peer, offer.warrant)[0]]
        return await self.download(self.client(stage, cut=SLOW), lambda: archives)

    async def offers(self, stage: int, cut: StateSlice, peers: Sequence[PeerId]) -> list[tuple[PeerId, wire.Snapshot]]:
        """The offers of `stage` that some of `peers` make, the latest round first."""
        client = self.client(stage, cut=cut)
        offers = list[tuple[PeerId, wire.Snapshot]]()

        async def ask(peer: PeerId) -> None:
            with contextlib.suppress(Unavailable, RemoteFault):  # most have none
                offers.append((peer, await client.offer(peer)))

        await gather_or_cancel([partial(ask, peer) for peer in peers])
        return sorted(offers, key=lambda one: (one[1].round, one[0]), reverse=True)

    def _sizes(self, stage: int) -> Sizes:
        """Elements of each section of `stage`."""
        if self.earlier is None or stage < STAGES_MAX:
            return self.replica.sizes_of(stage)
        return section_sizes(self.earlier, stages_of(self.earlier)[stage - STAGES_MAX])

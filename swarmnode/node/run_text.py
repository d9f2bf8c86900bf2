"""The run's text on this node: opens it for feeding, compares it with the feeders' digests, announces it in the record.

A node without the text serves the other stages, and the first one as well while other nodes feed. That is no fault and
ends nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

from swarmnode.errors import DataError, NotPermitted, Unavailable
from swarmnode.ids import PeerId, RunId, seeded
from swarmnode.manifest import Manifest
from swarmnode.manifest.location import base_url
from swarmnode.membership.place import places
from swarmnode.membership.swarm import Member, Swarm
from swarmnode.node.chunk_samples import ChunkSamples
from swarmnode.node.node_context import NodeContext
from swarmnode.node.node_ports import NodePorts
from swarmnode.node.presence import Presence
from swarmnode.node.role import NodeRole
from swarmnode.node.stage_change import costs, living_members
from swarmnode.node.stage_join import StageText
from swarmnode.pipeline.believed_rate import bounded
from swarmnode.pipeline.feeder import Samples
from swarmnode.pipeline.rebalance import RebalanceRules, choose_stage, reserved_stage
from swarmnode.ports import Priority, Telemetry, Transport
from swarmnode.transfer.chunk_set import ChunkSources

DIGEST_NBYTES = 8  # of the digest, in records
LOOK_S = 20.0  # guess: the index of 100 GB of text at 1 Mbit/s; a node without it then chooses another stage
AGAIN_S = 60.0  # guess: seconds between further attempts


class RunText:
    """The run's text on one node, for the node's whole life and whichever stage it serves."""

    def __init__(
        self,
        manifest: Manifest,
        run_id: RunId,
        world: NodePorts,
        line: Transport,
        presence: Presence,
        telemetry: Telemetry,
    ) -> None:
        self._manifest = manifest
        self._world = world
        self._presence = presence
        self._telemetry = telemetry
        self._samples: Samples | None = None
        self._asked: int | None = None
        self._refused = False  # this machine's own files are unusable, or another text than the run's
        if world.role is NodeRole.REPLICA or world.no_files:
            presence.can_serve(0, False)
        if (ports := world.data) is not None:
            asked = line, telemetry, ports.meeting_points, self._holders
            urls = [str(base_url(one)) for one in manifest.data.locations]
            ports.set.fetch_from(ChunkSources(run_id, urls, ports.web, *asked))

    def ask_for(self, stage: int | None) -> None:
        """Note the stage that this machine's user named; None: none."""
        self._asked = stage

    async def look(self) -> None:
        """Try to open the text before a stage is chosen; note that this node cannot feed when that fails."""
        if self._world.data is None or 0 in self._presence.status.unable:
            return
        await self._try()

    async def _try(self) -> None:
        try:
            async with asyncio.timeout(LOOK_S):
                await self.open()
        except TimeoutError:
            self.refuse(Unavailable("nobody gave the index of the run's data set in time"))
        except (DataError, NotPermitted, Unavailable) as error:
            self.refuse(error)

    async def keep_looking(self) -> None:
        """Retry in the background until the data set's index is here; this node can feed then. Returns at once when the
        run has no index, the index is open already, or this machine cannot serve the first stage."""
        ports = self._world.data
        if ports is None or ports.set.is_open or 0 in self._world.unable or not self._may_read:
            return
        await self.later()
        self._presence.can_serve(0, True)
        self._presence.changed()

    async def later(self) -> Samples:
        """The text, once the data set's index is here; tried again and again."""
        while True:
            with contextlib.suppress(TimeoutError, DataError, NotPermitted, Unavailable):
                async with asyncio.timeout(AGAIN_S):
                    return await self.open()
            await asyncio.sleep(AGAIN_S)

    @property
    def _may_read(self) -> bool:
        return self._world.role is not NodeRole.REPLICA and not self._world.no_files

    @property
    def others_feed(self) -> bool:
        """Whether another node starts microbatches, so that the first stage needs no text here."""
        return any(peer != self._presence.me for peer in self._presence.peer_table.swarm().feeders())

    @property
    def unable(self) -> frozenset[int]:
        """Stages that this node should not choose. The first one is among them where it has no text and nobody else
        feeds."""
        unable = self._presence.status.unable
        welcome = self.others_feed and not self._refused and 0 not in self._world.unable
        return unable - {0} if welcome else unable

    async def ready(self, stage: int) -> tuple[StageText, str]:
        """(the text of this node at `stage`, the reason why it should serve another stage; empty: none). There is text
        at the first stage alone, and none where others feed and this node has none.

        Raises DataError or NotPermitted when no other stage is left or the user asked for this one.
        """
        if stage != 0 or not self._may_read:
            return StageText(), ""
        without = StageText(later=None if self._world.data is None else self.later)
        if 0 in self._presence.status.unable and self.others_feed:
            return without, ""
        try:
            async with asyncio.timeout(LOOK_S if self._world.data is not None and self.others_feed else None):
                return StageText(await self.open()), ""
        except TimeoutError:
            self.refuse(Unavailable("nobody gave the index of the run's data set in time"))
            return without, ""
        except (DataError, NotPermitted) as error:
            self._refused = True
            self.refuse(error)
            if self._asked == 0 or len(self._presence.status.unable) >= self._manifest.pipeline.stages:
                raise
            return StageText(), str(error)

    async def open(self) -> Samples:
        """The text, ready for feeding. Waits for the index without a time limit.

        Raises DataError when this machine's files are unusable or differ from those of the run's feeders, NotPermitted
        when they may not be read.
        """
        if self._samples is None:
            world = self._world
            if world.data is not None:
                await world.data.set.open()
                self._samples = ChunkSamples(world.data.set, self._manifest)
            else:
                self._samples = await world.compute.run(Priority.OUTER, 0, world.samples)
        mine = self._samples.digest[:DIGEST_NBYTES]
        self._presence.has_text(mine)  # also where it is refused: the run's page shows it
        if self._world.data is None and mine:
            self._compare(mine)
        return self._samples

    def refuse(self, error: Exception) -> None:
        """Announce that this node does not feed, because of `error`. It serves other stages."""
        self._presence.can_serve(0, False)
        self._telemetry.event("data.refused", level="warning", reason=str(error))

    def _compare(self, mine: bytes) -> None:
        """Raise DataError when most feeders that joined before this node have another text. Later feeders do not count,
        because a new record costs no more than a key."""
        since_s = self._presence.incarnation / 1000.0
        before = [
            member.data_digest
            for member in self._presence.peer_table.swarm().serving(0)
            if member.data_digest and member.joined_unix_s < since_s and member.peer != self._presence.me
        ]
        if not before:
            return
        theirs, count = Counter(before).most_common(1)[0]
        if theirs != mine and count > before.count(mine):
            raise DataError(
                f"this machine's text has the digest {mine.hex()}, that of the run's feeders is {theirs.hex()}"
                f" ({count} of {len(before)}): it would train another text under the same sample numbers. The files, or"
                " the Python version whose standard library is read, differ; `swarmnode data make` makes a data set"
                " that is the same everywhere"
            )

    def _holders(self) -> list[PeerId]:
        """Members that announce the run's data set."""
        ports = self._world.data
        mine = b"" if ports is None else ports.set.digest[:DIGEST_NBYTES]
        return [m.peer for m in self._members() if m.data_digest == mine and m.peer != self._presence.me]

    def _members(self) -> list[Member]:
        return list(self._presence.peer_table.swarm().everyone())


# The stage that a node serves first, and after one whose text it cannot have.
#
# A node announces its choice before it downloads anything, and looks again: nodes that join at the same time see each
# other's reservations and take different stages (pipeline/rebalance.py).

SETTLE_S = 0.5  # guess: until the reservation of a node that joins at the same time can be read
LOOKS_MAX = 4  # guess: most see the same after one


async def choose(context: NodeContext, text: RunText, asked: int | None) -> int:
    """The stage `asked` for, or the one that needs a replica most, after a look at all members of the run."""
    manifest, presence, pinger = context.manifest, context.presence, context.pinger
    await presence.look(places(manifest))
    stage, reason = asked, "asked for"
    if stage is None:
        await text.look()
        rng, pipeline = seeded(manifest.seed, "stage", context.me), manifest.pipeline
        shares, rules = costs(manifest), RebalanceRules(pipeline.rebalance_ratio, pipeline.min_keep)
        living = await living_members(presence, pinger, context.ports.clock, context.telemetry)
        empty = [at for at in range(pipeline.stages) if not living.serving(at)]
        own = context.restorer.saved.best(empty, text.unable)
        if own is not None:
            stage, reason = own, "nobody serves it, and its trained state is saved here"
            await presence.reserve(stage)
        else:
            gone = {m.peer for m in presence.peer_table.swarm().members()} - {m.peer for m in living.members()}
            stage, reason = choose_stage(bounded(living, shares), shares, rules, rng, text.unable)
            for _ in range(LOOKS_MAX):
                before = stage
                await presence.reserve(stage)
                await asyncio.sleep(SETTLE_S)
                await presence.look(places(manifest))
                here = Swarm.of(
                    (m for m in presence.peer_table.swarm().members() if m.peer not in gone), pipeline.stages
                )
                told = bounded(here, shares), context.me, shares, rules, manifest.seed, text.unable
                stage, why = reserved_stage(*told)
                if stage == before:
                    break
                reason = why
    context.telemetry.event("stage.chosen", serves=stage, reason=reason)
    return stage

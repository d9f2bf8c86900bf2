"""Check a downloaded state against other replicas before it is accepted: samples of the slow weights must lie close.

Honest replicas of a stage differ by what they learnt since they met, a few hundredths of their length at most. Noise,
turned or scaled weights, and those of another run or of its beginning are far off. The joiner therefore asks another
replica, or a node that keeps a snapshot of the stage, for some slices of the slow weights. It draws the slices after
the state has come, also by its own clock: from what is public a donor could make a state whose drawn slices are right.
One very near sample confirms the state. Else others decide: a state is a lie if two samples that are close to each
other are far from it, or much further than from each other where all are of one time: noise of .35 of the length hides
among replicas that may differ by .6, not beside two that differ by .02. Replicas that serve contradict a state of any
round, so a donor cannot escape them by a round of its own. A kept snapshot is of an earlier round, and contradicts only
states of about that round.

Slow weights and outer momentum are all that a newcomer takes of most states (snapshot.newcomer_part). The momentum must
not be much longer than others': replicas average with different partners, and it grows in the first rounds.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from swarmnode.base.errors import RemoteFault, Unavailable
from swarmnode.base.ids import PeerId, short
from swarmnode.base.ports import State
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.keep.transfer.download import PAUSE_S, DonorClient, DownloadLimits
from swarmnode.keep.transfer.snapshot import SLOW, StateSlice
from swarmnode.keep.transfer.state_slices import APART_MAX, ROUNDS_APART_MAX, Apart, drawn_now, slices_of
from swarmnode.model.section import PACKED_ITEMSIZE
from swarmnode.net.membership.liveness import TRIES

# The outer momentum's length, over that of an honest replica. Measured: 10.6 times as long after a newcomer's first
# meeting, 13 rounds late; shorter ones contradict nothing.
MOMENTUM_RATIO_MAX = 16.0
NEAR = 0.1  # guess: of the length; a sample that is nearer confirms alone. Replicas that meet are .01 apart [measured]
FURTHER = 4.0  # guess: times as far from two samples as these are from each other
ROUNDS_SAME = 1  # rounds: samples of one time; within more, honest weights may move far
BRIEF = DownloadLimits(busy_max_s=0.0, waited_for=False, offer_timeout_s=20.0, chunk_timeout_s=20.0)
WORDS_S = TRIES * BRIEF.chunk_timeout_s  # for all that others say of a state: derived, a wait in vain in each try


@dataclass(frozen=True, slots=True)
class StateSample:
    """The slices that a peer sent of the same stage, and its own round and sample count of the run. `momentum`: the
    length of the outer momentum there, None where the run or the state has none."""

    peer: PeerId
    slices: bytes
    round_index: int
    total: int
    momentum: float | None = None


def length_of(momentum: bytes) -> float:
    """The length of a vector of bfloat16; inf where a number is not finite."""
    wide = (np.frombuffer(momentum, "<u2").astype("<u4") << 16).view("<f4").astype(np.float64)
    length = float(np.linalg.norm(wide))
    return length if math.isfinite(length) else math.inf


class StateCheck:
    """Checks states of one stage for one node. `totals` are the sample counts told by peers that confirmed the last."""

    def __init__(
        self,
        client: DonorClient,
        others: Callable[[], Sequence[PeerId]],
        apart: Apart,
        *,
        keepers: Callable[[], Sequence[PeerId]] = tuple,
        within: StateSlice = SLOW,
    ) -> None:
        """`client` asks of the stage. `others` returns serving replicas to ask, best first, and `keepers` nodes that
        keep a snapshot of the stage, asked after them. `within`: the part of the slow weights that states hold here."""
        self.totals: list[int] = []
        self._client = replace(client, limits=BRIEF, round_min=0)
        self._others = others
        self._keepers = keepers
        self._first = within.first
        self._count = within.sizes({"phi": client.sizes["phi"]})["phi"]
        self._apart = apart

    async def compare(self, state: State, offer: wire.Snapshot, givers: Collection[PeerId]) -> list[StateSample]:
        """Samples of peers that confirm the whole state that `givers` gave. A single confirmation is enough.

        Returns an empty list when no peer could be asked, or when a peer contradicts the state and no second one agrees
        with it. An event reports peers that contradicted the state, or gave no answer. Raises RemoteFault when two
        peers that agree with each other contradict the state.
        """
        me = self._client.transport.peer_id
        against = list[StateSample]()
        likely = list[StateSample]()
        silent = 0
        old = set[PeerId]()
        at = drawn_now(self._count, me, offer.id.hex(), first=self._first)
        if "momentum" in state.sections:
            at = [replace(cut, sections=("phi", "momentum")) for cut in at]
        ours = self._sample(me, state, offer, at)
        end_s = asyncio.get_running_loop().time() + WORDS_S
        for attempt in range(TRIES):
            known = {*givers, me, *old, *(word.peer for word in (*against, *likely))}
            serving = self._others()
            peers = [peer for peer in (*serving, *self._keepers()) if peer not in known][:TRIES]
            if attempt and not peers:
                break
            await asyncio.sleep(PAUSE_S * attempt)  # peers that have not heard of this node yet give nothing
            for peer in peers:
                try:
                    async with asyncio.timeout_at(end_s):
                        word = await self._ask(peer, at)
                except (RemoteFault, Unavailable, TimeoutError):
                    silent += 1
                    continue
                if self._near(ours, word, NEAR):
                    return self._confirmed(word)
                if self._near(ours, word):
                    likely.append(word)
                elif peer in serving or abs(word.round_index - offer.round) <= ROUNDS_APART_MAX:
                    against.append(word)
                else:
                    old.add(peer)
            self._judge(likely, ours)
            if likely:
                return self._confirmed(likely[0])
            self._judge(against, ours)
        for word in against:
            self._doubt(givers, f"{self._far(ours, word)} from those of {short(word.peer)}")
        if silent and not against:
            self._doubt(givers, f"asked {silent} times, none of the others could say")
        self.totals = []
        return []

    def _sample(self, me: PeerId, state: State, offer: wire.Snapshot, at: Sequence[StateSlice]) -> StateSample:
        """The slices `at` of `state`."""
        sections = state.sections
        momentum = None
        if "momentum" in at[0].sections:
            momentum = length_of(slices_of(sections["momentum"], at, self._first, "momentum"))
        return StateSample(me, slices_of(sections["phi"], at, self._first), offer.round, 0, momentum)

    def _confirmed(self, word: StateSample) -> list[StateSample]:
        self.totals = [word.total]
        return [word]

    def _near(self, one: StateSample, other: StateSample, most: float = APART_MAX) -> bool:
        """Whether the sample `one` can be honest if `other` of the same slices is, and they are `most` apart."""
        if self._apart(one.slices, other.slices) > most:
            return False
        theirs = other.momentum or 0.0  # 0: it came a moment ago, and knows nothing
        return theirs == 0.0 or (one.momentum or 0.0) <= MOMENTUM_RATIO_MAX * theirs

    def _far(self, one: StateSample, other: StateSample) -> str:
        far = self._apart(one.slices, other.slices)
        if far > NEAR:
            return f"slow weights {far:.3g} of their length"
        return f"an outer momentum {one.momentum or 0.0:.3g} long, not {other.momentum or 0.0:.3g},"

    def _judge(self, words: Sequence[StateSample], ours: StateSample) -> None:
        """Raise RemoteFault where two of `words` agree, and both contradict `ours`."""
        for one, other in itertools.combinations(words, 2):
            most = APART_MAX
            if all(abs(word.round_index - ours.round_index) <= ROUNDS_SAME for word in (one, other)):
                most = min(most, max(NEAR, FURTHER * self._apart(one.slices, other.slices)))
            agree = self._near(one, other) and self._near(other, one)
            if agree and not any(self._near(ours, word, most) for word in (one, other)):
                names = f"{short(one.peer)} and {short(other.peer)}"
                raise RemoteFault(f"{self._far(ours, one)} from those of {names}, who agree")

    def _doubt(self, givers: Collection[PeerId], why: str) -> None:
        peers = sorted(givers)
        reason = f"a state that nobody confirms: {why}"
        stage = self._client.stage
        self._client.telemetry.event("state.doubted", level="warning", stage=stage, peers=peers, reason=reason)

    async def _ask(self, peer: PeerId, at: Sequence[StateSlice]) -> StateSample:
        """The slices of `peer`. Raises RemoteFault, Unavailable."""
        parts = list[bytes]()
        momenta = list[bytes]()
        offer = wire.Snapshot()
        for cut in at:
            asking = replace(self._client, cut=cut)
            offer = await asking.offer(peer, beside=True)
            data = b"".join([bytes(await asking.chunk(peer, offer, index, 0)) for index in range(len(offer.hashes))])
            split = PACKED_ITEMSIZE["phi"] * (cut.count or 0)
            parts.append(data[:split])
            momenta.append(data[split:])
        momentum = length_of(b"".join(momenta)) if "momentum" in at[0].sections else None
        return StateSample(peer, b"".join(parts), offer.round, offer.progress.total, momentum)

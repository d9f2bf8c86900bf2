"""A second word on a state, before it is accepted: samples of its slow weights lie close to those of other replicas.

Honest replicas of a stage differ by what they learnt since they met, a few hundredths of their length at most; noise,
turned or scaled weights, and those of another run or of its beginning are far off. So some slices of the slow weights
are asked of another replica, or of one that keeps a snapshot of the stage, chosen after the state has come. Where the
two are far apart a third one decides: a state is a lie if two are far from it that are close to each other.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from swarmnode.errors import RemoteFault
from swarmnode.ids import PeerId, RunId, seeded, short
from swarmnode.model.section import PACKED_ITEMSIZE, Sizes
from swarmnode.ports import State, Telemetry, Transport
from swarmnode.recovery.asking import Asking, DownloadLimits, Failed, Later, Lie
from swarmnode.recovery.snapshot import SLOW, Cut
from swarmnode.wire import call_pb2 as wire

SLICES = 4  # guess: of different tensors, mostly
ELEMENTS = 4096  # guess: of each; 64 KiB in all
ALIGN = 64
# Of the length. Measured in tests/node: replicas that meet .01 apart, after rounds without a partner up to .53 (a model
# of 16,000 parameters in its first steps, where weights move most); noise 1.4, nothing 1.0, turned round 2.0.
APART_MAX = 0.6
ROUNDS_APART_MAX = 4  # guess: within so many rounds weights move less than that; older ones contradict nothing
ASKED_MAX = 4  # guess: others asked, of whom some give to joiners now
TRIES, PAUSE_S = 3, 0.5  # guess: records of a joiner are with everybody after an announce period
BRIEF = DownloadLimits(busy_max_s=0.0, waited_for=False, offer_timeout_s=20.0, chunk_timeout_s=20.0)

Apart = Callable[[memoryview | bytes, memoryview | bytes], float]
"""How far the same part of two replicas' slow weights is apart, in lengths of the longer one (ports.Replica.apart)."""


@dataclass(frozen=True, slots=True)
class Word:
    """What another said of the same stage: its slices, and how far it thinks the run has come."""

    peer: PeerId
    slices: bytes
    round_index: int
    total: int


def apart(one: memoryview | bytes, other: memoryview | bytes) -> float:
    """The distance of two vectors of float32, in lengths of the longer one: 0 of equal ones, 2 of opposite ones, inf
    where numbers are not finite."""
    with np.errstate(invalid="ignore", over="ignore"):
        a, b = (np.frombuffer(data, "<f4").astype(np.float64) for data in (one, other))
        length, distance = max(float(np.linalg.norm(a)), float(np.linalg.norm(b))), float(np.linalg.norm(a - b))
    if not math.isfinite(distance):
        return math.inf
    return distance / length if length > 0.0 else 0.0


def cuts(parameters: int, *seed: str | int) -> list[Cut]:
    """Which slices of a state's slow weights are compared, each from an element that is a multiple of ALIGN."""
    count, rng = min(ELEMENTS, parameters), seeded("second", *seed)
    return [Cut(SLOW.sections, rng.randrange((parameters - count) // ALIGN + 1) * ALIGN, count) for _ in range(SLICES)]


def slices_of(phi: memoryview, at: Sequence[Cut]) -> bytes:
    """Those elements of the slow weights `phi` (float32)."""
    flat, size = memoryview(phi).cast("B"), PACKED_ITEMSIZE["phi"]
    return b"".join(flat[size * cut.first : size * (cut.first + (cut.count or 0))] for cut in at)


class SecondWord:
    """For the downloads of one node of one stage. `others`: whom to ask, best first; `rounds_max` as of the run now."""

    def __init__(
        self,
        transport: Transport,
        run_id: RunId,
        stage: int,
        sizes: Sizes,
        others: Callable[[], Sequence[PeerId]],
        rounds_max: Callable[[], float],
        apart: Apart,
        telemetry: Telemetry,
    ) -> None:
        self._transport = transport
        self._run_id = run_id
        self._stage = stage
        self._sizes = sizes
        self._others = others
        self._rounds_max = rounds_max
        self._apart = apart
        self._telemetry = telemetry

    async def compare(self, state: State, offer: wire.Snapshot, givers: Collection[PeerId]) -> list[Word]:
        """Words of those who agree with a whole state that `givers` gave; none where nobody could be asked, or one
        contradicts it and nobody else is there: that is said. Raises RemoteFault when two contradict it alike."""
        me, against = self._transport.peer_id, list[Word]()
        at = cuts(self._sizes["phi"], me, offer.id.hex())
        ours, silent, old = slices_of(state.sections["phi"], at), 0, set[PeerId]()
        for attempt in range(TRIES):
            told = {*givers, me, *old, *(word.peer for word in against)}
            asked = [peer for peer in self._others() if peer not in told][:ASKED_MAX]
            if attempt and not asked:
                break
            await asyncio.sleep(PAUSE_S * attempt)  # who has not heard of us yet gives nothing
            for peer in asked:
                try:
                    word = await self._ask(peer, at)
                except (Later, Failed, Lie):
                    silent += 1
                    continue
                if self._apart(ours, word.slices) <= APART_MAX:
                    return [word]
                if abs(word.round_index - offer.round) <= ROUNDS_APART_MAX:
                    self._judge(word, against, ours)
                    against.append(word)
                else:
                    old.add(peer)
        for word in against:
            self._doubt(
                givers, f"{self._apart(ours, word.slices):.3g} of their length from those of {short(word.peer)}"
            )
        if silent and not against:
            self._doubt(givers, f"asked {silent} times, none of the others could say")
        return []

    def _judge(self, word: Word, against: Sequence[Word], ours: bytes) -> None:
        """`word` contradicts the state whose slices are `ours`. Raises RemoteFault where one of `against` agrees."""
        for other in against:
            if self._apart(other.slices, word.slices) <= APART_MAX:
                names, far = f"{short(other.peer)} and {short(word.peer)}", self._apart(ours, word.slices)
                raise RemoteFault(f"slow weights {far:.3g} of their length from those of {names}, who agree")

    def _doubt(self, givers: Collection[PeerId], why: str) -> None:
        reason = f"slow weights that nobody confirms: {why}"
        self._telemetry.event("state.doubted", level="warning", stage=self._stage, peers=sorted(givers), reason=reason)

    async def _ask(self, peer: PeerId, at: Sequence[Cut]) -> Word:
        """The slices of `peer`. Raises Later, Failed, Lie."""
        parts, offer = list[bytes](), wire.Snapshot()
        for cut in at:
            asking = Asking(self._transport, self._stage, self._run_id, self._sizes, BRIEF, 0, cut, self._rounds_max)
            offer = await asking.offer(peer, beside=True)
            parts += [bytes(await asking.chunk(peer, offer, index, 0)) for index in range(len(offer.hashes))]
        return Word(peer, b"".join(parts), offer.round, offer.progress.total)


__all__ = ["APART_MAX", "ROUNDS_APART_MAX", "Apart", "SecondWord", "Word", "apart", "cuts", "slices_of"]

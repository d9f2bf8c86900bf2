"""Choose the answers to audit, add up what they show of each replica, and decide on exclusions. Pure.

A caller has another replica recompute a small share of each replica's answers, without announcing which. Two honest
replicas of a stage never have equal weights, so an answer is not false because it differs. What decides is whether its
server's own weights explain it, fetched when an answer is far from the others (`AnswerSimilarity.close`), or when what
several of them show adds up (`Shortfall`, `MeanAnswers`). LIES false answers exclude a replica; those that one
change of its weights may explain count as one.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from swarmnode.ids import PeerId
from swarmnode.remembered import Remembered
from swarmnode.token_bucket import TokenBucket

LIMIT = math.log(1e4)  # guess: a peer is suspected at these odds
DOUBT = math.log(1e3)  # the tail of S is exp(-S) at most for an honest peer: one answer in a thousand is above
MOST = LIMIT - 0.1 * (LIMIT - DOUBT)  # by which one answer raises S: guess, a little less than LIMIT
WORST = 1.5  # guess: the most of S, in LIMITs, so that a peer that stops lying is believed again after a few answers
# This quantile of a normal distribution lies `DEVIATIONS` standard deviations above its mean.
QUANTILE = 0.8
DEVIATIONS = 0.842
RECENT = 64  # guess: the noise is estimated from so many answers

DOUBTED_RIGHT = 32  # derived: who lies once in ten is caught again at 97 % before so many are right
LIES = 2  # derived: the fewest; a single one may be a memory error, or come from weights that were being replaced
SUSPECT = LIMIT / 2.0  # derived: an honest replica's sum is above it 1 % of the time, so doubt costs as little
FORGIVEN_RIGHT = 100  # guess: so many right answers in a row cancel earlier wrong ones
SNAPSHOT_AGE_S = 30.0  # guess: no donor gives older snapshots, except of large states or while it is busy
EXAMINED_S = 3.0  # guess: between answers of a suspected replica whose weights are fetched, and
EXAMINED_SHARE = 0.25  # guess: at most this share of the time, since a large state takes the line for long
# Guess: far answers, SNAPSHOT_AGE_S apart, of one that never gives weights near them; honest donors are busy at times.
WITHHELD_MAX = 6
UNSHOWN_MAX = 32  # guess: refused openings in a row; an honest replica keeps its last answers for a while
BUDGET_FIRST = 8.0  # guess: recomputed hops beyond the manifest's share of answers, of which a stage examines newcomers
# Recomputed hops beyond as many again, to examine doubted replicas. Measured: a caller excludes one that steers after
# some twenty; so many right ones end a doubt.
DOUBT_FIRST = float(DOUBTED_RIGHT)

ALIKE = 0.5  # guess: cosine from which two answers count as equal
OPPOSITE = -0.4  # measured: an honest answer to a later one falls to -.1, 64 steps apart on a text known by heart
# An answer farther than this from its own weights is false. Measured on the demo and on `examples/moe-small` from the
# first step on, where weights move fastest: an honest answer and what its server's weights make 32 steps later have a
# cosine of .22 or more, activations 64 steps later of .25; noise has 0.
OWN_LEAST = 0.15
NEAR_STEPS = 8  # measured in the same way: so many steps later an honest answer has a cosine of .73 or more
# Measured in the same way: losses of honest answers differ by .66 nats per token at most, two steps later.
LOSS_GAP = 1.0
LOSS_STEPS = 2
LOSS_LEAST = 0.3  # guess: nats per token; below this, text is memorised and its gradients are noise
# Guess: own weights explain an answer that is less than half as far from theirs as from others. A few steps later they
# explain most of an honest one, and nothing of a lie.
EXPLAINED = 0.5
# The very weights that answered give the answer again: measured on the demo, of one kind of machine, 1e-5 at most. A
# step on that very microbatch moves an honest answer by up to .14. Guess: other machines and 16 bits multiply in other
# ways, by less than EXACT.
EXACT = 0.005


@dataclass(frozen=True, slots=True)
class AnswerSimilarity:
    """Similarity of two answers: the least cosine of their tensors, the difference of their losses in nats per token,
    and how many times longer than the other's a tensor is (the most of them)."""

    cosine: float
    loss_apart: float = 0.0
    longer: float = 1.0

    @property
    def distance(self) -> float:
        """|a - b|^2 / (2 |a| |b|) of two tensors a and b: 1 - cosine if they are equally long."""
        return 1.0 - self.cosine + (self.longer + 1.0 / self.longer) / 2.0 - 1.0

    @property
    def close(self) -> bool:
        """Whether the answers agree well enough to need no vote."""
        return self.cosine >= ALIKE and self.loss_apart <= LOSS_GAP

    def contradicts(self, apart: int) -> bool:
        """Whether two answers so alike cannot be of weights that lie `apart` inner steps from each other."""
        return self.cosine < OWN_LEAST or (apart <= LOSS_STEPS and not self.loss_apart <= LOSS_GAP)

    def __str__(self) -> str:
        length = f", {self.longer:.2f} times as long" if self.longer >= 1.1 else ""
        return f"cosine {self.cosine:.3f}{length}" + (
            f", losses {self.loss_apart:.3g} apart" if self.loss_apart else ""
        )


def middle(likeness: Sequence[AnswerSimilarity]) -> AnswerSimilarity:
    """Similarity of one answer to all others: the better median of each number."""
    return AnswerSimilarity(
        statistics.median_high([one.cosine for one in likeness]),
        statistics.median_low([one.loss_apart for one in likeness]),
        statistics.median_low([one.longer for one in likeness]),
    )


@dataclass(frozen=True, slots=True)
class Weighed:
    """One of several answers to a hop, with what is known of it: its similarity to the others, whether its server is
    suspected, and whether this answer `speaks` against it. `own`: its similarity to the hop made again with its
    server's own weights, `apart` steps from those that answered (None: it gives none, or if `late` others), and `near`
    them if NEAR_STEPS at most and no round lie between."""

    vote: AnswerSimilarity
    suspected: bool = False
    speaks: bool = False
    own: AnswerSimilarity | None = None
    apart: int = 0
    late: bool = False
    near: bool = False

    @property
    def unexplained(self) -> bool:
        """Whether the very weights that answered give another answer, or those of a few steps later one that has
        little in common with it."""
        if self.own is None or not self.near:
            return False
        far = self.speaks and self.own.cosine < ALIKE and not self.explained
        return self.own.distance > EXACT if self.apart == 0 else far

    @property
    def explained(self) -> bool:
        """Whether its server's own weights are near its answer, as others' are not."""
        return self.own is not None and self.own.distance <= EXPLAINED * self.vote.distance


def is_false(one: Weighed, other: Weighed | None = None) -> bool:
    """Whether an answer is false: its server's own weights do not explain it. `other`: the only other answer, if there
    are two; its own weights must explain that one."""
    if one.own is None:  # no honest answer is the opposite of the others, of whatever weights
        return other is None and one.vote.cosine < OPPOSITE
    if one.own.contradicts(one.apart):
        # Of two, losses alone decide nothing, nor does arithmetic of ours that is like neither of them.
        return other is None or (other.own is not None and other.own.cosine >= ALIKE > one.vote.cosine)
    if not one.suspected:
        return False
    # A replica that met others since has other weights, which explain nothing.
    better = other is None or (other.own is not None and EXPLAINED * one.own.distance > other.own.distance)
    return better and one.unexplained


def hides(one: Weighed, other: Weighed | None = None) -> bool:
    """Whether the server of an answer that is far from the others, or that is suspected, gives no weights to judge it
    by, or such as met others or took many steps since, by what it says."""
    unseen = one.suspected and not (one.late if one.own is None else one.near)
    unseen = unseen or (one.own is None and one.vote.cosine < ALIKE)
    if not one.speaks or one.explained or not unseen:
        return False
    return other is None or (other.own is not None and other.own.cosine >= ALIKE)


class Shortfall:
    """Tests whether a replica's answers are farther from those of others of its stage than is usual there.

        x      = log(distance)
        lie    = exp(SHIFT ((x - the median x) / s - SHIFT / 2))      the odds of a lie
        S     <- min(max(0, S + log(1 - LYING + LYING lie)), WORST LIMIT)

    It is a sequential test for each peer (Page's CUSUM, Biometrika 41, 1954). The noise s, estimated from the answers
    lately believed, decides how many answers a suspicion takes: two where lies are clearly distinct, dozens elsewhere.
    A lie is SHIFT deviations s farther away. The odds are those of a replica that falsifies one answer in 1 / LYING:
    many right answers cancel an honest outlier, and ten of them no lie. Inner steps that both state do not enter: among
    replicas that meet in rounds, distances do not depend on them (measured on the demo: 74 pairs, 0 to 31 steps apart).
    """

    # Distances of honest pairs, before any were seen. Measured on the demo: 65 pairs of four lives, and the first 1,000
    # samples of another (tests/trust/test_shortfall.py has a few).
    FIRST = (0.02, 0.03, 0.04, 0.05, 0.05, 0.06, 0.07, 0.09)
    # Measured as FIRST: honest distances spread by a factor of 1.5 each way. Guess: of 1.8 at most, so that those of
    # weights that hardly move in a warm-up do not make room for lies.
    NOISE_LEAST = 0.4
    NOISE_MOST = 0.6
    HONEST = 2.0  # guess: deviations up to which a distance is learned from; 2 % of honest ones are above
    SHIFT = 3.0  # guess: a lie of three deviations; one of four and a half is as certain as a check can be
    LYING = 0.1  # a replica that lies in fewer answers does as much less harm
    DISTANCE_LEAST = 1e-2  # guess: nearer is not more honest
    DISTANCE_MOST = 4.0  # guess

    def __init__(self) -> None:
        self._sums = Remembered[PeerId, float]()
        self._recent = deque(map(math.log, self.FIRST), maxlen=RECENT)

    def against(self, peer: PeerId) -> float:
        """The sum S of `peer`; 0.0 for an unknown one."""
        return self._sums.get(peer, 0.0)

    def forget(self, peer: PeerId) -> None:
        """Drop the sum of `peer`: it is explained."""
        self._sums.pop(peer, None)

    def _log(self, distance: float) -> float:
        return math.log(min(max(distance, self.DISTANCE_LEAST), self.DISTANCE_MOST))

    def _deviations(self, distance: float, usual: float) -> tuple[float, float]:
        """(x, its deviations above the median x, or above that of a distance `usual` if this is more)."""
        ordered = sorted(self._recent)
        median = statistics.median(ordered)
        # Of those above the median, up to a quantile: where a lie would be, too.
        spread = (ordered[int(QUANTILE * len(ordered))] - median) / DEVIATIONS
        x = self._log(distance)
        beside = self._log(usual)
        return x, (x - max(median, beside)) / min(max(self.NOISE_LEAST, spread), self.NOISE_MOST)

    def short(self, distance: float) -> bool:
        """Whether two answers so far apart need a third one."""
        return self._deviations(distance, 0.0)[1] > self.SHIFT / 2.0

    def observe(self, peer: PeerId, distance: float, usual: float = 0.0) -> bool:
        """Update the test with an answer of `peer`, at `distance` from others, which are `usual` from each other.
        Returns whether it speaks against `peer`."""
        x, deviations = self._deviations(distance, usual)
        odds = math.exp(min(self.SHIFT * (deviations - self.SHIFT / 2.0), MOST))
        ratio = min(math.log(1.0 - self.LYING + self.LYING * odds), MOST)  # no single answer decides
        self._sums[peer] = min(max(self.against(peer) + ratio, 0.0), WORST * LIMIT)
        if self.against(peer) <= DOUBT / 2.0 and deviations <= self.HONEST:  # a lie says nothing about the honest
            self._recent.append(x)
        return odds > 1.0

    def learn(self, distance: float) -> None:
        """Note a `distance` that own weights explain, however unusual."""
        self._recent.append(self._log(distance))


@dataclass(slots=True)
class _Answers:
    """Answers of one replica, the older the lighter: the sum of their sketches, of their weights and these' squares."""

    total: np.ndarray
    weight: float = 0.0
    squares: float = 0.0


class MeanAnswers:
    """Tests whether a replica's answers point elsewhere on average than those of its stage, from every answer, with
    nothing computed again. SENTINEL compares means of each server so (2603.03592).

        d = m_i - m_others,   z = |d|^2 / (v (1 / n_i + 1 / n_others) + s)

    m is the mean of sketched answers over their lengths (ports.Replica.sketch), each less the mean of all lately, since
    gradients turn while a run learns; n their number, v the variance of one, s by which the others' means differ, as
    their weights do. A caller's microbatches are drawn by chance, so z is about 1 for an honest replica. One above
    LIMIT stands aside for a while, twice as long each time, and the others are compared without it. Of two nobody knows
    which one it is.
    """

    # Measured on the demo, four replicas, 3,000 samples: 1.5 at most of honest gradients, 4.9 of activations, all of
    # which weights that differ a little move. Guess: some twice as much.
    LIMIT = 3.0
    LIMIT_OF_FEEDERS = 8.0
    LATELY = 8.0  # guess: answers of each
    FIRST = 8.0  # answers of a replica and of the others, before it is judged; measured: at the fourth one was at 3.3
    EACH = 64.0  # guess: answers of a replica that enter
    ASIDE_S = 60.0  # guess: the first time; long beside the answers that it takes to stand aside again, and
    EXCUSES = 3.0  # ... guess: over after so many examinations in which it was honest

    def __init__(self, limit: float = LIMIT) -> None:
        self._limit = limit
        self._of = dict[PeerId, _Answers]()
        self._z = dict[PeerId, float]()
        self._square = self._weight = self._now_s = 0.0
        self._usual: np.ndarray | None = None  # the mean of all answers lately
        self._aside = Remembered[PeerId, tuple[float, float]]()  # until, and how long

    def aside(self, peer: PeerId) -> bool:
        """Whether `peer` stands aside."""
        return self._aside.get(peer, (0.0, 0.0))[0] > self._now_s

    def observe(self, peer: PeerId, sketch: Sequence[float], now_s: float) -> None:
        """Update the test with an answer of `peer`."""
        self._now_s = now_s
        if self.aside(peer) or not sketch or not all(map(math.isfinite, sketch)):
            return
        one = np.asarray(sketch)
        count = max(1, len(self._of))
        self._usual = one if self._usual is None else self._usual
        one = one - self._usual
        self._usual = self._usual + one / (self.LATELY * count)
        kept = 1.0 - 1.0 / (self.EACH * count)
        for known in self._of.values():
            known.total *= kept
            known.weight *= kept
            known.squares *= kept * kept
        self._square = self._square * kept + float(one @ one)
        self._weight = self._weight * kept + 1.0
        mine = self._of.setdefault(peer, _Answers(np.zeros_like(one)))
        mine.total = mine.total + one
        mine.weight = mine.weight + 1.0
        mine.squares = mine.squares + 1.0
        self._of = {key: known for key, known in self._of.items() if known.weight > 1e-3}
        self._z = self._found()
        farthest = max(self._z, key=self._z.__getitem__, default=peer)
        if len(self._z) > 2 and self._z.get(farthest, 0.0) > self._limit:
            self.put_aside(farthest, now_s)

    def put_aside(self, peer: PeerId, now_s: float) -> None:
        """Have `peer` stand aside, for twice as long as the last time, if it does not yet."""
        if not self.aside(peer):
            for_s = 2.0 * self._aside.get(peer, (0.0, self.ASIDE_S / 2.0))[1]
            self._aside[peer] = (now_s + for_s, for_s)
            self._of.pop(peer, None)
            self._z = self._found()

    def excuse(self, peer: PeerId) -> None:
        """Shorten the time that `peer` stands aside: its very weights gave its answer."""
        if self.aside(peer):
            until_s, for_s = self._aside[peer]
            self._aside[peer] = until_s - self.ASIDE_S / self.EXCUSES, for_s

    def speaks(self, peer: PeerId) -> bool:
        """Whether `peer` stands aside or, of two, may have to."""
        return self.aside(peer) or self._z.get(peer, 0.0) > self._limit

    def _found(self) -> dict[PeerId, float]:
        """z of each replica that enough is known of."""
        found = dict[PeerId, float]()
        seen = self._of.values()
        if len(seen) < 2:
            return found
        total, weight, squares = (sum(getattr(one, key) for one in seen) for key in ("total", "weight", "squares"))
        variance = self._square / self._weight - float(total @ total) / weight**2
        counts = {peer: one.weight**2 / one.squares for peer, one in self._of.items()}
        judged = [peer for peer, count in counts.items() if count >= self.FIRST]
        for peer, one in self._of.items():
            rest = weight - one.weight
            others = rest**2 / (squares - one.squares)
            if min(counts[peer], others) >= self.FIRST and variance > 0.0:
                apart = one.total / one.weight - (total - one.total) / rest
                square = float(apart @ apart)
                noise = variance * (1.0 / counts[peer] + 1.0 / others)
                if square > self._limit * noise and len(beside := [other for other in judged if other != peer]) > 1:
                    means = np.stack([self._of[other].total / self._of[other].weight for other in beside])
                    spread = float(means.var(axis=0, ddof=1).sum())
                    spread -= variance * statistics.fmean(1.0 / counts[other] for other in beside)
                    noise += max(0.0, spread) * (1.0 + 1.0 / len(beside))
                found[peer] = square / noise
        return found


@dataclass(slots=True)
class _Record:
    right: int = 0
    right_in_row: int = 0
    doubted: bool = False
    unshown: int = 0
    wrong: set[bytes] = field(default_factory=set)  # microbatches, LIES at most
    explained_s: float = -math.inf  # one change of weights may explain false answers that came until then
    withheld: int = 0  # answers, WITHHELD_MAX at most
    weighable_s: float = -math.inf  # until then its weights are not fetched again


class Audits:
    """A caller's audits of replicas. `share`: part of the answers audited for a replica that has been right for a
    while."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._records = Remembered[PeerId, _Record]()
        self._answers = 0
        # In recomputed hops, by the number of answers.
        self._budget, self._doubt_budget = (TokenBucket.full(share, first) for first in (BUDGET_FIRST, DOUBT_FIRST))
        self._shortfalls: dict[int, Shortfall] = {}
        self._means: dict[int, MeanAnswers] = {}

    def shortfall(self, stage: int) -> Shortfall:
        """The test of the checks of `stage`."""
        return self._shortfalls.setdefault(stage, Shortfall())

    def means(self, stage: int) -> MeanAnswers:
        """The test of all answers of `stage`."""
        limit = MeanAnswers.LIMIT if stage else MeanAnswers.LIMIT_OF_FEEDERS
        return self._means.setdefault(stage, MeanAnswers(limit))

    def suspected(self, peer: PeerId, stage: int) -> bool:
        """Whether `peer` may lie: its answers are compared with its own weights."""
        return self.unusable(peer, stage) or self.means(stage).speaks(peer)

    def unusable(self, peer: PeerId, stage: int) -> bool:
        """Whether answers of `peer` are not used now. Of two whose means differ nobody knows which one it is."""
        return self.shortfall(stage).against(peer) > LIMIT or self.means(stage).aside(peer)

    def clear(self, peer: PeerId, stage: int, distance: float | None = None) -> None:
        """Its own weights explain the answers of `peer`: they are far from others', at a `distance` that is honest
        (None: another's may be the lie)."""
        self.shortfall(stage).forget(peer)
        self._of(peer).withheld = 0
        if distance is not None:
            self.shortfall(stage).learn(distance)

    def chosen(self, peer: PeerId, draw: float, callers: int = 1) -> bool:
        """Whether to check an answer of `peer` that just arrived, one of `callers` replicas of our stage, with us;
        `draw` is a random number in [0, 1)."""
        self._answers += 1
        return draw < self.share(peer, callers)

    def share(self, peer: PeerId, callers: int = 1) -> float:
        """The share of `peer`'s answers to check now: all of a newcomer's until one was right, and of a doubted one.

        Newcomers have a part of the budget, the smaller the more `callers` share it: what one of them finds is shown to
        the others. A first check finds what is broken, or lies to everybody from the start. Who knows of it is honest
        at first, or lies to one caller only, and meets the manifest's share, which each caller draws for itself. Nobody
        reports that a newcomer was right, since a caller that colludes would. The rest of the budget is out of
        newcomers' reach, so that a stream of honest keys does not use up the checks of a liar.

        The doubted have a budget of their own, as large as the others' in the long run, of which half is for what we
        saw ourselves. So an honest swarm recomputes twice the manifest's share at most, whoever doubts whom.
        """
        known = self._records.get(peer, _Record())
        seen = self._speaks(peer)
        left = self._doubt_budget.fill(self._answers) if seen or known.doubted else 0.0
        if left >= (1.0 if seen else DOUBT_FIRST / 2.0):
            return float(self._share > 0.0)
        left = self._budget.fill(self._answers)
        kept = BUDGET_FIRST * (1.0 - 1.0 / max(1, callers))
        if not known.right and left >= min(1.0 + kept, BUDGET_FIRST):
            return math.ceil(self._share)
        return self._share if left >= 1.0 else 0.0

    def spent(self, about: PeerId) -> None:
        """Charge one recomputed hop of a check of `about`."""
        doubt = self.doubted(about) and self._doubt_budget.tokens > 0.0
        (self._doubt_budget if doubt else self._budget).spend(self._answers, 1.0)

    def convicted(self, peer: PeerId) -> bool:
        """Whether so many answers of `peer` were false that it is excluded."""
        return len(self._records.get(peer, _Record()).wrong) >= LIES

    def doubted(self, peer: PeerId) -> bool:
        """Whether `peer` is examined: checks speak against it, or answers that others showed."""
        return self._speaks(peer) or self._records.get(peer, _Record()).doubted

    def _speaks(self, peer: PeerId) -> bool:
        known = self._records.get(peer, _Record())
        means = self._means.values()
        shown = (known.doubted and bool(known.wrong or known.withheld)) or any(one.speaks(peer) for one in means)
        return shown or any(one.against(peer) > SUSPECT for one in self._shortfalls.values())

    def weighed(self, peers: Sequence[PeerId], took_s: float, now_s: float) -> None:
        """Record that the weights of `peers` were fetched and used, in `took_s`."""
        for known in map(self._of, peers):
            known.weighable_s = now_s + max(EXAMINED_S, took_s * (1.0 / EXAMINED_SHARE - 1.0))

    def weighable(self, peer: PeerId, now_s: float) -> bool:
        """Whether donors may have newer weights of `peer` than those fetched last."""
        return now_s >= self._of(peer).weighable_s

    def in_row(self, peer: PeerId) -> int:
        """Right answers of `peer` in a row, since the last contradicted or withheld one."""
        known = self._records.get(peer)
        return known.right_in_row if known is not None else 0

    def right(self, peer: PeerId) -> None:
        """Record a confirmed answer of `peer`."""
        known = self._of(peer)
        known.right += 1
        known.right_in_row += 1
        known.unshown = 0
        if known.right_in_row >= DOUBTED_RIGHT:
            known.doubted = False
        if known.right_in_row >= FORGIVEN_RIGHT:
            known.wrong.clear()
            known.withheld = 0

    def wrong(self, peer: PeerId, microbatch: bytes, came_s: float = math.inf, now_s: float = 0.0) -> bool:
        """Record a false answer of `peer` that came at `came_s` and was judged at `now_s`; return whether to exclude
        it.

        A replica that fell behind and met others between its answer and the fetch of its weights has other weights than
        those that answered. So an answer counts only if it came after the one before was judged, and after any copy
        made until then; infinity where no weights explain it.
        """
        known = self.doubt(peer)
        if came_s > known.explained_s:
            known.wrong.add(microbatch)
            known.explained_s = now_s + SNAPSHOT_AGE_S
        return self.convicted(peer)

    def unshown(self, peer: PeerId) -> bool:
        """Record that `peer` refused to show its evidence; return whether to exclude it."""
        known = self.doubt(peer) if self._of(peer).unshown else self._of(peer)
        known.unshown += 1
        return known.unshown >= UNSHOWN_MAX

    def withheld(self, peer: PeerId, now_s: float) -> bool:
        """Record that `peer` gave no weights to judge a contradicted answer by; return whether to exclude it."""
        known = self.doubt(peer)
        if now_s > known.explained_s:
            known.withheld = known.withheld + 1
            known.explained_s = now_s + SNAPSHOT_AGE_S
        return known.withheld >= WITHHELD_MAX

    def doubt(self, peer: PeerId) -> _Record:
        """Check more answers of `peer`: one was false, or others showed one that looks so."""
        known = self._of(peer)
        known.right_in_row = 0
        known.doubted = True
        return known

    def _of(self, peer: PeerId) -> _Record:
        """The record of `peer`, moved to the most recently checked place."""
        known = self._records[peer] = self._records.get(peer) or _Record()
        return known

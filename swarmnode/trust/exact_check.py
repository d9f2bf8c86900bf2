"""Checks by the very weights: where all replicas of a stage hold equal weights, another one gives an answer again.

In a run that averages gradients before each step, all replicas of a stage hold the same weights at a step, to the bit.
A replica states a mark of its weights with each answer (ports.Replica.mark), and one that recomputes it states its own.
Where the marks are equal, the answers differ by what devices differ by, and by no more:

    the two are `same`     the answer is right
    they are not           one of the two is false; the first two of three that agree say which

A single witness confirms an answer. A false one needs two witnesses that agree with each other. No usual distance, mean
or norm of answers is needed. A replica whose mark is another one, such as a newcomer, is checked as in other runs
(auditor.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import Enum, auto

from swarmnode.base.ids import PeerId
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.trust.statement import HopAnswer
from swarmnode.trust.verdict import AnswerSimilarity

Like = Callable[[HopAnswer, HopAnswer], Awaitable[AnswerSimilarity]]
Voter = tuple[PeerId, HopAnswer]


class Exactness(Enum):
    """The state of a check by the very weights."""

    OPEN = auto()  # too few witnesses
    RIGHT = auto()
    WRONG = auto()


def of_same_weights(stated: wire.Statement, again: HopAnswer) -> bool:
    """Whether `again` was made with the weights that gave the answer of `stated`, as both say."""
    mark = b"" if again.statement is None else again.statement.mark
    return bool(stated.mark) and mark == stated.mark


class ExactCheck:
    """One answer and its witnesses: answers of other replicas with the same weights."""

    def __init__(self, answer: HopAnswer, like: Like) -> None:
        self._answer = answer
        self._like = like
        self._for = list[Voter]()
        self._against = list[tuple[Voter, AnswerSimilarity]]()

    async def hear(self, witness: Voter) -> Exactness:
        """The state of the check with one more `witness`."""
        likeness = await self._like(self._answer, witness[1])
        if likeness.same:
            self._for.append(witness)
            return Exactness.RIGHT
        for (_, other), _ in self._against:
            if (await self._like(other, witness[1])).same:
                self._against.append((witness, likeness))
                return Exactness.WRONG
        self._against.append((witness, likeness))
        return Exactness.OPEN

    @property
    def begun(self) -> bool:
        """Whether any witness was heard."""
        return bool(self._for or self._against)

    @property
    def liars(self) -> list[tuple[Voter, AnswerSimilarity]]:
        """Witnesses that gave another answer than one that is right, and how far theirs is from it."""
        return self._against if self._for else []

    def __str__(self) -> str:
        distances = ", ".join(f"{likeness.distance:.2g}" for _, likeness in self._against)
        against = f"; {len(self._against)} gave another one, {distances} away" if self._against else ""
        return f"{len(self._for)} with the same weights gave the same answer{against}"

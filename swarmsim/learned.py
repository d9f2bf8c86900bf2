"""The samples behind the weights of each replica, of all microbatches that it learned, as bits of a number.

An exchange joins what two replicas learned, a state gives what its donor learned, and what a replica learned itself is
lost where it loads a state. So a sample that is counted but in nobody's weights shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class LearnedSamples:
    """Bit i stands for sample i of those trained in the world, in the order in which a replica of their stage first
    added their gradients."""

    def __init__(self) -> None:
        self._bits: dict[tuple[int, int], int] = {}  # (stage, mark) -> samples of that microbatch
        self._sizes: dict[int, int] = {}  # stage -> bits given
        self._learned: dict[int, int] = {}  # replica -> samples
        self._marked: dict[tuple[int, int], int] = {}  # (replica, round) -> samples when its packet was made

    def trained(self, replica: int, stage: int, mark: int, samples: int) -> None:
        """`replica` of `stage` added the gradient of a microbatch."""
        if (stage, mark) not in self._bits:
            begin = self._sizes.get(stage, 0)
            self._bits[stage, mark] = ((1 << samples) - 1) << begin
            self._sizes[stage] = begin + samples
        self._learned[replica] = self._learned.get(replica, 0) | self._bits[stage, mark]

    def marked(self, replica: int, round_index: int) -> None:
        self._marked[replica, round_index] = self._learned.get(replica, 0)

    def record_meeting(self, replica: int, packets: Sequence[tuple[int, int]]) -> None:
        """`replica` averaged with `packets`: (giver, the round it was made in)."""
        for giver, made_in in packets:
            self._learned[replica] = self._learned.get(replica, 0) | self._marked.get((giver, made_in), 0)

    def loaded(self, replica: int, giver: int) -> None:
        """`replica` loaded a state of `giver`."""
        self._learned[replica] = self._learned.get(giver, 0)

    def together(self, replicas: Iterable[int]) -> int:
        """Samples that `replicas` of a stage learned together."""
        bits = 0
        for replica in replicas:
            bits |= self._learned.get(replica, 0)
        return bits.bit_count()

"""The samples that each feeder had trained here: a replica of stage 1 takes each number from a feeder once.

A feeder may send what is the run's text under its numbers, and yet one block for ever. An answer that was lost on its
way makes an honest feeder send a piece again, so a few repeats are taken, and a small share of all that was trained.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from swarmnode.base.errors import RemoteFault
from swarmnode.base.ids import PeerId, short
from swarmnode.base.remembered import Remembered

WORD = 64  # samples a word of bits
WORDS_MAX = 4096  # derived: 262,144 samples of a feeder, 300 KB; a text that is shorter is read again, in a new epoch
REPEATS_MIN = 256  # guess: samples; a replica that comes and goes loses a few answers
REPEATS_SHARE = 0.05  # guess: of a feeder's samples


class FeederTurns:
    """The samples that feeders had trained here. Pure."""

    def __init__(self) -> None:
        self._trained = Remembered[PeerId, _Numbers]()
        self._fed = Remembered[PeerId, None]()

    def record_fed(self, feeder: PeerId) -> None:
        """A microbatch of `feeder` was trained here, at whatever stage."""
        self._fed[feeder] = None

    def fed(self, feeder: PeerId) -> bool:
        """Whether a microbatch of `feeder` was trained here."""
        return feeder in self._fed

    @contextlib.contextmanager
    def turn(self, feeder: PeerId, first: int, samples: int) -> Iterator[None]:
        """Train samples [first, first + samples) of `feeder` in the block; an exception means that they were not.
        Raises RemoteFault, and trains nothing, where too many of its samples were trained before."""
        numbers = self._trained.get(feeder) or _Numbers()
        again = numbers.count(first, samples)
        allowed = REPEATS_MIN + REPEATS_SHARE * numbers.samples
        if again and numbers.repeats + again > allowed:
            raise RemoteFault(f"samples {first} to {first + samples - 1} of {short(feeder)} were trained here before")
        yield
        numbers.add(first, samples)
        self._trained[feeder] = numbers


class _Numbers:
    """The numbers of one feeder's samples."""

    def __init__(self) -> None:
        self.samples = 0
        self.repeats = 0
        self._words = dict[int, int]()  # the oldest first

    def count(self, first: int, samples: int) -> int:
        """The number of these that were there before."""
        known = 0
        for word, mask in _masks(first, samples):
            known += (self._words.get(word, 0) & mask).bit_count()
        return known

    def add(self, first: int, samples: int) -> None:
        self.samples += samples
        for word, mask in _masks(first, samples):
            known = self._words.get(word, 0)
            self.repeats += (known & mask).bit_count()
            self._words[word] = known | mask
        while len(self._words) > WORDS_MAX:
            del self._words[next(iter(self._words))]


def _masks(first: int, samples: int) -> list[tuple[int, int]]:
    """(word, its bits) of samples [first, first + samples)."""
    masks: list[tuple[int, int]] = []
    end = first + samples
    for word in range(first // WORD, -(-end // WORD)):
        low = max(first, word * WORD) % WORD
        high = min(end, (word + 1) * WORD) - word * WORD
        masks.append((word, (1 << high) - (1 << low)))
    return masks

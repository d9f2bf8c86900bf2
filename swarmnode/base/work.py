"""Three counts of training work, each of a type of its own, so that none is taken for another.

samples   windows of context + 1 tokens that were trained on
tokens    tokens read: samples times the context, masked or not. Speeds and what a machine gave are in these
targets   tokens that count in the loss: a mask leaves out the rest. Means of losses and gradients divide by these
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType, Self

SampleCount = NewType("SampleCount", int)
TokenCount = NewType("TokenCount", int)
TargetCount = NewType("TargetCount", int)


@dataclass(frozen=True, slots=True)
class Work:
    """Training work by its three counts."""

    samples: SampleCount = SampleCount(0)
    tokens: TokenCount = TokenCount(0)
    targets: TargetCount = TargetCount(0)

    @classmethod
    def of(cls, samples: int, context: int, targets: int) -> Self:
        """The work of `samples` samples of `context` tokens, of which `targets` count."""
        return cls(SampleCount(samples), TokenCount(samples * context), TargetCount(targets))

    @property
    def sound(self) -> bool:
        """Whether the counts can be those of one piece of work."""
        return 0 <= self.targets <= self.tokens and 0 <= self.samples <= self.tokens

    def __add__(self, other: Work) -> Work:
        samples = self.samples + other.samples
        tokens = self.tokens + other.tokens
        return Work(SampleCount(samples), TokenCount(tokens), TargetCount(self.targets + other.targets))

    def __sub__(self, other: Work) -> Work:
        samples = self.samples - other.samples
        tokens = self.tokens - other.tokens
        return Work(SampleCount(samples), TokenCount(tokens), TargetCount(self.targets - other.targets))

    def times(self, share: float) -> Work:
        """This share of the work, in whole counts."""
        samples = round(share * self.samples)
        tokens = round(share * self.tokens)
        return Work(SampleCount(samples), TokenCount(tokens), TargetCount(round(share * self.targets)))

"""A token bucket: so many tokens at once, and so many a second in the long run."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from swarmnode.remembered import Remembered


@dataclass(slots=True)
class TokenBucket:
    """A token bucket: refills by `rate` a second up to `burst`. Time may jump back; then nothing is refilled."""

    rate: float
    burst: float
    tokens: float
    at_s: float
    refused: int = 0

    @classmethod
    def full(cls, rate: float, burst: float, now_s: float) -> TokenBucket:
        """A bucket with `burst` tokens."""
        return cls(rate, burst, burst, now_s)

    def overrun(self, count: int) -> bool:
        """Whether `count` more were refused since this was last true."""
        if self.refused < count:
            return False
        self.refused = 0
        return True

    def fill(self, now_s: float) -> float:
        """Refill until `now_s`; return the tokens."""
        self.tokens = min(self.burst, self.tokens + max(0.0, now_s - self.at_s) * self.rate)
        self.at_s = now_s
        return self.tokens

    def spend(self, now_s: float, tokens: float) -> None:
        """Take `tokens`, available or not: what is owed is refilled first."""
        self.fill(now_s)
        self.tokens -= tokens

    def take(self, now_s: float, tokens: float = 1.0) -> bool:
        """Take `tokens` if available; return whether they were."""
        self.fill(now_s)
        if self.tokens < tokens:
            self.refused += 1
            return False
        self.tokens -= tokens
        return True


class TokenBuckets:
    """A bucket for each key, such as a peer; the one used longest ago is forgotten first."""

    def __init__(self) -> None:
        self._of = Remembered[Hashable, TokenBucket]()

    def __len__(self) -> int:
        return len(self._of)

    def get(self, key: Hashable) -> TokenBucket | None:
        """The bucket of `key`, if there is one."""
        return self._of.get(key)

    def of(self, key: Hashable, rate: float, burst: float, now_s: float) -> TokenBucket:
        """The bucket of `key`, full if it is new."""
        bucket = self._of[key] = self._of.get(key) or TokenBucket.full(rate, burst, now_s)
        return bucket

"""A token bucket: so many tokens at once, and so many a second in the long run."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

from swarmnode.base.remembered import Remembered


@dataclass(slots=True)
class TokenBucket:
    """A token bucket: refills by `rate` a second up to `burst`. Time may jump back; then nothing is refilled."""

    rate: float
    burst: float
    tokens: float
    at_s: float
    refused: int = 0

    @classmethod
    def full(cls, rate: float, burst: float) -> TokenBucket:
        """A bucket with `burst` tokens."""
        return cls(rate, burst, burst, 0.0)

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


class PeerBudget:
    """A bucket for each key, such as a peer, and one that all of them share. The key that came longest ago is forgotten
    first."""

    def __init__(self, rate: float, burst: float, all_rate: float = 0.0, all_burst: float = math.inf) -> None:
        """Without `all_rate` and `all_burst` the keys share nothing."""
        self._each = rate, burst
        self._all = TokenBucket.full(all_rate, all_burst)
        self._of = Remembered[Hashable, TokenBucket]()

    def __len__(self) -> int:
        return len(self._of)

    def of(self, key: Hashable) -> TokenBucket:
        """The bucket of `key`, full if it is new."""
        bucket = self._of[key] = self._of.get(key) or TokenBucket.full(*self._each)
        return bucket

    def spend(self, key: Hashable, now_s: float, tokens: float) -> None:
        """Take `tokens` of both, available or not."""
        self.of(key).spend(now_s, tokens)
        self._all.spend(now_s, tokens)

    def take(self, key: Hashable, now_s: float, tokens: float = 1.0) -> bool:
        """Take `tokens` from the bucket of `key` and from that of all; return whether both had them."""
        return self.of(key).take(now_s, tokens) and self._all.take(now_s, tokens)

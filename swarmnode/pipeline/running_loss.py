"""The training loss as a node shows it: nats per counted token, smoothed over its last microbatches."""

from __future__ import annotations

from swarmnode.ema import Ema

DECAY = 0.05  # guess: smooths over about 20 microbatches


class RunningLoss:
    """Summed losses over counted tokens, both smoothed alike: a microbatch with few counted tokens weighs little, one
    with none nothing."""

    def __init__(self) -> None:
        self._nats = Ema(DECAY)
        self._tokens = Ema(DECAY)

    def add(self, loss_sum: float, tokens: int) -> None:
        """A microbatch with so many counted tokens lost `loss_sum` nats on them."""
        self._nats.add(loss_sum)
        self._tokens.add(tokens)

    @property
    def known(self) -> bool:
        """Whether any token was counted."""
        return self._tokens.value > 0.0

    @property
    def value(self) -> float:
        """Nats per token; 0 before any token was counted."""
        return self._nats.value / self._tokens.value if self.known else 0.0

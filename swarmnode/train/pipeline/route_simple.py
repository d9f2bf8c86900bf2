"""The route of a microbatch, in its simplest form: interleaved weighted round robin, with a retry at another replica.

Source: SWARM parallelism, arXiv 2301.11913, section 3.2 and appendix C. route.py and next_hop.py do the same, and
beside it what a network of strangers needs: bans and pings, bounds on what a peer says of itself, pauses, reservations,
time on lines. tests/pipeline/test_route_simple.py holds them against this module.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from typing import TypeVar

from swarmnode.base.errors import Unavailable
from swarmnode.base.ids import PeerId

DECAY = 0.1  # weight of the newest time in the moving average; SWARM's public code
Answer = TypeVar("Answer")


class SimpleRouter:
    """Chooses among the replicas of one stage; `seconds_per_sample` is what each announces."""

    def __init__(self, seconds_per_sample: dict[PeerId, float], epsilon: float, rng: random.Random) -> None:
        self.epsilon = epsilon
        self.rng = rng
        self.announced = seconds_per_sample
        self.virtual_s = dict.fromkeys(seconds_per_sample, 0.0)
        """Seconds of work given to each replica: it would be free then if it had worked since the beginning."""
        self._sum = dict.fromkeys(seconds_per_sample, 0.0)
        self._weight = dict.fromkeys(seconds_per_sample, 0.0)

    def seconds(self, peer: PeerId) -> float:
        """Seconds of a sample at `peer`: the mean of its answers, the last ones most; before the first its word."""
        return self._sum[peer] / self._weight[peer] if self._weight[peer] else self.announced[peer]

    def choose(self, samples: int, tried: Collection[PeerId] = ()) -> PeerId:
        """The replica that would be free first, charged at once. Twice as fast is twice as often. A share `epsilon` of
        choices is uniform, so that replicas mix. Raises Unavailable if all were tried."""
        able = sorted(self.virtual_s.keys() - set(tried))
        if not able:
            raise Unavailable(f"all {len(self.virtual_s)} replicas of the stage were tried")
        if self.rng.random() < self.epsilon:
            peer = self.rng.choice(able)
        else:
            peer = min(able, key=lambda one: self.virtual_s[one])
        self.virtual_s[peer] += samples * self.seconds(peer)
        return peer

    def record_answer(self, peer: PeerId, samples: int, seconds: float) -> None:
        """`peer` answered a microbatch of `samples` after `seconds`, later stages left out: its queue is in, so that a
        full replica looks slow."""
        self._sum[peer] += DECAY * (seconds / samples - self._sum[peer])
        self._weight[peer] += DECAY * (1.0 - self._weight[peer])

    def enter(self, peer: PeerId, seconds_per_sample: float) -> None:
        """A replica joins the stage: it begins at the least virtual time, neither flooded nor starved."""
        least = min(self.virtual_s.values(), default=0.0)
        self.announced[peer] = seconds_per_sample
        self.virtual_s[peer] = least
        self._sum[peer] = 0.0
        self._weight[peer] = 0.0

    def leave(self, peer: PeerId) -> None:
        """A replica leaves the stage."""
        for known in (self.announced, self.virtual_s, self._sum, self._weight):
            known.pop(peer, None)


def send(router: SimpleRouter, samples: int, call: Callable[[PeerId], tuple[Answer, float]]) -> Answer:
    """Have a replica of the next stage work on a microbatch, and return its answer: the gradient.

    `call` sends the activations and returns (answer, seconds), or raises Unavailable. The caller still holds what it
    sent, so that a dead replica costs one retry. Raises Unavailable if no replica answers.
    """
    tried: list[PeerId] = []
    while True:
        peer = router.choose(samples, tried)
        try:
            answer, seconds = call(peer)
        except Unavailable:
            tried.append(peer)
            continue
        router.record_answer(peer, samples, seconds)
        return answer

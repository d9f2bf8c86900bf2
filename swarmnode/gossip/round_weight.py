"""The weight of a replica's own packet in a round: 1, or 0 if it has nothing of its own to give."""

from __future__ import annotations

from collections.abc import Callable


class RoundWeight:
    """The weight of one replica's packets.

    A newcomer's first round of each fragment of the weights counts nothing of its own, so that it starts from what the
    others have. A replica that has trained nothing since the last round of a fragment is idle: it takes what its
    partner learned. Averaged with the same weight, it would halve that (measured: `bench attack --pipeline`, where a
    replica that its callers excluded still met the others of its stage, cost .04 to .06 nat after 5,000 samples).
    """

    def __init__(
        self,
        fragments: int,
        samples_here: Callable[[], int],
        *,
        newcomer: bool,
        least: Callable[[], int] = lambda: 0,
    ) -> None:
        """`least`: samples of half a round, which a newcomer that serves before it received one must have trained to
        count. It began from slow weights, and averaged with the same weight would halve what its partner learned."""
        self._fragments = fragments
        self._samples_here = samples_here
        self._least = least
        self._received = set[int]()  # a newcomer's: fragments that had a round
        self._short: dict[int, int] = {}  # fragments without a round when it began to serve, and samples until then
        self._trained: dict[int, int] = {}  # samples trained here by the last round of each fragment
        self.newcomer = newcomer

    def of(self, round_index: int) -> float:
        """0 for a newcomer, and where no sample was trained since the fragment's last round. Before its first round a
        replica that is no newcomer counts: its snapshot may hold what was learned."""
        fragment, samples = round_index % self._fragments, self._samples_here()
        unheard = self.newcomer and fragment not in self._received
        few = fragment in self._short and samples - self._short[fragment] < self._least()
        return 0.0 if unheard or few or self._trained.get(fragment) == samples else 1.0

    def met(self, round_index: int, samples: int) -> None:
        """The round is over; its packet held what `samples` trained here came to.

        A lone step ends a newcomer's wait too: where rounds are slow, a newcomer that waited for a pair stood by for
        minutes (simulated: everything, seeds 102 and 104)."""
        fragment = round_index % self._fragments
        self._trained[fragment] = samples
        self._received.add(fragment)
        self._short.pop(fragment, None)
        if not self.newcomer or len(self._received) == self._fragments:
            self.restored(newcomer=False)

    def serve(self) -> None:
        """A newcomer begins to serve, whatever rounds it received."""
        if self.newcomer:
            self._short = dict.fromkeys({*range(self._fragments)} - self._received, self._samples_here())
        self.restored(newcomer=False)

    def restored(self, *, newcomer: bool) -> None:
        """The replica was given a state; a `newcomer` receives a round of each fragment first."""
        self.newcomer, self._received = newcomer, set()

"""A replica's work that is done once again, with less, where memory ran out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from swarmnode.base.errors import LocalFault
from swarmnode.base.ids import stage_name
from swarmnode.base.parted_work import Parts, run_whole
from swarmnode.model.device import tried, twice
from swarmnode.model.stage import StageReplica
from swarmnode.train.gossip.outer import Outer

T = TypeVar("T")


class MemoryRetry:
    """Does the work of `stage` and of the rounds of `outer`; `times` counts how often memory ran out."""

    def __init__(self, stage: StageReplica, outer: Outer) -> None:
        self._stage = stage
        self._outer = outer
        self._name = stage_name(stage.part.stage)
        self.times = 0
        self.short = False
        """Whether memory has run out in the piece of work that is under way."""

    def microbatch(self, work: Callable[[], T]) -> T:
        """`work`; if memory runs out, once again with less. Raises Busy if it runs out again: then nothing of the
        microbatch is counted."""
        self.short = False
        try:
            return twice(work, self._relieve, self._name)
        except BaseException:
            if self._stage.unsettled is None:
                self._stage.give_up()
            raise
        finally:
            self.short = False

    def settle(self) -> None:
        """`StageReplica.settle`, as `microbatch`; where that fails, all that is accumulated is dropped."""
        try:
            self.microbatch(self._stage.settle)
        except BaseException:
            self._stage.give_up()
            raise

    def in_round(self, work: Callable[[], T]) -> T:
        """A round's `work`; if memory runs out, once again without the graphs of microbatches. Raises LocalFault if it
        runs out again, or where the work cannot be repeated."""
        return run_whole(self.beside(work))

    def beside(self, work: Callable[[], T]) -> Parts[T]:
        """`in_round`, with `work` beside the device."""
        for _ in range(2):
            done, value = yield partial(tried, work)
            if done:
                return value  # type: ignore[no-any-return]
            if self._outer.stepping:
                break
            self._relieve()
        raise LocalFault(
            f"memory ran out in a round of {self._name}, also without microbatches: free some memory of"
            f" {self._stage.device}, or serve a smaller stage"
        )

    def _relieve(self) -> None:
        self.times += 1
        self.short = True
        self._stage.relieve()

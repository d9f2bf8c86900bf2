"""The responder's side of an exchange, and how either side begins before its packet is written."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from swarmnode.errors import Unavailable
from swarmnode.ids import PeerId
from swarmnode.ports import Draft, Packet, WireTensor

T = TypeVar("T")


@dataclass(slots=True)
class Meeting:
    """The responder's side of one round: its packet for the caller, and the caller's packet once it came."""

    round_index: int
    partner: PeerId
    tensors: Sequence[WireTensor]
    weight: float
    samples: int
    packet: Packet | None = None
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    verdict: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    async def said(self, within_s: float) -> bool:
        """What the caller says of this exchange. Raises Unavailable when it does not call `within_s`."""
        try:
            async with asyncio.timeout(within_s if within_s < float("inf") else None):
                await self.arrived.wait()
        except TimeoutError:
            raise Unavailable(f"it did not call within {within_s:.3g} s, as long as a round takes") from None
        return await self.verdict

    def end(self, apply: bool) -> None:
        """The caller's word on this exchange; the first one counts."""
        if not self.verdict.done():
            self.verdict.set_result(apply)
            self.arrived.set()

    def over(self) -> bool:
        """Nobody waits any longer, and a commit from now on is refused. Whether one came before."""
        self.end(False)
        return not self.verdict.cancelled() and self.verdict.result()


async def while_written(draft: Draft, work: Coroutine[object, object, T]) -> T:
    """What `work`, which sends the tensors of `draft`, returns; the draft is finished by then. What stops the draft
    stops `work`, and is raised in a group, as a LocalFault."""
    if draft.complete:
        return await work
    async with asyncio.TaskGroup() as group:
        group.create_task(draft.finished())
        return await work

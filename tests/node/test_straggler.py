"""Nodes that take work and never give it back, and nodes that stand still: the others go round them."""

from __future__ import annotations

import asyncio

from swarmnode.ids import PeerId
from swarmnode.ports import Answer, Call
from tests.support.village import Village, Villager, manifest, village


def bans(v: Village, of: Villager) -> list[str]:
    return [
        str(fields["reason"])
        for person in v.people
        for event, fields in person.quiet.events
        if event == "peer.banned" and fields["peer"] == of.node.me
    ]


async def test_a_node_that_answers_pings_and_nothing_else_is_banned_and_comes_back() -> None:
    async def never(peer: PeerId, call: Call) -> Answer:
        await asyncio.Event().wait()
        raise AssertionError

    async with village(manifest(), stages=(0, 1, 2, 0, 1, 2)) as v:
        await v.fed(128)
        gray = v.people[1]
        hop, handlers = gray.served.hop, dict(gray.served.handlers())
        gray.served.handlers = lambda: {**handlers, "process": never}  # type: ignore[method-assign]
        await v.until(lambda: bool(bans(v, gray)), "the gray node is banned")
        assert any("answers pings" in reason for reason in bans(v, gray)), bans(v, gray)
        await v.trains(128, "the others train on")
        gray.served.handlers = lambda: handlers  # type: ignore[method-assign]
        samples = hop.samples
        await v.until(lambda: hop.samples > samples, "it gets work again when it works again")

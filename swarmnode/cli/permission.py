"""Whether this daemon may still take part, all the while."""

from __future__ import annotations

from swarmnode.cli.desk import Process
from swarmnode.cli.entrance import read_guests
from swarmnode.ids import seeded
from swarmnode.node import guests
from swarmnode.node.node import Node
from swarmnode.node.notice import Notices
from swarmnode.transport.address import parse_bootstraps


async def stay_permitted(process: Process, node: Node | None, notices: Notices) -> None:
    """Keep the owner's guest list current; leave when we are no longer on it."""
    bootstraps = [peer for peer, _ in parse_bootstraps(process.options.bootstrap)]
    why = await guests.keep_guests(
        process.door,
        process.transport,
        lambda: bootstraps if node is None else [*bootstraps, *(m.peer for m in node.presence.book.swarm().members())],
        seeded(process.run_id, "guests", process.transport.peer_id),
        process.telemetry,
        (lambda: None) if node is None else node.presence.turn_out,
        here=lambda: read_guests(process.options),
    )
    process.forbidden.append(why)
    notices.leave(why)

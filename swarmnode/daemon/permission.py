"""Check continuously whether this daemon may still take part."""

from __future__ import annotations

from swarmnode.daemon.admission import read_access_list
from swarmnode.daemon.control_api import DaemonContext
from swarmnode.ids import seeded
from swarmnode.node import access_list
from swarmnode.node.node import Node
from swarmnode.node.notice import Notices
from swarmnode.transport.address import parse_bootstraps


async def stay_permitted(process: DaemonContext, node: Node | None, notices: Notices) -> None:
    """Keep the owner's access list current; leave if it no longer admits us."""
    bootstraps = [peer for peer, _ in parse_bootstraps(process.options.bootstrap)]
    why = await access_list.keep_access_list(
        process.admission,
        process.transport,
        lambda: (
            bootstraps if node is None else [*bootstraps, *(m.peer for m in node.presence.peer_table.swarm().members())]
        ),
        seeded(process.run_id, "access_list", process.transport.peer_id),
        process.telemetry,
        (lambda: None) if node is None else node.presence.evict_unauthorized,
        here=lambda: read_access_list(process.options),
    )
    process.forbidden.append(why)
    notices.leave(why)

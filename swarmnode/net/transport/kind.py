"""The transports that a run's manifest can choose (transport.kind): libp2p, and those of installed packages, which name
a subclass of StreamTransport under the entry point `swarmnode.transports`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from swarmnode.base import plugin
from swarmnode.base.errors import UsageError
from swarmnode.base.identity import Identity
from swarmnode.base.ids import RunId
from swarmnode.net.transport.call_directory import CallDirectory
from swarmnode.net.transport.stream_transport import StreamTransport

LIBP2P = "libp2p"


def _transport(kind: str) -> Any:
    """The class of `kind`. Raises UsageError."""
    if kind == LIBP2P:
        from swarmnode.net.transport.libp2p import Libp2pTransport

        return Libp2pTransport
    if (transport := plugin.load(plugin.TRANSPORTS, kind)) is None:
        raise UsageError(f"the transport {kind} is not installed here: install its package")
    return transport


def kind_of(addresses: Iterable[str]) -> str:
    """The transport that is spoken at `addresses`, for a machine that does not have the manifest yet."""
    if any("/udp/" in address for address in addresses):
        for kind in plugin.names(plugin.TRANSPORTS):
            if _transport(kind).ip_protocol == "udp":
                return kind
    return LIBP2P


async def open_transport(
    kind: str, identity_path: Path, identity: Identity, run_id: RunId, listen: Sequence[str], **given: Any
) -> StreamTransport:
    """A transport of `kind`, which takes the ports of `listen` in its own protocol. Raises UsageError, LocalFault."""
    transport = _transport(kind)
    listen = [address.replace("/tcp/", f"/{transport.ip_protocol}/") for address in listen]
    opened: StreamTransport = await transport.create(identity_path, identity, run_id, listen, **given)
    return opened


def directory_of(kind: str) -> type[CallDirectory]:
    """The directory that goes with a transport of `kind`."""
    if kind != LIBP2P:
        return CallDirectory
    from swarmnode.net.transport.directory import DhtDirectory

    return DhtDirectory

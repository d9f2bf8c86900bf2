"""The transports that a run's manifest can choose (transport.kind)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from swarmnode.identity import Identity
from swarmnode.ids import RunId
from swarmnode.transport.call_directory import CallDirectory
from swarmnode.transport.stream_transport import StreamTransport

LIBP2P, IROH = "libp2p", "iroh"


def kind_of(addresses: Iterable[str]) -> str:
    """The transport that is spoken at `addresses`, for who does not have the manifest yet."""
    return IROH if any("/udp/" in address for address in addresses) else LIBP2P


async def open_transport(
    kind: str, identity_path: Path, identity: Identity, run_id: RunId, listen: Sequence[str], **given: Any
) -> StreamTransport:
    """A transport of `kind`, which takes the ports of `listen` in its own protocol. Raises UsageError, LocalFault."""
    if kind == IROH:
        from swarmnode.transport.iroh import IrohTransport

        listen = [address.replace("/tcp/", "/udp/") for address in listen]
        return await IrohTransport.create(identity_path, identity, run_id, listen, **given)
    from swarmnode.transport.libp2p import Libp2pTransport

    return await Libp2pTransport.create(identity_path, identity, run_id, listen, **given)


def directory_of(kind: str) -> type[CallDirectory]:
    """The directory that goes with a transport of `kind`."""
    if kind == IROH:
        return CallDirectory
    from swarmnode.transport.directory import DhtDirectory

    return DhtDirectory

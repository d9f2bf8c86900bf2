"""Requests to p2pd over its control socket, in p2pd's own protocol: one on a connection, which may become a stream."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

from swarmnode.base.errors import RemoteFault
from swarmnode.base.identity import peer_id_bytes
from swarmnode.base.ids import PeerId
from swarmnode.net.membership.liveness import SMALL_CALL_S
from swarmnode.net.transport.address import is_circuit, parse_bootstrap
from swarmnode.net.transport.stream import P2pdStream

CONTROL_TIMEOUT_S = SMALL_CALL_S  # p2pd answers on its own machine within a millisecond
CONTROL_BYTES_MAX = 64 << 10  # guess: an error text, or a few hundred addresses
ERROR_CHARACTERS_MAX = 256

# Codes of the multiaddr table.
_P2P = 421
_P2P_CIRCUIT = 290

Request = p2pd_pb2.Request
IDENTIFY = Request(type=Request.IDENTIFY)


def serve_streams(protocol: str, socket: Path) -> Any:
    """Hand incoming streams of `protocol` to `socket`."""
    handler = p2pd_pb2.StreamHandlerRequest(
        addr=Multiaddr(f"/unix{socket}").to_bytes(), proto=[protocol], balanced=False
    )
    return Request(type=Request.STREAM_HANDLER, streamHandler=handler)


def open_stream(peer: PeerId, protocols: Sequence[str], timeout_s: float) -> Any:
    """Open a stream to `peer` in the first of `protocols` that it speaks: the connection becomes it."""
    opening = p2pd_pb2.StreamOpenRequest(peer=peer_id_bytes(peer), proto=protocols, timeout=max(1, round(timeout_s)))
    return Request(type=Request.STREAM_OPEN, streamOpen=opening)


def connect(peer: PeerId, addresses: Sequence[str], timeout_s: float) -> Any:
    """Connect to `peer` at one of `addresses`."""
    addrs = [_binary(address) for address in addresses]
    connecting = p2pd_pb2.ConnectRequest(peer=peer_id_bytes(peer), addrs=addrs, timeout=round(timeout_s))
    return Request(type=Request.CONNECT, connect=connecting)


def disconnect(peer: PeerId) -> Any:
    """Close all connections to `peer`."""
    return Request(type=Request.DISCONNECT, disconnect=p2pd_pb2.DisconnectRequest(peer=peer_id_bytes(peer)))


async def open_connection(socket: Path) -> P2pdStream:
    """A connection to p2pd. Raises OSError."""
    _, stream = await asyncio.get_running_loop().create_unix_connection(P2pdStream, str(socket))
    return stream


async def ask(socket: Path, request: Any, timeout_s: float) -> tuple[P2pdStream, Any]:
    """(the connection of `request`, the response). Raises P2PDaemonError if p2pd refuses, OSError (TimeoutError is one)
    if it does not answer."""
    stream = None
    try:
        async with asyncio.timeout(timeout_s):
            stream = await open_connection(socket)
            raw = request.SerializeToString()
            await stream.write(_varint(len(raw)) + raw)
            response = p2pd_pb2.Response.FromString(await _read_delimited(stream))
        if response.type == p2pd_pb2.Response.ERROR:
            raise P2PDaemonError(" ".join(response.error.msg.split())[:ERROR_CHARACTERS_MAX])
    except BaseException:
        if stream is not None:
            stream.abort()
        raise
    return stream, response


async def connections(p2p: Any) -> list[tuple[PeerId, list[str]]]:
    """(peer, its remote addresses) of each connection, by hivemind's `p2p`. Raises P2PDaemonError, OSError."""
    async with asyncio.timeout(CONTROL_TIMEOUT_S):
        infos = await p2p.list_peers()
    return [(PeerId(info.peer_id.to_base58()), list(map(str, info.addrs))) for info in infos]


async def read_stream_info(stream: P2pdStream) -> Any:
    """p2pd's words on an incoming `stream`, which come first on it: its peer, address and protocol. Raises
    ConnectionResetError, DecodeError."""
    return p2pd_pb2.StreamInfo.FromString(await _read_delimited(stream))


async def _read_delimited(stream: P2pdStream) -> bytes:
    """A message prefixed with its length as a varint. Raises ConnectionResetError if it is too long."""
    length = 0
    for shift in range(0, 35, 7):
        byte = (await stream.read(1))[0]
        length |= (byte & 0x7F) << shift
        if not byte & 0x80:
            break
    if length > CONTROL_BYTES_MAX:
        raise ConnectionResetError(f"p2pd announced a message of {length} bytes; at most {CONTROL_BYTES_MAX}")
    return await stream.read(length)


def _binary(address: str) -> bytes:
    """`address` in libp2p's binary form. hivemind encodes the relay's id inside a circuit as a CID, which p2pd cannot
    read."""
    if not is_circuit(address):
        return bytes(Multiaddr(address).to_bytes())
    relay, endpoint = parse_bootstrap(address.removesuffix("/p2p-circuit"))
    raw = peer_id_bytes(relay)
    return bytes(Multiaddr(endpoint).to_bytes()) + _varint(_P2P) + _varint(len(raw)) + raw + _varint(_P2P_CIRCUIT)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


@functools.lru_cache(maxsize=4096)
def peer_of(raw: bytes) -> PeerId:
    """The peer id of p2pd's 38 bytes. Raises RemoteFault for a key that is not Ed25519."""
    peer = PeerID(raw).to_base58()
    if peer_id_bytes(PeerId(peer)) != raw:
        raise RemoteFault(f"{peer} is not an Ed25519 peer id")
    return PeerId(peer)

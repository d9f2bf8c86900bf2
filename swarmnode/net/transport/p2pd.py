"""Start p2pd, the libp2p daemon that comes with hivemind."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hivemind import hivemind_cli
from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.p2pclient import Client
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.utils.multiaddr import Multiaddr

from swarmnode.net.transport import dial_filter

STARTUP_TIMEOUT_S = 60.0  # guess: covers eight nodes starting on two busy cores; alone it takes 0.15 s (measured)
CONTROL_SOCKET = "p2pd"
UNARY_BYTES_MAX = 4 << 20  # hivemind's default: the most that a DHT message may hold


@dataclass(frozen=True, slots=True)
class NetworkMode:
    """p2pd's reachability settings.

    "local": uses only its own addresses (a swarm on one machine). "open": asks the router for a port (UPnP), dials
    through relays, punches holes. "public": the same, and relays for others, without libp2p's limit of 128 KiB a
    circuit. "private": keeps a place at `relays` (multiaddrs with /p2p/ID), through which others reach it.
    """

    kind: str = "local"
    relays: tuple[str, ...] = ()

    def options(self) -> dict[str, Any]:
        """p2pd's flags. Its own search for relays (relayDiscovery) waits up to 3 minutes, so it is off."""
        options: dict[str, Any] = {"autonat": False, "natPortMap": False, "relay": False}
        if self.kind == "local":
            return options
        options = {"autonat": True, "natPortMap": True, "relay": True, "relayDiscovery": False, "relayService": False}
        if self.kind == "public":
            options |= {"forceReachabilityPublic": True, "relayService": True, "relayMaxCircuits": 256}
        if self.kind == "private":
            options |= {"forceReachabilityPrivate": True, "autoRelay": True, "trustedRelays": ",".join(self.relays)}
        return options

    def environ(self) -> dict[str, str]:
        """Environment variables for p2pd.

        p2pd starts two relay services, one with its flags' limits and one with libp2p's default of 128 KiB a circuit,
        and peers get the one that started last. On several processors that is random (the wrong one in 2 of 5 starts on
        a busy machine); on one it is the right one (8 of 8, measured). So a relay runs p2pd on one processor.
        """
        return {"GOMAXPROCS": "1"} if self.kind == "public" else {}


async def launch(
    identity_path: Path, sockets: Path, listen: Sequence[str], announce: Sequence[str], network_mode: NetworkMode
) -> tuple[Any, int | None]:
    """A running hivemind P2P, and the listener of its dials (dial_filter.py). Raises P2PDaemonError, OSError.

    `P2P.create` puts its sockets in /tmp and leaves p2pd in our process group, where Ctrl-C kills it before the node
    could leave in order. This does the same with private sockets and a separate session.
    """
    (sockets / CONTROL_SOCKET).unlink(missing_ok=True)  # left by a killed one
    p2p = P2P()
    p2p._daemon_listen_maddr = Multiaddr(f"/unix{sockets}/{CONTROL_SOCKET}")
    p2p._client_listen_maddr = Multiaddr(f"/unix{sockets}/client")
    try:
        async with asyncio.timeout(STARTUP_TIMEOUT_S):
            arguments = _arguments(identity_path, p2p._daemon_listen_maddr, listen, announce, network_mode)
            dials = await _start_child(p2p, arguments, network_mode.environ(), sockets, identity_path)
            p2p._client = await Client.create(
                control_maddr=p2p._daemon_listen_maddr,
                listen_maddr=p2p._client_listen_maddr,
                persistent_conn_max_msg_size=UNARY_BYTES_MAX,
            )
            await p2p._ping_daemon()
    except TimeoutError:
        await p2p.shutdown()
        raise P2PDaemonError(f"not ready after {STARTUP_TIMEOUT_S:.0f} s") from None
    except BaseException:
        await p2p.shutdown()
        raise
    return p2p, dials


def _arguments(
    identity_path: Path, control: Any, listen: Sequence[str], announce: Sequence[str], network_mode: NetworkMode
) -> list[str]:
    options = {
        "id": str(identity_path),
        "listen": control,
        "hostAddrs": ",".join(listen),
        "dhtServer": True,
        "b": False,
        "connManager": True,
        **network_mode.options(),
        "tls": True,
        "idleTimeout": f"{STARTUP_TIMEOUT_S:.0f}s",  # without the node's connection it exits by itself
        "persistentConnMaxMsgSize": UNARY_BYTES_MAX,
    }
    if announce:
        options["announceAddrs"] = ",".join(announce)
    binary = Path(hivemind_cli.__file__).with_name("p2pd")
    return list(P2P._make_process_args(str(binary), **options))


async def _start_child(
    p2p: Any, arguments: Sequence[str], environ: Mapping[str, str], sockets: Path, key: Path
) -> int | None:
    """Start p2pd and wait until it reports to be ready; return the listener of its dials, None without a filter."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    ours, theirs = socket.socketpair()
    filtered = [sys.executable, "-I", "-m", dial_filter.__name__, str(theirs.fileno()), str(sockets), str(key)]
    first = filtered if dial_filter.SUPPORTED else []
    p2p._child = await asyncio.create_subprocess_exec(
        *first,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | {"GOLOG_LOG_LEVEL": "error", "GOLOG_LOG_FMT": "json"} | dict(environ),
        start_new_session=True,
        pass_fds=(theirs.fileno(),),
    )
    theirs.close()
    with ours:
        ours.settimeout(STARTUP_TIMEOUT_S)
        _, listeners, _, _ = await asyncio.to_thread(socket.recv_fds, ours, 1, 1)
    p2p._alive = True
    p2p._reader_task = loop.create_task(p2p._read_outputs(ready))  # `P2P.shutdown` cancels it
    await ready
    return listeners[0] if listeners else None

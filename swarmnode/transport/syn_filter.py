"""Sockets beside p2pd's on the same port; the kernel gives them the connections that p2pd must not see.

go-libp2p listens with SO_REUSEPORT. So this process (of the same user, without privileges) can listen on the same port
and attach the program that chooses a socket for each SYN: classic BPF over its source address (socket(7),
SO_ATTACH_REUSEPORT_CBPF). A dropped SYN costs the attacker a timeout and us almost nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import socket
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

from swarmnode.transport.address import Endpoint

BACKLOG = 64  # connections of a flood examined per period, at most
_ATTACH_FILTER, _ATTACH_REUSEPORT_CBPF, _MEMINFO, _MEMINFO_DROPS = 26, 51, 55, 8  # asm-generic/socket.h, sock_diag.h
_LOAD, _EQUAL, _GREATER, _RETURN = 0x20, 0x15, 0x25, 0x06  # linux/bpf_common.h
_NETWORK, _RANDOM = -0x100000, -0x1000 + 56  # offsets of the IP header, and of a random word: linux/filter.h
_SOURCE = {4: _NETWORK + 12, 6: _NETWORK + 8}
_P2PD, _SAMPLE, _SILENT = 0, 1, 2  # in the order in which they began to listen
_SNMP = Path("/proc/self/net/snmp")
ADDRESSES_MAX = 256  # of each kind; a program has at most 4096 instructions
_WORD_MAX = 0xFFFFFFFF

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


def program(
    version: int, denied: Iterable[str], friends: Iterable[str], share: float, sample: float
) -> list[Instruction]:
    """The BPF program that chooses the socket for a SYN of IP `version`.

    p2pd gets `friends` and a random `share` of the rest without `denied`. Of the rejected, `sample` are accepted and
    examined. An IPv6 address counts as its /64.
    """
    away: list[Instruction] = [(_RETURN, 0, 0, _SILENT)]
    if sample:
        away = [(_LOAD, 0, 0, _RANDOM), (_GREATER, 1, 0, int(sample * _WORD_MAX)), (_RETURN, 0, 0, _SAMPLE), *away]
    code: list[Instruction] = []
    for addresses, answer in ((denied, away), (friends, [(_RETURN, 0, 0, _P2PD)])):
        for words in sorted(_words(version, addresses))[:ADDRESSES_MAX]:
            for at, word in enumerate(words):
                code.append((_LOAD, 0, 0, _SOURCE[version] + 4 * at))
                code.append((_EQUAL, 0, 2 * (len(words) - at - 1) + len(answer), word))
            code += answer
    if share < 1.0:
        code += [(_LOAD, 0, 0, _RANDOM), (_GREATER, 0, len(away), int(share * _WORD_MAX)), *away]
    return [*code, (_RETURN, 0, 0, _P2PD)]


def _words(version: int, addresses: Iterable[str]) -> set[tuple[int, ...]]:
    found = set()
    for text in addresses:
        with contextlib.suppress(ValueError):
            address = ipaddress.ip_address(text)
            if address.version == version:
                found.add(struct.unpack(f">{1 if version == 4 else 2}I", address.packed[: 4 if version == 4 else 8]))
    return found


def opened() -> int:
    """TCP connections accepted so far in this network namespace, by any program. Raises OSError, ValueError."""
    names, values = (line.split() for line in _SNMP.read_text().splitlines() if line.startswith("Tcp:"))
    return int(values[names.index("PassiveOpens")])


class SynFilter:
    """Sockets beside p2pd's at `endpoints`. Raises OSError if p2pd does not share its port."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self._sockets: list[tuple[int, socket.socket, socket.socket]] = []  # version, sample, silent
        self._dropped = 0
        try:
            for endpoint in endpoints:
                self._open(endpoint)
        except OSError:
            self.close()
            raise

    def _open(self, endpoint: Endpoint) -> None:
        version = 4 if endpoint.family == "ip4" else 6
        family = socket.AF_INET if version == 4 else socket.AF_INET6
        sample, silent = (socket.socket(family, socket.SOCK_STREAM) for _ in range(2))
        self._sockets.append((version, sample, silent))
        _attach(silent, _ATTACH_FILTER, [(_RETURN, 0, 0, 0)])  # refuses even a SYN
        for beside in (sample, silent):
            beside.setblocking(False)
            beside.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if version == 6:
                beside.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            beside.bind((endpoint.host, endpoint.port))
            beside.listen(BACKLOG)
            _attach(beside, _ATTACH_REUSEPORT_CBPF, _ALL_P2PD)  # at once: until then the kernel distributes at random

    def route(self, denied: Iterable[str], friends: Iterable[str], share: float, sample: float) -> None:
        """Make the kernel choose sockets by these rules from now on. The caller's kernel retries a silently dropped SYN
        after 1 s, then 2. Sampled connections are reset at the next `take`."""
        denied, friends = list(denied), list(friends)
        for version, beside, _ in self._sockets:
            _attach(beside, _ATTACH_REUSEPORT_CBPF, program(version, denied, friends, share, sample))

    def take(self) -> tuple[int, tuple[str, ...]]:
        """Attempts rejected since the last call, and the source addresses of the sampled ones."""
        sampled: list[str] = []
        for _, sample, _ in self._sockets:
            with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
                while len(sampled) <= 2 * BACKLOG:
                    stranger, address = sample.accept()
                    sampled.append(address[0])
                    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    stranger.close()  # sends a reset: no state remains
        total = sum(_dropped(beside) for _, *pair in self._sockets for beside in pair)
        dropped, self._dropped = total - self._dropped, total
        return dropped + len(sampled), tuple(sampled)

    def close(self) -> None:
        """Give all connections to p2pd again."""
        for _, *pair in self._sockets:
            with contextlib.suppress(OSError):
                _attach(pair[0], _ATTACH_REUSEPORT_CBPF, _ALL_P2PD)
            for beside in pair:
                beside.close()
        self._sockets.clear()


_ALL_P2PD: list[Instruction] = [(_RETURN, 0, 0, _P2PD)]


def _attach(beside: socket.socket, option: int, code: Sequence[Instruction]) -> None:
    raw = b"".join(struct.pack("HBBI", c, yes, no, k & _WORD_MAX) for c, yes, no, k in code)
    held = ctypes.create_string_buffer(raw, len(raw))
    beside.setsockopt(socket.SOL_SOCKET, option, struct.pack("HxxxxxxP", len(code), ctypes.addressof(held)))


def _dropped(beside: socket.socket) -> int:
    raw = beside.getsockopt(socket.SOL_SOCKET, _MEMINFO, 4 * (_MEMINFO_DROPS + 1))
    return int.from_bytes(raw[4 * _MEMINFO_DROPS :], "little")

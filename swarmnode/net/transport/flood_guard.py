"""Decides which strangers may connect to p2pd while its port is flooded, and keeps the others away.

A libp2p handshake costs p2pd 0.5 to 1 ms of CPU and an unwanted stream 0.5 ms, whatever the answer. So the kernel must
turn floods away. FloodGate decides, purely: one period's counts give the next state and a reason. SynFilter counts and
acts, and FloodGuard runs both. Without a flood no filter is active and no socket is open for it.

1. Many TCP connections are opened on this machine: for LOOK_S a tenth of strangers' SYNs at our port is dropped (their
   kernels resend after a second), which shows how many there are. If they are few, they belong to another program.
2. A flood: only ADMIT_PER_S strangers get through. A sample of the rest shows their addresses.
3. Addresses that alone make HITS_PER_S are denied. If the rest is no flood, it is admitted again.

The address of a peer that may take part is never denied and always gets through.

The filter is sockets beside p2pd's on the same port: the kernel gives them the connections that p2pd must not see.
go-libp2p listens with SO_REUSEPORT. So this process (of the same user, without privileges) can listen on the same port
and attach the program that chooses a socket for each SYN: classic BPF over its source address (socket(7),
SO_ATTACH_REUSEPORT_CBPF). A dropped SYN costs the attacker a timeout and us almost nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import ipaddress
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from swarmnode.base.errors import cause_of
from swarmnode.net.transport.address import Endpoint
from swarmnode.net.transport.p2pd_process import P2pdProcess
from swarmnode.net.transport.stranger_limit import STRANGERS_PER_S

FLOOD_PER_S = STRANGERS_PER_S  # connections: as many as are answered that they may not take part
ADMIT_PER_S = FLOOD_PER_S  # as many as are no flood
# guess: after the last second of a flood; a client that dials one by one stops at the first loss and returns later
HOLD_S = 30.0
HITS_PER_S = (
    FLOOD_PER_S / 2.0
)  # per address: two make a flood; a household that joins with ten machines makes ten in all
LOOK_SHARE = 0.9  # guess: the smallest flood loses 6 connections, enough to tell it from none
LOOK_S = 3.0  # guess
SHARE_MIN = 1 / 64
SAMPLE_SHARE = 1 / 8  # guess: share of rejected connections that is reset instead of dropped, to see their addresses
HITS_MIN = 4  # guess: fewer hits of one address in a sample may be chance
DENIED_S = 4.0 * HOLD_S  # after the last attempt
DENIED_MAX = 256


@dataclass(frozen=True, slots=True)
class FloodSample:
    """Counts of one period. `opened`: TCP connections accepted by any program on this machine. `sunk`: attempts
    rejected at our port; `sampled`: source addresses of some of them."""

    now_s: float
    took_s: float
    opened: int
    sunk: int = 0
    sampled: tuple[str, ...] = ()
    friends: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class FloodGate:
    """State of the gate: `share` of strangers' connections reach p2pd, and none from `denied` (address -> until
    when)."""

    share: float = 1.0
    denied: Mapping[str, float] = field(default_factory=dict)
    elsewhere_per_s: float = 0.0  # connections that other programs of this machine accept
    looked_s: float = 0.0
    looked_sunk: float = 0.0
    flood_until_s: float = 0.0

    @property
    def is_open(self) -> bool:
        """Whether all connections pass."""
        return self.share >= 1.0 and not self.denied

    @property
    def sample(self) -> float:
        """Share of rejected connections to sample: none while it is unknown whether there is a flood."""
        return 0.0 if self.share == LOOK_SHARE and not self.denied else SAMPLE_SHARE


def deny(gate: FloodGate, address: str, now_s: float) -> FloodGate:
    """`gate` that also denies `address`, from which a stranger opens stream after stream."""
    denied = {**gate.denied, address: now_s + DENIED_S}
    while len(denied) > DENIED_MAX:
        del denied[min(denied, key=lambda one: denied[one])]
    return replace(gate, denied=denied)


def step(gate: FloodGate, sight: FloodSample) -> tuple[FloodGate, str]:
    """The gate after `sight`, and what changed ("" for nothing)."""
    counts = Counter(sight.sampled)
    kept = {
        address: sight.now_s + DENIED_S if counts[address] else until
        for address, until in gate.denied.items()
        if (until > sight.now_s or counts[address]) and address not in sight.friends
    }
    gate = replace(gate, denied=kept)
    per_sample = sight.sunk / max(1, len(sight.sampled))
    others = per_sample * sum(count for address, count in counts.items() if address not in kept)
    if not counts and not kept:
        others = sight.sunk
    opened_per_s = max(0, sight.opened - len(sight.sampled)) / sight.took_s
    if gate.share >= 1.0:
        gate = replace(gate, elsewhere_per_s=min(gate.elsewhere_per_s, opened_per_s))
        if opened_per_s - gate.elsewhere_per_s <= FLOOD_PER_S:
            return gate, ""
        return replace(gate, share=LOOK_SHARE, looked_s=0.0, looked_sunk=0.0), "many connections: looking"
    gate = replace(gate, looked_s=gate.looked_s + sight.took_s, looked_sunk=gate.looked_sunk + others)
    if gate.share == LOOK_SHARE and gate.looked_s < LOOK_S:
        return gate, ""
    return _looked(gate, sight, counts, per_sample, opened_per_s)


def _looked(
    gate: FloodGate, sight: FloodSample, counts: Counter[str], per_sample: float, opened_per_s: float
) -> tuple[FloodGate, str]:
    scale = 1.0 / (1.0 - gate.share)
    strangers_per_s = gate.looked_sunk / gate.looked_s * scale
    opened = 0
    for address, count in counts.items():
        per_s = count * per_sample / sight.took_s * scale
        is_stranger = address not in gate.denied and address not in sight.friends
        if is_stranger and per_s > HITS_PER_S and count >= HITS_MIN:
            gate = deny(gate, address, sight.now_s)
            opened += 1
            strangers_per_s -= per_s
    gate = replace(gate, looked_s=0.0, looked_sunk=0.0)
    if strangers_per_s > FLOOD_PER_S:
        share = max(SHARE_MIN, min(0.5, ADMIT_PER_S / strangers_per_s))
        is_new = gate.share == LOOK_SHARE
        gate = replace(gate, share=share, flood_until_s=sight.now_s + HOLD_S)
        return gate, f"a flood of {strangers_per_s:.0f} connections a second" if is_new else ""
    if not opened and sight.now_s < gate.flood_until_s:
        return gate, ""
    elsewhere = max(0.0, opened_per_s - strangers_per_s * gate.share)
    reason = f"{opened} addresses denied" if opened else "no flood of strangers (or it ended)"
    return replace(gate, share=1.0, elsewhere_per_s=elsewhere), reason


BACKLOG = 64  # connections of a flood examined per period, at most
_ATTACH_FILTER = 26  # asm-generic/socket.h
_ATTACH_REUSEPORT_CBPF = 51  # asm-generic/socket.h
_MEMINFO = 55  # asm-generic/socket.h; the fields: sock_diag.h
_MEMINFO_DROPS = 8
# Instructions: linux/bpf_common.h.
_LOAD = 0x20
_EQUAL = 0x15
_GREATER = 0x25
_RETURN = 0x06
# Offsets of the IP header, and of a random word: linux/filter.h.
_NETWORK = -0x100000
_RANDOM = -0x1000 + 56
_SOURCE = {4: _NETWORK + 12, 6: _NETWORK + 8}
# Sockets in the order in which they begin to listen.
_P2PD = 0
_SAMPLE = 1
_SILENT = 2
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
    words = set()
    for text in addresses:
        with contextlib.suppress(ValueError):
            address = ipaddress.ip_address(text)
            if address.version == version:
                words.add(struct.unpack(f">{1 if version == 4 else 2}I", address.packed[: 4 if version == 4 else 8]))
    return words


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
        denied = list(denied)
        friends = list(friends)
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
        dropped = total - self._dropped
        self._dropped = total
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


PERIOD_S = 1.0


class FloodGuard:
    """The guard of one p2pd. `friends` are the addresses of peers that may take part; `event` gets reason and counts.

    If the kernel lacks a needed feature (not Linux; /proc not readable; p2pd does not share its port), the guard
    reports it once and does nothing.
    """

    def __init__(
        self,
        daemon: P2pdProcess,
        friends: Callable[[], frozenset[str]],
        event: Callable[[str, FloodGate], None],
    ) -> None:
        self.gate = FloodGate()
        self.sunk = 0
        self._daemon = daemon
        self._friends = friends
        self._event = event
        self._sink: SynFilter | None = None
        self._is_able = True

    async def watch(self) -> None:
        """Run until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            before = opened()
            at = loop.time()
        except (OSError, ValueError):
            self._is_able = False
            return
        while True:
            await asyncio.sleep(PERIOD_S)
            accepted = opened()
            now = loop.time()
            sunk, sampled = self._sink.take() if self._sink is not None else (0, ())
            self.sunk += sunk
            friends = frozenset() if self.gate.is_open else self._friends()
            sight = FloodSample(now, now - at, accepted - before, sunk, sampled, friends)
            self._stand(*step(self.gate, sight))
            before = accepted
            at = now

    def deny(self, address: str) -> None:
        """Keep `address` away from p2pd for a while, unless peers that may take part share it."""
        if address and self._is_able and address not in self._friends():
            denied = deny(self.gate, address, asyncio.get_running_loop().time())
            self._stand(denied, "a stranger keeps opening streams: its address is denied")

    def release(self) -> None:
        """Close the filter, because p2pd is gone: the next p2pd must be the first to listen on its port."""
        if self._sink is not None:
            self._sink.close()
        self._sink = None
        self.gate = FloodGate()

    def _stand(self, new: FloodGate, reason: str) -> None:
        old = self.gate
        self.gate = new
        if new.is_open:
            if self._sink is not None:
                self._sink.close()
                self._sink = None
        elif self._daemon.running.is_set():
            self._route(reason or (old.share, old.denied.keys()) != (new.share, new.denied.keys()))
        if reason:
            self._event(reason, self.gate)

    def _route(self, is_changed: bool | str) -> None:
        try:
            if self._sink is None:
                self._sink = SynFilter([one for one in self._daemon.listening() if one.port])
                is_changed = True
            if is_changed:
                self._sink.route(self.gate.denied, self._friends(), self.gate.share, self.gate.sample)
        except OSError as error:
            self.release()
            self._is_able = False
            self._event(f"this system cannot turn strangers away: {cause_of(error)}", self.gate)

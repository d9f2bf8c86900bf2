"""Floods of strangers: what the gate decides in a world of made-up connections, and what the kernel does of it."""

import asyncio
import errno
import ipaddress
import random
import socket
import sys
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.net.transport import flood_guard
from swarmnode.net.transport.address import parse_endpoint
from swarmnode.net.transport.flood_guard import (
    ADMIT_PER_S,
    DENIED_MAX,
    DENIED_S,
    FLOOD_PER_S,
    HITS_PER_S,
    HOLD_S,
    FloodGate,
    FloodSample,
    SynFilter,
    deny,
    program,
    step,
)
from tests.support.libp2p_node import node
from tests.support.transport_contract import ping, pong

FRIEND = "10.0.0.1"
linux = pytest.mark.skipif(sys.platform != "linux", reason="SO_ATTACH_REUSEPORT_CBPF is Linux'")


@dataclass
class World:
    """A port on a machine where other programs accept `elsewhere` connections a second."""

    elsewhere: int = 0
    gate: FloodGate = field(default_factory=FloodGate)
    now_s: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(7))

    def second(self, attempts: list[str]) -> Counter[str]:
        """Those of `attempts` (an address each) that reach p2pd."""
        self.now_s += 1.0
        through = Counter[str]()
        turned = []
        for address in attempts:
            passes = address == FRIEND or (address not in self.gate.denied and self.rng.random() < self.gate.share)
            if passes:
                through[address] += 1
            else:
                turned.append(address)
        sampled = tuple(address for address in turned if self.rng.random() < self.gate.sample)[:64]
        opened = self.elsewhere + through.total() + len(sampled)
        self.gate, _ = step(self.gate, FloodSample(self.now_s, 1.0, opened, len(turned), sampled, frozenset([FRIEND])))
        return through


def test_one_flooding_address_is_denied_and_nobody_else() -> None:
    world = World()
    for _ in range(10):
        world.second(["1.1.1.1"] * 167 + ["2.2.2.2"])
    assert set(world.gate.denied) == {"1.1.1.1"} and world.gate.share == 1.0
    reached = sum((world.second(["1.1.1.1"] * 167 + ["2.2.2.2"]) for _ in range(200)), Counter())
    assert reached == {"2.2.2.2": 200}, "for as long as it lasts"
    for _ in range(int(DENIED_S) + 1):
        world.second(["2.2.2.2"])
    assert world.gate.is_open


def test_few_of_a_flood_from_everywhere_get_through_and_friends_always() -> None:
    world = World()
    for second in range(60):
        through = world.second([f"3.{second}.{n % 250}.{n // 250}" for n in range(500)] + [FRIEND] * 40)
        assert through[FRIEND] == 40
        if second >= 8:
            assert through.total() - 40 <= 4 * ADMIT_PER_S
    assert FRIEND not in world.gate.denied and not world.gate.denied
    for _ in range(int(HOLD_S) + 5):
        world.second(["4.4.4.4"])
    assert world.gate.is_open


def test_another_program_with_many_connections_is_no_flood() -> None:
    world = World(elsewhere=400)
    looks = 0
    for _ in range(300):
        world.second(["2.2.2.2"])
        looks += not world.gate.is_open
    assert looks <= 10 and not world.gate.denied
    for _ in range(10):
        world.second(["1.1.1.1"] * 167)
    assert set(world.gate.denied) == {"1.1.1.1"}, "and does not hide one"


@given(
    st.lists(
        st.tuples(st.integers(0, 400), st.integers(0, 400), st.sampled_from(["a", "b", FRIEND])),
        min_size=1,
        max_size=30,
    )
)
def test_any_counts_leave_a_share_and_deny_no_friend(periods: list[tuple[int, int, str]]) -> None:
    gate = FloodGate()
    for now, (opened, sunk, address) in enumerate(periods):
        sampled = (address,) * min(sunk, 64) if not gate.is_open else ()
        gate, _ = step(gate, FloodSample(float(now), 1.0, opened, len(sampled) and sunk, sampled, frozenset([FRIEND])))
        assert 0 < gate.share <= 1 and FRIEND not in gate.denied


def test_the_list_of_the_denied_is_short() -> None:
    gate = FloodGate()
    for n in range(5000):
        gate = deny(gate, f"address {n}", float(n))
    assert len(gate.denied) == DENIED_MAX and HITS_PER_S <= FLOOD_PER_S


ADDRESSES = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(str)


def run(code: list[tuple[int, int, int, int]], source: str, chance: int) -> int:
    """What the kernel does with `code`."""
    packed = ipaddress.ip_address(source).packed
    accumulator = 0
    at = 0
    base = flood_guard._SOURCE[ipaddress.ip_address(source).version]
    while True:
        operation, yes, no, k = code[at]
        at += 1
        if operation == flood_guard._LOAD:
            accumulator = chance if k == flood_guard._RANDOM else int.from_bytes(packed[k - base : k - base + 4])
        elif operation == flood_guard._RETURN:
            return k
        else:
            at += yes if (accumulator == k if operation == flood_guard._EQUAL else accumulator > k) else no


@given(st.lists(ADDRESSES, max_size=8), st.lists(ADDRESSES, max_size=8), ADDRESSES, st.floats(0.02, 1), st.floats(0, 1))
def test_the_program_does_what_it_says(
    denied: list[str], friends: list[str], other: str, share: float, chance: float
) -> None:
    sample = 0.125
    word = int(chance * flood_guard._WORD_MAX)
    away = flood_guard._SAMPLE if word <= int(sample * flood_guard._WORD_MAX) else flood_guard._SILENT

    def house(text: str) -> bytes:
        return ipaddress.ip_address(text).packed[:8]

    for source in (*denied, *friends, other):
        code = program(ipaddress.ip_address(source).version, denied, friends, share, sample)
        if house(source) in map(house, denied):
            expected = away
        elif house(source) in map(house, friends):
            expected = flood_guard._P2PD
        else:
            expected = away if share < 1 and word > int(share * flood_guard._WORD_MAX) else flood_guard._P2PD
        assert run(code, source, word) == expected


@linux
def test_the_kernel_keeps_the_denied_from_the_other_socket() -> None:
    with socket.socket() as first:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        first.bind(("127.0.0.1", 0))
        first.listen(50)
        beside = SynFilter([parse_endpoint(f"/ip4/127.0.0.1/tcp/{first.getsockname()[1]}")])
        try:
            beside.route(["127.0.0.2"], (), 1.0, 1.0)
            for source in ["127.0.0.2", "127.0.0.1"] * 5:
                with socket.socket() as caller:
                    caller.bind((source, 0))
                    caller.settimeout(30.0)
                    caller.connect(first.getsockname())
                    if source == "127.0.0.1":
                        accepted, address = first.accept()
                        accepted.close()
                        assert address[0] == source
            sunk, sampled = beside.take()
            assert sunk == 5 and sampled == ("127.0.0.2",) * 5
            beside.route(["127.0.0.2"], (), 1.0, 0.0)
            with socket.socket() as caller:
                caller.bind(("127.0.0.2", 0))
                caller.setblocking(False)
                assert caller.connect_ex(first.getsockname()) == errno.EINPROGRESS, "dropped without a word"
            assert beside.take() == (1, ())
        finally:
            beside.close()
        with socket.socket() as caller:
            caller.bind(("127.0.0.2", 0))
            caller.connect(first.getsockname())
            assert first.accept()[1][0] == "127.0.0.2", "all is as before"


@linux
@pytest.mark.live
@pytest.mark.loop("uvloop")
async def test_a_denied_address_does_not_reach_p2pd_while_others_do() -> None:
    async with asyncio.timeout(120), node() as (there, _), node() as (here, _):
        there.serve("ping", pong, tensor_bytes_max=0)
        for transport in (there, here):
            transport.start()
        address = parse_endpoint((await there.addresses())[0])

        async def greeted(source: str) -> bool:
            try:
                async with asyncio.timeout(5):  # what is dropped without a word is tried for minutes
                    reader, writer = await asyncio.open_connection(address.host, address.port, local_addr=(source, 0))
                    greeting = await reader.read(64)
                    writer.transport.abort()
            except OSError:  # a time-out is one
                return False
            return b"multistream" in greeting

        assert await greeted("127.0.0.2")
        there._guard.deny("127.0.0.2")
        while await greeted("127.0.0.2"):  # the bound is the test's
            await asyncio.sleep(0.05)
        assert not await greeted("127.0.0.2") and await greeted("127.0.0.3")
        await here.connect(there.peer_id, await there.addresses())
        await here.call(there.peer_id, ping(), timeout_s=60, reply_bytes_max=0)
        there._guard.release()
        assert await greeted("127.0.0.2")

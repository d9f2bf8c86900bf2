"""Members in one network find each other by beacons; what is no beacon is nothing."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.identity import Identity
from swarmnode.ids import PeerId, RunId
from swarmnode.transport import lan
from swarmnode.transport.contact import Contacts

ME, OTHER = Identity.generate().peer_id, Identity.generate().peer_id
RUN, ELSE = RunId("ab" * 32), RunId("cd" * 32)


def test_a_beacon_says_who_is_where() -> None:
    raw = lan.beacon(RUN, OTHER, 4001)
    assert len(raw) <= lan.BEACON_BYTES_MAX
    assert lan.read_beacon(raw, "192.168.1.7", RUN, ME) == (OTHER, ["/ip4/192.168.1.7/tcp/4001"])
    assert lan.read_beacon(raw, "192.168.1.7", ELSE, ME) is None, "another run"
    assert lan.read_beacon(raw, "192.168.1.7", RUN, OTHER) is None, "our own"
    assert lan.read_beacon(lan.beacon(RUN, OTHER, 0), "192.168.1.7", RUN, ME) is None
    assert lan.read_beacon(lan.beacon(RUN, PeerId("nobody"), 1), "192.168.1.7", RUN, ME) is None
    assert lan.read_beacon(raw + b" x", "192.168.1.7", RUN, ME) is None


@given(st.binary(max_size=300))
def test_noise_is_nothing(raw: bytes) -> None:
    assert lan.read_beacon(raw, "192.168.1.7", RUN, ME) is None
    assert lan.read_beacon(b"swarmnode1 " + raw, "192.168.1.7", RUN, ME) is None


async def test_two_nodes_of_one_network_hear_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lan, "PERIOD_S", 0.05)

    async def main() -> dict[PeerId, list[str]]:
        heard: dict[PeerId, list[str]] = {}
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            both = [
                tasks.create_task(
                    lan.announce(RUN, me, lambda port=port: [f"/ip4/0.0.0.0/tcp/{port}"], heard.__setitem__)
                )
                for me, port in ((ME, 4001), (OTHER, 4002))
            ]
            while len(heard) < 2:
                await asyncio.sleep(0.02)
                if all(task.done() for task in both):
                    pytest.skip("no multicast on this machine")
            for task in both:
                task.cancel()
        return heard

    try:
        heard = await main()
    except TimeoutError:
        pytest.skip("multicast does not come back on this machine")
    assert {peer: addresses[0].rpartition("/")[2] for peer, addresses in heard.items()} == {ME: "4001", OTHER: "4002"}


def test_hints_are_tried_and_displace_nobody() -> None:
    contacts = Contacts()
    contacts.hear(ME, ["/ip4/1.2.3.4/tcp/5"], 1000.0)
    contacts.hint(OTHER, ["/ip4/192.168.1.7/tcp/4001"])
    contacts.hint(ME, ["/ip4/192.168.1.8/tcp/4001"])
    assert contacts.known[OTHER].addresses == ("/ip4/192.168.1.7/tcp/4001",) and not contacts.known[OTHER].fixed
    assert contacts.known[ME].addresses == ("/ip4/192.168.1.8/tcp/4001", "/ip4/1.2.3.4/tcp/5")
    assert contacts.known[ME].seen_unix_s == 1000.0

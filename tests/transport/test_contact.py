"""Contacts: kept on disk, tried again in good time; islands found, and healed over a real DHT."""

import asyncio
import json
import random
import time
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path

import pytest

from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.wire.record_pb2 import Record
from swarmnode.net.membership.liveness import SAMPLE
from swarmnode.net.membership.record import sign_record
from swarmnode.net.transport import contact_keeper
from swarmnode.net.transport.contact import CONTACTS_MAX, Contact, Contacts, whom_to_try
from swarmnode.net.transport.directory import DhtDirectory
from tests.support.libp2p_node import node
from tests.support.transport_contract import RUN, record_of

NOW = 1_000_000.0
A, B, C = (PeerId(name) for name in "abc")


def islands(views: dict[PeerId, set[PeerId]]) -> list[set[PeerId]]:
    """The parts of a swarm that know nothing of each other, by whom each node sees; largest first."""
    parts: list[set[PeerId]] = []
    for me, seen in views.items():
        joined = {me, *(seen & views.keys())}
        apart = list[set[PeerId]]()
        for part in parts:
            if part & joined:
                joined |= part
            else:
                apart.append(part)
        parts = [*apart, joined]
    return sorted(parts, key=len, reverse=True)


def test_contacts_to_try() -> None:
    def lost(**more: float) -> Contact:
        return Contact(("/ip4/1.2.3.4/tcp/5",), **{"seen_unix_s": NOW - 3600, **more})  # type: ignore[arg-type]

    assert whom_to_try({A: lost()}, set(), NOW) == [A]
    assert whom_to_try({A: lost()}, {A}, NOW) == [], "it is here"
    assert whom_to_try({A: lost(seen_unix_s=NOW - 5)}, {B}, NOW) == [], "it was heard just now"
    assert whom_to_try({A: lost(seen_unix_s=NOW - 5)}, set(), NOW) == [A], "nobody is here: it may have been a restart"
    for failures, wait_s in ((1, 6), (3, 24), (40, 600)):
        assert whom_to_try({A: lost(failures=failures, tried_unix_s=NOW - wait_s + 1)}, set(), NOW) == []
        assert whom_to_try({A: lost(failures=failures, tried_unix_s=NOW - wait_s)}, set(), NOW) == [A]
    told = Contact(("/ip4/1.2.3.4/tcp/5",), 0.0, given=("/ip4/1.2.3.4/tcp/5",))
    assert whom_to_try({A: lost(), B: lost(seen_unix_s=NOW - 100), C: told}, set(), NOW) == [C, B, A]
    assert len(whom_to_try({PeerId(str(i)): lost() for i in range(100)}, {A}, NOW)) == SAMPLE


def test_a_lost_bootstrap_is_found_within_ten_seconds_of_its_return() -> None:
    told = Contact(("/ip4/1.2.3.4/tcp/5",), NOW, given=("/ip4/1.2.3.4/tcp/5",))
    now = NOW
    tries = list[float]()
    while now < NOW + 7200:
        if whom_to_try({A: told}, {B}, now):
            tries.append(now - NOW)
            told.failures += 1
            told.tried_unix_s = now
        now += 1.0
    gaps = [after - before for before, after in pairwise(tries)]
    assert gaps[0] == 6.0 and set(gaps[1:]) == {9.0}


def test_a_home_remembers_how_far_its_runs_were(tmp_path: Path) -> None:
    path = tmp_path / "contacts.json"
    one = RunId("ab" * 32)
    other = RunId("cd" * 32)
    contacts = Contacts()
    contacts.hear(Identity.generate().peer_id, ["/ip4/1.2.3.4/tcp/5"], NOW)
    for samples in (512, 4640, 100):
        contacts.trained(one, samples)
    contacts.trained(other, 7)
    assert contacts.save(path)
    found = Contacts.load(path, NOW)
    assert (found.samples, len(found.known)) == ({one: 4640, other: 7}, 1)
    for index in range(CONTACTS_MAX):
        contacts.trained(RunId(f"{index:064x}"), 1)
    assert len(contacts.samples) == CONTACTS_MAX


def test_contacts_survive_on_disk_and_nonsense_does_not(tmp_path: Path) -> None:
    path = tmp_path / "contacts.json"
    one, two, ahead = (Identity.generate().peer_id for _ in range(3))
    contacts = Contacts()
    contacts.hear(one, ["/ip4/1.2.3.4/tcp/5"], NOW)
    contacts.hear(ahead, ["/ip4/1.2.3.4/tcp/6"], NOW + 3600)
    contacts.tell(two, ["/ip4/1.2.3.4/tcp/7"])
    contacts.hear(two, [], NOW)
    assert contacts.save(path) and path.stat().st_mode & 0o777 == 0o600
    found = Contacts.load(path, NOW + 1)
    assert {peer: one.addresses for peer, one in found.known.items()} == {
        one: ("/ip4/1.2.3.4/tcp/5",),
        two: ("/ip4/1.2.3.4/tcp/7",),
    }
    assert found.latest(1)[0][0] in (one, two)
    good = json.loads(path.read_text())[0]
    for rows in ("", "{}", "7", [good, 7], [{**good, "peer": "nobody"}], [{**good, "addresses": ["/unix/x"]}]):
        path.write_text(json.dumps(rows) if rows else "")
        assert len(Contacts.load(path, NOW).known) <= 1
    assert Contacts.load(tmp_path / "none", NOW).known == {}
    assert not contacts.save(tmp_path / "missing" / "contacts.json")


def test_the_list_is_bounded_and_forgets_told_ones_last() -> None:
    contacts = Contacts()
    contacts.tell(A, ["/ip4/1.2.3.4/tcp/5"])
    chance = random.Random(0)
    for i in range(3 * CONTACTS_MAX):
        contacts.hear(PeerId(f"p{chance.randrange(10**9)}"), ["/ip4/1.2.3.4/tcp/5"], NOW + i)
    assert len(contacts.known) == CONTACTS_MAX and A in contacts.known


def test_the_users_addresses_are_always_tried() -> None:
    """Behind a forwarded port it announces addresses that nobody outside can dial."""
    contacts = Contacts()
    given = "/ip4/1.2.3.4/tcp/5"
    announced = "/ip4/127.0.0.1/tcp/4001"
    contacts.tell(A, [given])
    contacts.hear(A, [announced], NOW)
    contacts.record_try(A, False, NOW)
    contacts.hear(A, [], NOW)
    assert contacts.known[A].addresses == (given, announced)
    contacts.hear(A, ["/ip4/1.2.3.4/tcp/7"], NOW)
    assert contacts.known[A].addresses == (given, "/ip4/1.2.3.4/tcp/7")
    assert contacts.known[A].fixed and not contacts.known.get(B)


@pytest.mark.live
@pytest.mark.loop("uvloop")
async def test_two_islands_become_one_when_a_node_hears_of_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four nodes, two and two, with a bootstrap each; then one of them is told one address."""
    monkeypatch.setattr(contact_keeper, "RETRY_MIN_S", 0.2)

    async with AsyncExitStack() as living:
        nodes = [await living.enter_async_context(node()) for _ in range(4)]
        directories: list[DhtDirectory] = []
        for index, (transport, _) in enumerate(nodes):
            first = nodes[index // 2 * 2][0]
            known = [] if first is transport else [(first.peer_id, await first.addresses())]
            made = await DhtDirectory.create(transport, known, RUN, 1, unix_s=time.time)
            living.push_async_callback(made.close)
            directories.append(made)

        async def announce(sequence: int) -> None:
            for made, (_, me) in zip(directories, nodes, strict=True):
                await made.announce(sign_record(record_of(me, time.time(), sequence=sequence, ttl_s=60), me))

        async def views() -> dict[PeerId, set[PeerId]]:
            found = {}
            for made, (_, me) in zip(directories, nodes, strict=True):
                records = [Record.FromString(signed.record) for signed in await made.lookup(0)]
                found[me.peer_id] = {PeerId(record.peer_id) for record in records}
            return found

        await announce(1)
        assert [len(part) for part in islands(await views())] == [2, 2]
        directories[3].contacts.tell(nodes[1][0].peer_id, await nodes[1][0].addresses())
        for sequence in range(2, 100):
            await announce(sequence)
            seen = await views()
            if all(len(view) == 4 for view in seen.values()):
                break
            await asyncio.sleep(0.2)
        assert [len(part) for part in islands(seen)] == [4]
        assert all(len(view) == 4 for view in seen.values())

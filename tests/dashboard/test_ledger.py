"""Contributors by receipts: only what a member of the run signed counts, each sample once, whatever else is shown."""

from pathlib import Path

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.swarm.fake_fleet import FakeFleet
from swarmnode.app.dashboard.totals import KEPT_EACH, KEPT_STRANGE, Ledger
from swarmnode.app.machine.receipt_store import Receipts
from swarmnode.base.errors import RemoteFault
from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.net.membership.receipt import RECEIPT_BYTES_MAX, WorkDone, check_receipt, sign_receipt
from tests.support.watched import DOCUMENT, NOW, RUN, TINY, Fixture, fits, watched

PEOPLE = [Identity.of_seed(bytes([n + 1]) * 32) for n in range(4)]
SERVER = PEOPLE[0].peer_id
UNTIL = int(NOW)


def signed(client: int, samples: int, begun: int = 10, until: int = UNTIL, server: PeerId = SERVER) -> bytes:
    made = sign_receipt(PEOPLE[client], RUN, server, WorkDone(samples, samples), begun, until)
    return made.SerializeToString()


@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from([10, 20]), st.integers(0, 50)), max_size=12))
def test_the_sum_is_the_most_each_life_of_each_member_signed(shown: list[tuple[int, int, int]]) -> None:
    ledger = Ledger(RUN)
    members = {PEOPLE[1].peer_id, PEOPLE[2].peer_id}
    for client, begun, samples in shown:
        ledger.take(SERVER, signed(client, samples, begun), members, NOW)
    best: dict[tuple[int, int], int] = {}
    for client, begun, samples in shown:
        best[client, begun] = max(best.get((client, begun), 0), samples)
    counted = {key: samples for key, samples in best.items() if key[0] in (1, 2)}
    total = ledger.total(SERVER, members)
    assert (total.samples if total else 0) == sum(counted.values())
    assert (total.peers if total else 0) == len({client for client, _ in counted})
    assert ledger.total(PEOPLE[3].peer_id, members) is None


def test_only_receipts_of_this_run_node_and_client_count() -> None:
    ledger = Ledger(RUN)
    own = sign_receipt(PEOPLE[0], RUN, SERVER, WorkDone(1, 1), 1, UNTIL).SerializeToString()
    other = sign_receipt(PEOPLE[1], RunId("ef" * 32), SERVER, WorkDone(1, 1), 1, UNTIL).SerializeToString()
    forged = wire.Receipt.FromString(signed(1, 5))
    forged.samples = 500
    for raw in (
        own,
        other,
        forged.SerializeToString(),
        signed(1, 5, server=PEOPLE[2].peer_id),
        signed(1, 1 << 60),
        signed(1, 5, until=UNTIL + 10**6),
        b"\xff" * 40,
        b"\0" * (RECEIPT_BYTES_MAX + 1),
    ):
        with pytest.raises(RemoteFault, match="[Rr]eceipt"):
            ledger.take(SERVER, raw, {SERVER, PEOPLE[1].peer_id}, NOW)
    assert ledger.total(SERVER, {PEOPLE[1].peer_id}) is None


def test_made_up_clients_neither_count_nor_grow_the_books() -> None:
    ledger = Ledger(RUN)
    refused = 0
    for number in range(2 * KEPT_STRANGE):
        crony = Identity.of_seed(number.to_bytes(32, "big"))
        raw = sign_receipt(crony, RUN, SERVER, WorkDone(9, 9), 1, UNTIL).SerializeToString()
        try:
            ledger.take(SERVER, raw, set(), NOW)
        except RemoteFault:
            refused += 1
    assert refused == KEPT_STRANGE < KEPT_EACH and ledger.total(SERVER, set()) is None
    assert len(list(ledger.of(SERVER))) == KEPT_STRANGE


@pytest.fixture
def one() -> Fixture:
    return Fixture()


async def test_a_coordinator_is_told_each_receipt_once_in_turn(tmp_path: Path) -> None:
    kept = Receipts(tmp_path)
    for client in (1, 2, 3):
        await kept.keep(wire.Receipt.FromString(signed(client, client)))
    await kept.keep(sign_receipt(PEOPLE[1], RunId("ef" * 32), SERVER, WorkDone(1, 1), 1, 2))
    serial, first = kept.after(RUN, 0, 2)
    assert [wire.Receipt.FromString(raw).samples for raw in first] == [1, 2]
    serial, rest = kept.after(RUN, serial, 2)
    assert [wire.Receipt.FromString(raw).samples for raw in rest] == [3]
    assert kept.after(RUN, serial, 2) == (serial, [])
    await kept.keep(wire.Receipt.FromString(signed(1, 50)))
    serial, newer = kept.after(RUN, serial, 2)
    assert [wire.Receipt.FromString(raw).samples for raw in newer] == [50]
    assert len(Receipts(tmp_path).after(RUN, 0, 9)[1]) == 3, "kept through a restart"


async def test_the_api_shows_who_was_thanked_and_by_whom(tmp_path: Path) -> None:
    here = FakeFleet(TINY, RUN, 6)
    here.train(5.0)
    await here.announce()
    async with watched(here, tmp_path) as w, aiohttp.ClientSession(w.board.url) as session:
        await w.everybody_answered()
        async with session.get("/api/v1/contributors") as answer:
            rows = (await answer.json())["contributors"]
        assert len(rows) == 6 and all(row["receipts"]["samples"] > 0 for row in rows)
        assert [row["receipts"]["samples"] for row in rows] == sorted(
            (row["receipts"]["samples"] for row in rows), reverse=True
        )
        assert {row["name"] for row in rows} == {fake_node.name for fake_node in here.nodes}
        async with session.get(f"/api/v1/contributors/{rows[0]['peer']}/receipts") as answer:
            shown = await answer.json()
        operation = DOCUMENT["paths"]["/api/v1/contributors/{peer}/receipts"]["get"]
        fits(shown, operation["responses"]["200"]["content"]["application/json"]["schema"])
        assert sum(one["samples"] for one in shown["receipts"]) == rows[0]["receipts"]["samples"]
        for one in shown["receipts"]:  # anybody can check them again
            assert one.pop("counts")
            receipt = wire.Receipt(
                **{k: v for k, v in one.items() if k not in ("run", "signature")},
                run_id=one["run"],
                signature=bytes.fromhex(one["signature"]),
            )
            check_receipt(receipt, RUN, rows[0]["peer"])

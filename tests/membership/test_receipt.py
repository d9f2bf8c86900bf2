"""Receipts: signed by the client, of use to one server, kept through restarts; counted by whole nodes."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.app.machine.receipt_store import FILE_NAME, Receipts, read
from swarmnode.base.errors import LocalFault, RemoteFault
from swarmnode.base.identity import Identity
from swarmnode.base.ids import RunId
from swarmnode.base.remembered import REMEMBERED_MAX
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.base.work import Work
from swarmnode.net.membership.receipt import WorkBook, WorkDone, check_receipt, sign_receipt
from swarmnode.train.node.report import ReceiptExchange
from tests.support.village import RUN, LoopClock, manifest, village

pytestmark = pytest.mark.node  # some seconds

CLIENT, SERVER, OTHER = (Identity.of_seed(bytes([n]) * 32) for n in (1, 2, 3))
DONE = WorkDone(3, 12)


def one(run: RunId = RUN, until: int = 20) -> wire.Receipt:
    return sign_receipt(CLIENT, run, SERVER.peer_id, DONE, 10, until)


@given(st.sampled_from(["microbatches", "samples", "until_unix_s", "from_unix_s"]), st.integers(0, 1 << 40))
def test_no_number_in_it_can_be_changed(field: str, value: int) -> None:
    receipt = one()
    check_receipt(receipt, RUN, SERVER.peer_id)
    if getattr(receipt, field) == value:
        return
    setattr(receipt, field, value)
    with pytest.raises(RemoteFault, match="[Rr]eceipt"):
        check_receipt(receipt, RUN, SERVER.peer_id)


def test_it_is_of_use_to_one_server_in_one_run() -> None:
    for run, server in ((RunId("ef" * 32), SERVER.peer_id), (RUN, OTHER.peer_id)):
        with pytest.raises(RemoteFault, match="another"):
            check_receipt(one(), run, server)
    forged = one()
    forged.client = OTHER.peer_id
    with pytest.raises(RemoteFault, match="did not sign"):
        check_receipt(forged, RUN, SERVER.peer_id)


async def test_the_newest_of_a_client_is_kept(tmp_path: Path) -> None:
    kept = Receipts(tmp_path)
    for until in (20, 30, 40):
        await kept.keep(one(until=until))
    await Receipts(tmp_path).keep(one(RunId("ef" * 32)))
    assert sorted((r.run_id, r.until_unix_s) for r in read(tmp_path)) == [(RUN, 40), ("ef" * 32, 20)]
    (tmp_path / FILE_NAME).write_bytes(b"\0\0\0\x09torn")
    with pytest.raises(LocalFault, match="no receipt at byte"):
        list(read(tmp_path))
    assert Receipts(tmp_path).total(RUN) == Work(), "tests/daemon/test_damaged_home.py has more"


def test_strangers_do_not_grow_the_books() -> None:
    work = WorkBook()
    for number in range(REMEMBERED_MAX + 10):
        work.record_gradient(Identity.of_seed(number.to_bytes(32, "big")).peer_id, Work.of(4, 16, 9))
    assert len(work.done) == REMEMBERED_MAX


@pytest.mark.loop("village")
async def test_whole_nodes_thank_each_other() -> None:
    async with village(manifest(stages=2)) as v:
        people = [v.add(number % 2) for number in range(3)]
        got: list[wire.Receipt] = []

        async def keep(receipt: wire.Receipt) -> None:
            got.append(receipt)

        thanks = [
            ReceiptExchange(
                RUN, Identity.of_seed(bytes([at + 1]) * 32), p.node.transport.work, LoopClock(), p.quiet, keep
            )
            for at, p in enumerate(people)
        ]
        for one, person in zip(thanks, people, strict=True):
            one.serve(person.transport)
        feeders = [people[0].node, people[2].node]
        await v.until(
            lambda: all(
                node.served is not None and node.served.parts.feeder is not None and node.served.parts.feeder.done > 20
                for node in feeders
            ),
            "both feeders train",
        )
        # Feeders choose how many samples a microbatch has, so their number says nothing of samples.
        await v.until(lambda: bool(people[1].served.hop and people[1].served.hop.samples > 160), "and the other works")
        await thanks[1].once(people[1].transport)
        assert {receipt.client for receipt in got} <= {people[0].node.me, people[2].node.me} and got
        hop = people[1].served.hop
        assert hop is not None and sum(receipt.samples for receipt in got) <= hop.samples + 64
        assert sum(receipt.samples for receipt in got) > 100, "nearly all it did is thanked for"
        got.clear()
        await thanks[0].once(people[0].transport)
        feeder = people[0].served.parts.feeder
        assert {receipt.client for receipt in got} == {people[1].node.me}, "who reads the data is thanked for it"
        assert feeder is not None and sum(receipt.microbatches for receipt in got) <= feeder.done + 16
        await v.leave()

"""What nodes tell a coordinator, as functions of bytes: whatever comes, the page's JSON can be made and stays small."""

import functools

from swarmnode.app.dashboard.totals import Ledger
from swarmnode.base.errors import RemoteFault
from swarmnode.base.identity import Identity
from swarmnode.base.ids import RunId
from swarmnode.net.membership.receipt import WorkDone, sign_receipt

RUN = RunId("ab" * 32)
NOW = 1.75e9
SERVER, CLIENT, OTHER = (Identity.of_seed(bytes([n]) * 32) for n in (7, 8, 9))


def receipts() -> tuple[bytes, ...]:
    return tuple(
        sign_receipt(client, RUN, SERVER.peer_id, WorkDone(n, 4 * n), 10, 20 + n).SerializeToString()
        for client in (CLIENT, OTHER)
        for n in (1, 300)
    )


@functools.cache
def _ledger() -> Ledger:
    return Ledger(RUN)


def take_receipt(raw: bytes) -> bool:
    members = {CLIENT.peer_id, OTHER.peer_id}
    accepted = True
    try:
        _ledger().take(SERVER.peer_id, raw, members, NOW)
    except RemoteFault as refusal:
        assert str(refusal)
        accepted = False
    total = _ledger().total(SERVER.peer_id, members)
    assert total is None or (total.samples <= 2400 and total.peers <= 2), "somebody forged a receipt"
    return accepted

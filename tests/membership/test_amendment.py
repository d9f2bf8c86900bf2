"""The owner's chain of amendments: what nodes accept of it, and what is in effect at a round."""

import asyncio
import dataclasses

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.memory_network import MemoryNetwork, MemoryTransport
from swarmnode.base.errors import RemoteFault
from swarmnode.base.identity import Identity
from swarmnode.base.ids import RunId, seeded
from swarmnode.base.wire import access_pb2, record_pb2
from swarmnode.run import owner
from swarmnode.run.admission.access import AccessRules
from swarmnode.run.admission.admission import Admission
from swarmnode.run.admission.amendment import AMENDMENTS_MAX, Amendments
from swarmnode.run.manifest import Manifest
from swarmnode.train.node.access_list import keep_access_list, tell
from swarmnode.train.node.membership_handlers import MembershipHandlers
from tests.support.clock import WallClock
from tests.support.fake_telemetry import Quiet

OWNER = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
SECOND = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
KEY = owner.public_bytes(OWNER)
SECOND_KEY = owner.public_bytes(SECOND)
RUN = RunId("ab" * 32)
BASE = Manifest()
RATE = {"inner.muon_learning_rate": 0.001}


def chain() -> Amendments:
    return Amendments(BASE, RUN, KEY)


def test_a_node_that_hears_of_the_chain_has_the_owners_values_from_its_round_on() -> None:
    made = chain()
    heard = chain()
    made.sign(OWNER, 200, RATE)
    made.sign(OWNER, 300, {"inner.decay": "constant", "gossip.codec": "int8"})
    heard.learn(made.signed)
    assert heard.at(199) == BASE
    changed = dataclasses.replace(BASE, inner=dataclasses.replace(BASE.inner, muon_learning_rate=0.001))
    assert heard.at(200) == heard.at(299) == changed
    assert heard.newest.inner.decay == "constant" and heard.newest.gossip.codec == "int8"
    assert heard.lines()[0] == "amendment 1 from round 200: inner.muon_learning_rate 0.003 -> 0.001"
    assert [line.rpartition(" (")[2] for line in heard.lines(250)] == ["in force)", "pending)"]
    assert heard.learn(made.signed[1:]) == [], "told again"
    made.sign(OWNER, 400, {"pipeline.stages": BASE.pipeline.stages + 1})
    heard.learn(made.signed)
    assert heard.cuts == [0, 3] and (heard.cut(399), heard.cut(400)) == (0, 3)


def test_forged_foreign_and_disordered_amendments_are_refused_and_change_nothing() -> None:
    made = chain()
    other = Amendments(BASE, RunId("cd" * 32), KEY)
    made.sign(OWNER, 10, RATE)
    made.sign(OWNER, 20, {"inner.clip_norm": 0.5})
    other.sign(OWNER, 10, RATE)
    forger = Amendments(BASE, RUN, SECOND_KEY)
    forger.sign(SECOND, 10, RATE)
    rival = chain()
    rival.sign(OWNER, 10, {"inner.clip_norm": 2.0})
    rival.sign(OWNER, 20, {"inner.clip_norm": 3.0})
    for signed, why in (
        (other.signed, "of run"),
        (forger.signed, "no owner of this run signed"),
        (made.signed[1:], "not the next one"),
        ([access_pb2.SignedAmendment(amendment=bytes(5000), signature=bytes(64))], "at most 4096"),
        ([made.signed[0]] * (AMENDMENTS_MAX + 1), "at most 64"),
    ):
        heard = chain()
        with pytest.raises(RemoteFault, match=why):
            heard.learn(signed)
        assert heard.newest == BASE and not heard.chain
    heard = chain()
    heard.learn(made.signed[:1])
    with pytest.raises(RemoteFault, match="not the next one"):
        heard.learn(rival.signed[1:])
    assert heard.newest.inner.clip_norm == BASE.inner.clip_norm


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"model.width": 256}, "another shape"),
        ({"seed": 1}, "cannot change"),
        ({"gossip.round_samples": 128}, "would be counted"),
        ({"data.tokenizer": "a.json"}, "numbered"),
        ({"pipeline.boundary": "fp32"}, "activations"),
        ({"pipeline.stages": 511}, "together at most|allowed"),
        ({"evaluation.prompts": ["The"]}, "do not compare"),
        ({"inner.clip_norm": -1.0}, "allowed is"),
        ({"inner.decay_samples": 1}, "allowed is"),
        ({"inner.nothing": 1}, "unknown field"),
    ],
)
def test_fixed_fields_cannot_be_amended(values: dict[str, object], why: str) -> None:
    with pytest.raises(RemoteFault, match=why):
        chain().sign(OWNER, 5, values)


def test_an_added_owner_signs_and_a_replaced_one_no_more() -> None:
    made = chain()
    with pytest.raises(RemoteFault, match="no owner"):
        made.sign(SECOND, 5, RATE)
    made.sign(OWNER, 0, {}, (KEY, SECOND_KEY))
    made.sign(SECOND, 5, RATE)
    made.sign(SECOND, 0, {}, (SECOND_KEY,))
    with pytest.raises(RemoteFault, match="no owner"):
        made.sign(OWNER, 9, {"inner.clip_norm": 0.5})
    assert made.owners == (SECOND_KEY,) and made.signers == (KEY, SECOND_KEY)
    assert chain().learn(made.signed) == made.chain


async def test_a_member_hears_of_an_amendment_from_one_that_it_does_not_know() -> None:
    """Such as a coordinator that has moved: it asks the members that it knows, and they ask back."""
    network = MemoryNetwork()
    doors = list[Admission]()
    transports = list[MemoryTransport]()
    for seed in (1, 2):
        transports.append(MemoryTransport(network, Identity.of_seed(bytes([seed]) * 32).peer_id, RUN))
        doors.append(Admission(AccessRules(RUN, KEY, is_open=True), WallClock(), None, chain()))
        MembershipHandlers(record_pb2.SignedManifest(), doors[-1]).serve(transports[-1])
    moved, member = doors
    known = doors[0].amendments
    assert known is not None and member.amendments is not None
    known.sign(OWNER, 10, RATE)
    keeping = keep_access_list(*(member, transports[1], list, seeded("a"), Quiet(), lambda: None), period_s=0.01)
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(keeping)
        await tell(moved, transports[0], [one.peer_id for one in transports], seeded("b"))
        while not member.amendments.chain:
            await asyncio.sleep(0.01)
        task.cancel()

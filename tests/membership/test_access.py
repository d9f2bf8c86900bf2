"""Who may take part: the decision against a dumb twin, signatures that must not be transferable, bounds on memory."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.base.errors import RemoteFault
from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.wire import access_pb2 as wire
from swarmnode.run import owner
from swarmnode.run.admission import admission as admission_module
from swarmnode.run.admission.access import (
    SKEW_S,
    AccessList,
    AccessRules,
    grant_name,
    open_access_list,
    permitted,
    sign_access_list,
    sign_grant,
    sign_pass,
    too_old,
)
from swarmnode.run.admission.admission import Admission
from tests.support.clock import ManualClock

OWNER = Ed25519PrivateKey.from_private_bytes(b"o" * 32)
KEY = owner.public_bytes(OWNER)
STRANGER = Ed25519PrivateKey.from_private_bytes(b"x" * 32)
RUN = RunId("ab" * 32)
DELEGATE = Identity.of_seed(b"d" * 32)
ME, OTHER = (Identity.of_seed(bytes([n]) * 32).peer_id for n in (1, 2))
NOW = 1_000_000.0


def a_pass(
    machine: PeerId = ME,
    run: RunId = RUN,
    signer: Ed25519PrivateKey = OWNER,
    expires: int = int(NOW) + 1000,
    machines: int = 0,
    delegate: Identity = DELEGATE,
) -> wire.Pass:
    return sign_pass(delegate, run, sign_grant(signer, run, DELEGATE, expires, machines), machine, expires)


@given(
    is_open=st.booleans(),
    allowed=st.booleans(),
    banned=st.booleans(),
    shows=st.booleans(),
    revoked=st.booleans(),
    mine=st.booleans(),
    by_owner=st.booleans(),
    by_delegate=st.booleans(),
    left_s=st.integers(-2 * SKEW_S, 2 * SKEW_S),
)
def test_permitted_agrees_with_a_dumb_twin(
    is_open: bool,
    allowed: bool,
    banned: bool,
    shows: bool,
    revoked: bool,
    mine: bool,
    by_owner: bool,
    by_delegate: bool,
    left_s: int,
) -> None:
    shown = a_pass(
        ME if mine else OTHER,
        signer=OWNER if by_owner else STRANGER,
        expires=int(NOW) + left_s,
        delegate=DELEGATE if by_delegate else Identity.of_seed(b"e" * 32),
    )
    access_list = AccessList(
        1,
        frozenset([ME] if allowed else []),
        frozenset([ME] if banned else []),
        frozenset([grant_name(shown.grant)] if revoked else []),
    )
    found, reason = permitted(AccessRules(RUN, KEY, is_open, access_list), ME, shown if shows else None, NOW)
    good = shows and not revoked and mine and by_owner and by_delegate and left_s > -SKEW_S
    assert found == (not banned and (is_open or allowed or good)), reason


def test_a_pass_is_of_no_use_in_another_run_or_longer_than_its_grant() -> None:
    rules = AccessRules(RUN, KEY, False)
    assert permitted(rules, ME, a_pass(), NOW)[0]
    assert not permitted(rules, ME, a_pass(run=RunId("cd" * 32)), NOW)[0]
    longer = a_pass()
    longer.expires_unix_s += 10**6
    assert not permitted(rules, ME, longer, NOW)[0]
    longer.grant.expires_unix_s += 10**6
    assert not permitted(rules, ME, longer, NOW)[0]
    assert not permitted(rules, ME, a_pass(), NOW + 1000 + SKEW_S)[0], "it ends"


def test_a_grant_lets_in_so_many_machines() -> None:
    admission = Admission(AccessRules(RUN, KEY, False), ManualClock(NOW))
    assert admission.judge(ME, a_pass(ME, machines=1))[0]
    assert not admission.judge(OTHER, a_pass(OTHER, machines=1))[0]
    assert admission.judge(ME)[0], "who showed a pass need not show it again"
    assert not admission.judge(OTHER)[0]


def test_the_guest_list_counts_at_once_and_only_forwards() -> None:
    admission = Admission(AccessRules(RUN, KEY, False), ManualClock(NOW))
    assert admission.judge(ME, a_pass())[0] and not admission.judge(OTHER)[0]
    assert admission.learn(sign_access_list(OWNER, RUN, AccessList(2, allowed=frozenset([OTHER]))))
    assert admission.judge(OTHER)[0]
    assert admission.learn(sign_access_list(OWNER, RUN, AccessList(3, revoked=frozenset([grant_name(a_pass().grant)]))))
    assert not admission.judge(ME)[0] and not admission.judge(OTHER)[0]
    assert not admission.learn(sign_access_list(OWNER, RUN, AccessList(2, allowed=frozenset([OTHER])))), (
        "an old list is no news"
    )
    assert not admission.judge(OTHER)[0]


def test_only_the_owner_writes_guest_lists() -> None:
    access_list = AccessList(5, banned=frozenset([ME]))
    assert open_access_list(sign_access_list(OWNER, RUN, access_list), RUN, KEY) == access_list
    for signed in (
        sign_access_list(STRANGER, RUN, access_list),
        sign_access_list(OWNER, RunId("cd" * 32), access_list),
        wire.SignedAccessList(list=b"\xff" * 20, signature=OWNER.sign(b"swarmnode/guests/v1\0" + b"\xff" * 20)),
        wire.SignedAccessList(list=b"x" * (2 << 20), signature=b"s" * 64),
    ):
        with pytest.raises(RemoteFault, match="access list"):
            open_access_list(signed, RUN, KEY)


def test_ten_thousand_passes_are_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_module, "REMEMBERED_MAX", 50)
    admission = Admission(AccessRules(RUN, KEY, False), ManualClock(NOW))
    for number in range(200):
        peer = Identity.of_seed(number.to_bytes(32, "big")).peer_id
        assert admission.judge(peer, a_pass(peer))[0]
        assert not admission.judge(PeerId(peer[::-1]), a_pass(peer, signer=STRANGER))[0]
    assert len(admission._passes) == 50
    assert sum(map(len, admission._machines.values())) == 50


def test_a_pass_fits_a_record() -> None:
    assert a_pass(machines=1000).ByteSize() <= 230


@pytest.mark.parametrize(
    ("least", "version", "admitted"),
    [
        ("", "0.0.1", True),
        ("0.2.0", "0.2.0", True),
        ("0.2.0", "0.10", True),
        ("0.2.0", "0.2.1.dev3", True),
        ("0.2.0", "0.1.9", False),
        ("0.2", "", False),
    ],
)
def test_a_version_below_the_owners_least_is_told_to_update(least: str, version: str, admitted: bool) -> None:
    reason = too_old(least, version)
    assert (not reason) == admitted
    assert admitted or "pip install --upgrade WHEEL" in reason


def test_the_least_version_is_signed_with_the_list() -> None:
    key = Ed25519PrivateKey.generate()
    run = RunId("ab" * 32)
    owner = key.public_key().public_bytes_raw()
    signed = sign_access_list(key, run, AccessList(1, least_version="0.2.0"))
    assert open_access_list(signed, run, owner).least_version == "0.2.0"

"""An owner's bad day, with the commands that docs/bad-version.md names: the key is read by a thief, lost, or signed
with before the owner notices. Then the thief gets in 0 times, and no verb refuses the owner."""

import base64
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.app.cli.main import main
from swarmnode.app.cli.owner import chain_of
from swarmnode.app.daemon.admission import make_admission, own_pass, read_access_list
from swarmnode.app.daemon.options import NodeOptions
from swarmnode.base import bounds
from swarmnode.base.bounds.table import RIVALS_MAX, SEQUENCE_MAX
from swarmnode.base.errors import NotPermitted, RemoteFault, SwarmnodeError
from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId
from swarmnode.base.wire import access_pb2, call_pb2
from swarmnode.run import manifest as manifests
from swarmnode.run import owner
from swarmnode.run.admission.access import (
    SEQUENCE_STEP_MAX,
    AccessList,
    check_warrant,
    mark_of,
    sign_access_list,
    sign_grant,
    sign_pass,
    sign_warrant,
)
from swarmnode.run.admission.admission import Admission
from swarmnode.run.admission.amendment import Amendments
from swarmnode.run.admission.invite import Invite, decode
from swarmnode.run.manifest.folder import SIGNED_FILE, write_signed
from tests.support.clock import WallClock

Capture = pytest.CaptureFixture[str]


def identity(number: int) -> Identity:
    return Identity.of_seed(number.to_bytes(32, "big"))


FRIEND, GUEST, BANNED, ARCHIVE, THIEF = (identity(number) for number in range(5, 10))
MEETING = f"/ip4/10.0.0.1/tcp/4001/p2p/{identity(99).peer_id}"


class Run:
    """The owner's folder, a member that was there from the beginning, and what the thief has."""

    def __init__(self, folder: Path, capture: Capture) -> None:
        self.folder = folder
        self.capture = capture
        assert main(["init", str(folder), "--preset", "tiny"]) == 0
        assert "move it off this machine" in capture.readouterr().err
        assert main(["manifest", "set", str(folder), "access.mode=invited"]) == 0
        self.recovery = folder.parent / "drawer.key"
        (folder / "recovery.key").rename(self.recovery)
        self.early = self.invite()
        self.warrant = self.archive()
        self.say("access", "--ban", BANNED.peer_id)
        self.stolen = owner.load_owner(folder / "owner.key")
        self.member = self.joined()
        assert self.admits(self.member, self.early, FRIEND)

    def say(self, *words: str) -> str:
        verb = [words[0], *([words[1]] if words[0] == "owner" else [])]
        self.capture.readouterr()
        code = main([*verb, str(self.folder), *words[len(verb) :]])
        heard = self.capture.readouterr()
        assert code == 0, f"{' '.join(words)} ends with {code}: {heard.err}"
        return heard.out

    def invite(self) -> Invite:
        return decode(self.say("invite", "--bootstrap", MEETING).strip())

    def archive(self) -> access_pb2.Warrant:
        raw = base64.b64decode(self.say("archive", "--allow", ARCHIVE.peer_id))
        return bounds.opened(access_pb2.Warrant, raw, "warrant")

    def options(self, invite: Invite | None = None) -> NodeOptions:
        home = self.folder.parent / "home"
        return NodeOptions(str(self.folder / SIGNED_FILE), (), None, "", home, 0, home, "", invite=invite)

    def joined(self, invite: Invite | None = None, *, knows: bool = True) -> Admission:
        """A newcomer's admission, with the amendments and the list of the folder if it `knows` them."""
        signed, manifest = manifests.read_signed(self.folder / SIGNED_FILE)
        _, run_id = manifests.verify(signed, None)
        options = self.options(invite or self.early)
        if not knows:
            del signed.amendments[:]
        admission = make_admission(signed, manifest, run_id, options, FRIEND, WallClock()) if knows else None
        if admission is None:
            amendments = Amendments.of(signed, manifest, run_id)
            return Admission(self.member.rules, WallClock(), None, amendments)
        return admission

    def hear(self, admission: Admission) -> Admission:
        """Let it hear of the owner's folder, as from the coordinator that runs there."""
        here = read_access_list(self.options())
        assert here is not None
        admission.learn(here)
        return admission

    def admits(self, admission: Admission, invite: Invite, machine: Identity) -> bool:
        assert invite.grant is not None
        delegate = Identity.of_seed(invite.secret)
        peer = PeerId(machine.peer_id)
        shown = sign_pass(delegate, invite.run_id, invite.grant, peer, invite.grant.expires_unix_s)
        return admission.judge(peer, shown)[0]

    def archives(self, admission: Admission, warrant: access_pb2.Warrant) -> bool:
        keys = admission.rules.keys.of(warrant.amendment, mark_of(warrant))
        run_id = admission.rules.run_id
        return check_warrant(warrant, owners=keys, run_id=run_id, machine=ARCHIVE.peer_id, now_unix_s=time.time())[0]


@pytest.fixture
def run(tmp_path: Path, capsys: Capture) -> Run:
    return Run(tmp_path / "run", capsys)


def exchange(one: Admission, other: Admission) -> None:
    """Both ask each other, as nodes do each period, until nothing is new; a refusal costs that answer."""
    for _ in range(3):
        for asker, answerer in ((one, other), (other, one)):
            try:
                asker.learn(answerer.news(asker.asking()))
            except RemoteFault:
                continue


def rivals(run: Run, keys: int = 3) -> list[Amendments]:
    """Chains that the thief signs with the key it read: new owners at each place where that key could sign."""
    signed, manifest = manifests.read_signed(run.folder / SIGNED_FILE)
    _, run_id = manifests.verify(signed, None)
    made = []
    for length in range(min(keys, len(signed.amendments) + 1)):
        chain = Amendments(manifest, run_id, signed.owner)
        try:
            chain.learn(signed.amendments[:length])
            for _ in range(3):
                chain.sign(run.stolen, 0, {}, [owner.public_bytes(run.stolen)])
        except SwarmnodeError:
            continue
        made.append(chain)
    return made


def the_thief_tries(run: Run, admission: Admission) -> int:
    """How often the thief gets something with the stolen key: a machine in, a copy, a list or a chain that counts."""
    run_id = admission.rules.run_id
    got = 0
    until = int(time.time()) + 86_400
    for amendment in range(5):
        grant = sign_grant(run.stolen, run_id, THIEF, until, 0, amendment)
        got += admission.judge(THIEF.peer_id, sign_pass(THIEF, run_id, grant, THIEF.peer_id, until))[0]
        warrant = sign_warrant(run.stolen, run_id, PeerId(ARCHIVE.peer_id), until, amendment)
        got += run.archives(admission, warrant)
        for sequence in (7, SEQUENCE_STEP_MAX, SEQUENCE_MAX, 2**63 - 1):
            empty = AccessList(sequence, allowed=frozenset([PeerId(THIEF.peer_id)]), amendment=amendment)
            got += learns(admission, sign_access_list(run.stolen, run_id, empty))
    for chain in rivals(run):
        before = admission.rules.keys.now
        learns(admission, access_pb2.SignedAccessList(amendments=chain.signed))
        got += admission.rules.keys.now != before
    got += admission.judge(THIEF.peer_id)[0] + admission.judge(BANNED.peer_id)[0]
    return got


def learns(admission: Admission, signed: access_pb2.SignedAccessList) -> bool:
    try:
        return admission.learn(signed)
    except RemoteFault:
        return False


def rotation(run: Run) -> None:
    """The owner knows that the key was read, and replaces it first."""
    run.say("owner", "rotate", "--recovery", str(run.recovery))


def loss(run: Run) -> None:
    """The disk with owner.key is gone: the thief has the only copy."""
    (run.folder / "owner.key").unlink()
    for verb in (
        ["invite", "--bootstrap", MEETING],
        ["access", "--ban", GUEST.peer_id],
        ["amend", "inner.clip_norm=1"],
    ):
        assert main([verb[0], str(run.folder), *verb[1:]]) in (77, 78)
    rotation(run)


def fork(run: Run) -> None:
    """The thief was first: members took up its owners, its list that bans friends, at a high number."""
    theirs = rivals(run)[-1]
    run.member.learn(access_pb2.SignedAccessList(amendments=theirs.signed))
    for number in range(1, 5):
        cruel = AccessList(
            number * SEQUENCE_STEP_MAX,
            allowed=frozenset([PeerId(THIEF.peer_id)]),
            banned=frozenset([PeerId(FRIEND.peer_id)]),
            amendment=len(theirs.chain),
        )
        learns(run.member, sign_access_list(run.stolen, run.member.rules.run_id, cruel))
    assert run.member.judge(THIEF.peer_id)[0] and not run.admits(run.member, run.early, FRIEND)
    rotation(run)


def fork_at_home(run: Run) -> None:
    """As `fork`, and the thief's amendments are in the owner's own file."""
    theirs = rivals(run)[-1]
    signed, _ = manifests.read_signed(run.folder / SIGNED_FILE)
    signed.amendments.extend(theirs.signed)
    write_signed(run.folder / SIGNED_FILE, signed)
    run.member.learn(access_pb2.SignedAccessList(amendments=theirs.signed))
    run.say("owner", "rotate", "--recovery", str(run.recovery), "--after", "0")
    assert [one.recovery for one in chain_of(run.folder).chain] == [True]


DAYS: tuple[Callable[[Run], None], ...] = (rotation, loss, fork, fork_at_home)


@pytest.mark.parametrize("day", DAYS, ids=lambda day: day.__name__)
def test_the_thief_gets_in_0_times_and_the_owner_is_never_refused(run: Run, day: Callable[[Run], None]) -> None:
    day(run)
    assert owner.public_bytes(owner.load_owner(run.folder / "owner.key")) != owner.public_bytes(run.stolen)
    newcomer = run.joined()
    for admission in (run.hear(run.member), newcomer, run.hear(run.joined(knows=False))):
        assert the_thief_tries(run, admission) == 0
        assert run.admits(admission, run.early, FRIEND), "an invite in the owner's book lives on"
        assert run.archives(admission, run.warrant), "and a warrant"
        assert not admission.judge(BANNED.peer_id)[0], "bans hold"

    # Every verb of the owner, then all again after a second rotation by the new key's owner.
    for _ in range(2):
        late = run.invite()
        own = own_pass(run.options(), late.run_id, chain_of(run.folder), GUEST, WallClock())
        warrant = run.archive()
        assert f"banned {THIEF.peer_id}" in run.say("access", "--ban", THIEF.peer_id)
        run.say("access", "--allow", GUEST.peer_id)
        run.say("amend", "inner.clip_norm=0.5", "--from-round", "3")
        assert "clip_norm" in run.say("amend", "--list")
        spare = run.folder.parent / f"spare-{len(chain_of(run.folder).chain)}.key"
        assert main(["owner", "new", str(spare)]) == 0
        run.say("owner", "add", str(spare))
        for admission in (run.member, newcomer, run.joined(late)):
            run.hear(admission)
            assert run.admits(admission, late, identity(50)) and run.archives(admission, warrant)
            assert admission.judge(GUEST.peer_id)[0] and admission.rules.access_list.amendment > 0
            assert own is not None and admission.judge(GUEST.peer_id, own)[0]
            assert the_thief_tries(run, admission) == 0
            assert run.admits(admission, run.early, FRIEND) and not admission.alarms()
        run.say("owner", "rotate", "--recovery", str(run.recovery))
    run.say("access", "--revoke", json.loads((run.folder / "issued.json").read_text())[0]["name"])
    run.hear(newcomer)
    assert not run.admits(newcomer, run.early, FRIEND), "a revoked invite ends, also after rotations"


def test_a_forked_newcomer_and_members_find_together_or_show_an_alarm(run: Run) -> None:
    """Without the recovery key two owners cannot be told apart: everybody shows it. With it, one counts."""
    victim = run.joined()
    honest = run.member
    theirs = rivals(run)[0]
    victim.learn(access_pb2.SignedAccessList(amendments=theirs.signed))
    run.say("owner", "rotate")  # with the key that was read: all that an owner without a recovery key can do
    run.hear(honest)
    exchange(victim, honest)
    assert "owners signed two amendments 1" in victim.alarms()[0] and honest.alarms(), "both show it"
    third = run.joined()
    exchange(third, honest)
    assert third.alarms(), "and a newcomer, who hears of both from either"
    assert honest.amendments is not None and honest.amendments.lines(), "the chain goes on"

    run.say("owner", "rotate", "--recovery", str(run.recovery))
    run.hear(honest)
    for admission in (victim, third):
        exchange(admission, honest)
        assert admission.rules.keys.now == chain_of(run.folder).owners and the_thief_tries(run, admission) == 0
        assert admission.rules.access_list.banned == {BANNED.peer_id}


def test_an_invite_names_the_amendments_so_that_a_meeting_point_cannot_keep_them_back(run: Run) -> None:
    rotation(run)
    late = run.invite()
    signed, manifest = manifests.read_signed(run.folder / SIGNED_FILE)
    _, run_id = manifests.verify(signed, None)
    for amendments in ([], rivals(run)[0].signed):
        kept_back = type(signed)()
        kept_back.CopyFrom(signed)
        del kept_back.amendments[:]
        kept_back.amendments.extend(amendments)
        options = NodeOptions("ab" * 32, (), None, "", run.folder, 0, run.folder, "", invite=late)
        with pytest.raises(NotPermitted, match="amendment 1"):
            make_admission(kept_back, manifest, run_id, options, FRIEND, WallClock())


def test_two_lists_of_one_number_are_an_alarm(run: Run) -> None:
    run_id = run.member.rules.run_id
    known = run.member.rules.access_list
    other = AccessList(known.sequence, allowed=frozenset([PeerId(THIEF.peer_id)]))
    assert not run.member.learn(sign_access_list(run.stolen, run_id, other))
    assert "two access lists" in run.member.alarms()[0] and not run.member.judge(THIEF.peer_id)[0]
    rotation(run)
    run.hear(run.member)
    assert not run.member.alarms(), "the owner's new list ends it"


def test_the_recovery_key_signs_nothing_but_a_rotation(run: Run) -> None:
    key = owner.load_owner(run.recovery)
    chain = chain_of(run.folder)
    with pytest.raises(RemoteFault, match="does not replace"):
        chain.sign(key, 0, {"inner.clip_norm": 0.5})
    with pytest.raises(RemoteFault, match="does not replace"):
        chain.sign(key, 0, {"inner.clip_norm": 0.5}, [bytes(32)])
    assert main(["owner", "rotate", str(run.folder), "--recovery", str(run.folder / "owner.key")]) == 78
    other = run.folder.parent / "other.key"
    owner.create_owner(other)
    assert main(["owner", "rotate", str(run.folder), "--recovery", str(other)]) == 78


def test_rivals_are_bounded(run: Run) -> None:
    chain = chain_of(run.folder)
    for _ in range(RIVALS_MAX + 3):
        chain.sign(run.stolen, 0, {}, [owner.public_bytes(run.stolen)])
    for length in range(RIVALS_MAX + 3):
        other = chain_of(run.folder)
        other.learn(chain.signed[:length])
        other.sign(run.stolen, 0, {"inner.clip_norm": 0.25 + length / 100})
        chain.learn(other.signed)
    assert len(chain.rivals) == RIVALS_MAX
    admission = run.member
    admission.learn(access_pb2.SignedAccessList(amendments=chain.signed, rivals=chain.rivals.values()))
    assert len(admission.news(call_pb2.AccessListRequest()).rivals) == 2 * RIVALS_MAX


def test_a_rotation_that_broke_off_is_finished_by_the_next(run: Run) -> None:
    fresh = run.folder / "owner.key.new"
    key = owner.create_owner(fresh)
    chain = chain_of(run.folder)
    made = manifests.read_signed(run.folder / SIGNED_FILE)[0]
    chain.sign(run.stolen, 0, {}, [owner.public_bytes(key)])
    made.amendments.extend(chain.signed)
    write_signed(run.folder / SIGNED_FILE, made)
    run.say("owner", "rotate")
    assert len(chain_of(run.folder).chain) == 2 and not fresh.exists()
    owner.create_owner(fresh)  # of one that broke off before anything was signed
    run.say("owner", "rotate")
    assert len(chain_of(run.folder).chain) == 3 and isinstance(run.stolen, Ed25519PrivateKey)

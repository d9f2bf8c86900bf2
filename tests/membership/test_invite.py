"""Invites: what goes in comes out; whatever is damaged is told apart in one clear line."""

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.app.cli import join
from swarmnode.base.errors import UsageError, VersionMismatch
from swarmnode.base.identity import Identity, friendly_name
from swarmnode.base.ids import RunId
from swarmnode.base.wire import access_pb2 as wire
from swarmnode.net.transport.address import is_metadata
from swarmnode.run.admission.invite import PREFIX, Invite, decode, encode, looks_like_invite

OWNER = Identity.of_seed(b"o" * 32)
PEERS = [Identity.of_seed(bytes([number]) * 32).peer_id for number in range(4)]

ports = st.integers(1, 65535)
hosts = st.one_of(
    st.ip_addresses(v=4).filter(lambda ip: not is_metadata(ip)).map(lambda ip: f"/ip4/{ip}"),
    st.ip_addresses(v=6).filter(lambda ip: not is_metadata(ip)).map(lambda ip: f"/ip6/{ip}"),
    st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?(\.[a-z]{2,5}){1,3}", fullmatch=True).map("/dns4/{}".format),
)
addresses = st.builds(
    lambda host, kind, port, peer: f"{host}/{kind}/{port}/p2p/{peer}",
    hosts,
    st.sampled_from(("tcp", "udp")),
    ports,
    st.sampled_from(PEERS),
)


@pytest.mark.node
@given(st.binary(min_size=32, max_size=32), st.lists(addresses, min_size=1, max_size=6), st.booleans())
def test_an_invite_reads_back(run: bytes, bootstraps: list[str], with_grant: bool) -> None:
    grant = wire.Grant(delegate=OWNER.public_key, expires_unix_s=7, signature=b"s" * 64) if with_grant else None
    invite = Invite(RunId(run.hex()), OWNER.public_key, tuple(bootstraps), grant, b"k" * 32 if with_grant else b"")
    text = encode(invite)
    found = decode(text)
    assert (found.run_id, found.owner, found.grant, found.secret) == (
        invite.run_id,
        invite.owner,
        invite.grant,
        invite.secret,
    )
    assert set(found.bootstraps) == set(bootstraps)
    assert text.startswith(PREFIX) and text.isprintable() and all(c.isalnum() or c in "-_." for c in text)
    assert "6b6b6b" not in repr(found) and "kkkk" not in repr(found), "a secret is not in what a log might show"


def one() -> str:
    return encode(Invite(RunId("ab" * 32), OWNER.public_key, (f"/ip4/203.0.113.7/tcp/4001/p2p/{PEERS[0]}",)))


@given(st.data())
def test_every_damaged_character_is_noticed(data: st.DataObject) -> None:
    text = one()
    at = data.draw(st.integers(len(PREFIX), len(text) - 1))
    other = data.draw(st.characters(min_codepoint=33, max_codepoint=126).filter(lambda c: c != text[at]))
    with pytest.raises(UsageError, match="damaged invite"):
        decode(text[:at] + other + text[at + 1 :])


def test_mail_may_break_it() -> None:
    text = one()
    assert decode(f"  {text[:50]}\r\n{text[50:]}\n") == decode(text)


def test_other_kinds_are_told_apart() -> None:
    with pytest.raises(VersionMismatch, match="kind 2"):
        decode(one().replace("swarm1.", "swarm2."))
    for nonsense in ("", "hello", "/ip4/1.2.3.4/tcp/1/p2p/x", "swarm.", "x" * 9000):
        assert not looks_like_invite(nonsense)
        with pytest.raises(UsageError, match=r"not an invite|at most"):
            decode(nonsense)


@pytest.mark.parametrize(
    "address",
    [
        "/ip4/1.2.3.4/tcp/4001",
        f"/ip4/1.2.3.4/sctp/4001/p2p/{PEERS[0]}",
        f"/ip4/1.2.3.4/tcp/0/p2p/{PEERS[0]}",
        f"/ip4/1.2.3/tcp/1/p2p/{PEERS[0]}",
        "/ip4/1.2.3.4/tcp/1/p2p/12D3KooW",
        f"/dns4/a b/tcp/1/p2p/{PEERS[0]}",
    ],
)
def test_addresses_that_no_invitation_can_hold_are_refused(address: str) -> None:
    with pytest.raises(UsageError, match="cannot be put into an invite"):
        encode(Invite(RunId("ab" * 32), OWNER.public_key, (address,)))


def test_a_node_is_called_by_its_key_and_not_by_its_machine() -> None:
    names = {friendly_name(Identity.of_seed(bytes([n]) * 32).peer_id) for n in range(20)}
    assert len(names) > 15 and all(len(name.split("-")) == 3 for name in names)
    named = next(one for one in join.command.params if one.name == "name")
    assert named.get_default(click.Context(join.command)) in (None, "") or "UNSET" in repr(named.default)

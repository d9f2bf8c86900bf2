import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.base.errors import UsageError
from swarmnode.base.identity import Identity
from swarmnode.net.transport.address import dialable_of, parse_bootstrap, parse_bootstraps, parse_endpoint

PEER = Identity.of_seed(bytes(32)).peer_id


@pytest.mark.parametrize(
    "text",
    ["/ip4/127.0.0.1/tcp/0", "/ip6/::1/tcp/4001", "/dns/node.example.org/tcp/65535", "/dns4/a/tcp/1", "/dns6/a/tcp/1"],
)
def test_addresses_that_can_be_used(text: str) -> None:
    assert str(parse_endpoint(text)) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("127.0.0.1:4001", "not a TCP or UDP multiaddr"),
        ("/ip4/127.0.0.1/sctp/4001", "not a TCP or UDP multiaddr"),
        ("/ip4/127.0.0.1/tcp/4001/ws", "not a TCP or UDP multiaddr"),
        ("/ip4/127.0.0.256/tcp/4001", "'127.0.0.256' is not an ip4 address"),
        ("/ip6/127.0.0.1/tcp/4001", "is not an ip6 address"),
        ("/ipx/1/tcp/4001", "'ipx' is none of"),
        ("/dns/-/tcp/4001", "is not a host name"),
        ("/ip4/127.0.0.1/tcp/65536", "not a number from 0 to 65535"),
        ("/ip4/127.0.0.1/tcp/", "not a number from 0 to 65535"),
        ("/ip4/127.0.0.1/tcp/²", "not a number from 0 to 65535"),
    ],
)
def test_an_address_that_cannot_be_used_says_which_part(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_endpoint(text)


@given(st.text(max_size=80))
def test_any_text_is_an_address_or_one_line(text: str) -> None:
    try:
        assert str(parse_endpoint(text)).count("/") == 4
    except UsageError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("host", ["ip4/169.254.169.254", "ip6/fd00:ec2::254", "ip6/::ffff:169.254.169.254"])
def test_metadata_services_are_never_dialled(host: str) -> None:
    """A stranger's record or invite must not make a node call it."""
    good = "/ip4/192.168.1.7/tcp/4001"
    assert dialable_of([f"/{host}/tcp/80", good, f"/{host}/tcp/80/p2p/{PEER}"]) == [good]
    assert dialable_of([f"/{host}/tcp/80/p2p/{PEER}/p2p-circuit"]) == []
    with pytest.raises(UsageError, match="metadata service"):
        parse_bootstraps([f"/{host}/tcp/80/p2p/{PEER}"])


def test_bootstraps() -> None:
    one = f"/ip4/1.2.3.4/tcp/4001/p2p/{PEER}"
    two = f"/dns/b.example/tcp/4001/p2p/{PEER}"
    assert parse_bootstrap(one) == (PEER, "/ip4/1.2.3.4/tcp/4001")
    assert parse_bootstraps([one, two, one]) == [(PEER, ["/ip4/1.2.3.4/tcp/4001", "/dns/b.example/tcp/4001"])]
    assert parse_bootstraps([]) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("/ip4/1.2.3.4/tcp/4001", "names no peer"),
        (f"/ip4/1.2.3.4/p2p/{PEER}", "not a TCP or UDP multiaddr"),
        ("/ip4/1.2.3.4/tcp/4001/p2p/QmNobody", "not an Ed25519 peer id"),
        (f"/ip4/1.2.3.4/tcp/0/p2p/{PEER}", "port 0 cannot be reached"),
    ],
)
def test_a_wrong_bootstrap_says_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_bootstrap(text)


@pytest.mark.parametrize(
    "host",
    """
ip4/168.63.129.16 ip4/192.0.0.192 ip4/169.254.1.1 ip4/100.100.100.200 ip6/fd00:ec2::23 ip6/fd20:ce::254
ip6/fe80::a9fe:a9fe ip6/::ffff:168.63.129.16 ip6/::168.63.129.16 ip6/64:ff9b::a83f:8110 ip6/2002:a83f:8110::1
dns4/2852039166 dns4/0xa9fea9fe dns4/169.254.43518 dns/0xa9.0xfe.0xa9.0xfe ip6/fd00:c1::a9fe:a9fe ip6/::ffff:0:a83f:8110
""".split(),
)
def test_no_form_of_a_metadata_service_is_a_peer(host: str) -> None:
    assert dialable_of([f"/{host}/tcp/80"], names=True) == []
    with pytest.raises(UsageError):
        parse_bootstrap(f"/{host}/tcp/80/p2p/{PEER}")


def test_only_bootstraps_have_names() -> None:
    assert dialable_of(["/dns4/node.example.org/tcp/80", "/ip4/1.2.3.4/tcp/80"]) == ["/ip4/1.2.3.4/tcp/80"]
    assert parse_bootstrap(f"/dns4/node.example.org/tcp/80/p2p/{PEER}")[1] == "/dns4/node.example.org/tcp/80"

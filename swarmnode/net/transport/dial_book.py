"""Which addresses may be dialled now. Records name addresses of anybody, and keys cost nothing: whoever could make each
node of a swarm dial what a record says would have a cannon.

Pure: what was met goes in, a verdict and its reason come out.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence

from swarmnode.base.remembered import Remembered
from swarmnode.base.token_bucket import PeerBudget, TokenBucket
from swarmnode.net.transport.address import Endpoint, is_circuit, is_metadata, is_public, parse_endpoint, plain

PERIOD_S = 60.0
# Two nodes that dial each other at once both fail, and may try again at a met host; libp2p itself waits for 5 s.
MET_PERIOD_S = 10.0
MET_PORTS = 8.0  # guess: ports of a met address tried a minute; a house behind one router has fewer machines
ROUTER_DIALS = 12.0  # guess: a minute; UPnP renews a port every 20 s by a few calls
DIRECT_MAX = 2  # addresses of one peer; and circuits, as many as it announces (libp2p.CIRCUITS_MAX)

Key = tuple[str, int]
"""An IP address in its plain form, and a port; 0: any."""


def _plain(host: str) -> str:
    return str(plain(ipaddress.ip_address(host.split("%")[0])))


def _site(host: str) -> str:
    """The share of one machine or household: an IPv4 address, or 64 bits of an IPv6 one."""
    return host if ":" not in host else str(ipaddress.ip_network(f"{host}/64", strict=False))


def _network(host: str) -> str:
    address = ipaddress.ip_address(host)
    return "public" if is_public(address) else "loopback" if address.is_loopback else "private"


class DialBook:
    """The book of one node. A peer counts as met at an address once a connection with it was authenticated: that alone
    proves that somebody there takes part."""

    def __init__(self, listen: Sequence[str] = (), *, lan: bool = False) -> None:
        """`listen`: where this node listens; an address of its own counts as met. `lan`: its user opens the local
        network."""
        self._networks = {"public", *(["private"] if lan else [])}
        self._named: set[Key] = set()
        self._met = Remembered[Key, None]()
        self._dialled = Remembered[Key, float]()
        self._ports = PeerBudget(MET_PORTS / PERIOD_S, MET_PORTS)
        self._by_router = TokenBucket.full(ROUTER_DIALS / PERIOD_S, ROUTER_DIALS)
        self.router = ""  # the default gateway, where UPnP asks for a port
        self._news = False
        for endpoint in map(parse_endpoint, listen):
            if endpoint.family in ("ip4", "ip6") and not ipaddress.ip_address(endpoint.host).is_unspecified:
                self.name([endpoint])

    def take_news(self) -> bool:
        """Whether a dial was permitted since this was last asked."""
        news = self._news
        self._news = False
        return news

    def name(self, endpoints: Iterable[Endpoint]) -> None:
        """Add endpoints that this machine's user named. Their network is the swarm's."""
        for endpoint in endpoints:
            host = _plain(endpoint.host)
            self._networks.add(_network(host))
            self._named |= {(host, endpoint.port), (host, 0)}

    def meet(self, host: str, port: int) -> None:
        """A peer proved its key at this address."""
        for key in ((_plain(host), port), (_plain(host), 0)):
            self._met[key] = None

    def is_met(self, host: str, port: int = 0) -> bool:
        key = _plain(host), port
        return key in self._met or key in self._named

    def permit(self, host: str, port: int, now_s: float) -> tuple[bool, str]:
        """Whether to dial now, and why; a permitted dial is entered."""
        host = _plain(host)
        if is_metadata(ipaddress.ip_address(host)):
            return False, "a cloud's metadata service"
        if self.is_met(host, port):
            return True, "met there"
        if host == self.router:
            return self._by_router.take(now_s), "the router"
        met = self.is_met(host)
        if not met and _network(host) not in self._networks:
            return False, f"a {_network(host)} address, where nobody was met"
        keys = [(host, port)] if met else [(host, port), (_site(host), 0)]
        period_s = MET_PERIOD_S if met else PERIOD_S
        if any(now_s - self._dialled.get(key, -PERIOD_S) < period_s for key in keys):
            return False, f"dialled less than {period_s:.0f} s ago, and nobody was met there"
        if met and _network(host) != "loopback" and not self._ports.take(host, now_s):
            return False, "many ports of one address"
        for key in keys:
            self._dialled[key] = now_s
        self._news = True
        return True, f"not dialled for {period_s:.0f} s"

    def revoke(self, host: str, port: int) -> None:
        """Strike the last dial: it did not take place."""
        for key in ((_plain(host), port), (_site(_plain(host)), 0)):
            self._dialled.pop(key, None)

    def choose(self, addresses: Sequence[str]) -> list[str]:
        """The addresses of one peer to try: DIRECT_MAX direct ones, those of met hosts first, then public ones, none in
        a network where nobody was met; and as many circuits, whose relays may have names that p2pd looks up."""
        direct = [one for one in addresses if not is_circuit(one)]
        host = {one: _plain(parse_endpoint(one).host) for one in direct}
        able = [one for one in direct if self.is_met(host[one]) or _network(host[one]) in self._networks]
        able.sort(key=lambda one: (not self.is_met(host[one]), _network(host[one]) != "public"))
        return [*able[:DIRECT_MAX], *[one for one in addresses if is_circuit(one)][:DIRECT_MAX]]

"""Byte ranges of files over HTTP, from URLs in a manifest. URLs come from strangers, so addresses are checked.

A host must have a public address, and each address is checked again when it is connected to. A redirect is checked like
a first request. No cookie, no key, no proxy, and no more bytes than requested. Callers compare all data
with hashes.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

import aiohttp

from swarmnode.base.errors import NotPermitted, Unavailable, cause_of
from swarmnode.base.untrusted_text import printable
from swarmnode.base.uplink_scheduler import SLOWEST_BYTES_PER_S
from swarmnode.net.membership.liveness import SMALL_CALL_S
from swarmnode.net.transport.address import Address, is_metadata, is_public
from swarmnode.net.transport.throttle import RateThrottle

REDIRECTS_MAX = 10  # aiohttp's max_redirects, by default; the Hugging Face hub takes one to its content network
ADDRESSES_MAX = 8
CONNECT_S = 2.0 * SMALL_CALL_S  # a name is looked up first
SILENT_S = 3.0 * SMALL_CALL_S  # longest silence of a server
PIECE_BYTES = 64 << 10
URL_MAX = 4096  # of a redirect: content networks use long signed URLs


class AddressRules:
    """Addresses that may be contacted. `private`: this machine's user also allows non-public ones, but no cloud's
    metadata service; with `named` only those that the user named, not where they redirect to."""

    def __init__(self, *, private: bool = False, named: bool = False) -> None:
        self.private = private
        self.named = named

    def allows(self, address: Address) -> bool:
        return is_public(address) or (self.private and not is_metadata(address))

    async def resolve(self, host: str, port: int) -> list[str]:
        """Allowed addresses of `host`. Raises Unavailable if it has none, and NotPermitted if all are
        refused."""
        try:
            infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise Unavailable(f"{host}: no address: {cause_of(error)}") from None
        # An IPv6 address may name an interface behind a percent sign: fe80::1%eth0.
        addresses = list(dict.fromkeys(str(sockaddr[0]).split("%")[0] for *_, sockaddr in infos))[:ADDRESSES_MAX]
        allowed = [one for one in addresses if self.allows(ipaddress.ip_address(one))]
        if not allowed:
            why = "a run may not make this machine contact it (--allow-private-addresses permits it)"
            why = "a model's place may not lead there" if self.named else why
            raise NotPermitted(f"{printable(host, 60)} is {', '.join(addresses)}, which is not a public address: {why}")
        return allowed


class HttpRangeReader:
    """Reads ranges over HTTP(S). Call `close` at the end."""

    def __init__(self, rules: AddressRules, throttle: RateThrottle | None = None) -> None:
        """`throttle` counts received bytes and applies this machine's rate limit; None: no limit."""
        self._rules = rules
        self._throttle = throttle
        self._sessions: dict[bool, aiohttp.ClientSession] = {}  # by whether they also reach private addresses

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()

    async def read(self, url: str, offset: int, nbytes: int) -> bytes:
        """Bytes [offset, offset + nbytes) of `url`. Raises Unavailable, NotPermitted."""
        last = offset + nbytes - 1
        async with self._bounded(url, nbytes), self._answer(url, {"Range": f"bytes={offset}-{last}"}) as answer:
            whole = answer.status == 200 and offset == 0 and answer.content_length == nbytes
            if answer.status == 200 and not whole:
                raise Unavailable(
                    f"{url[:200]}: the server does not support ranges (status 200); host the data elsewhere"
                )
            content_range = answer.headers.get("Content-Range", "")
            if not whole and not content_range.startswith(f"bytes {offset}-{last}/"):
                raise Unavailable(f"{url[:200]}: expected bytes {offset}-{last}, got {content_range[:60]!r}")
            data = await self._body(answer, nbytes)
        if len(data) != nbytes:
            raise Unavailable(f"{url[:200]}: expected {nbytes} bytes, got {len(data)}")
        return data

    async def read_whole(self, url: str, nbytes_max: int) -> bytes:
        """All of `url`. Raises Unavailable if it is longer than `nbytes_max`, and NotPermitted."""
        async with self._bounded(url, nbytes_max), self._answer(url, {}) as answer:
            data = await self._body(answer, nbytes_max + 1)
        if len(data) > nbytes_max:
            raise Unavailable(f"{url[:200]}: longer than {nbytes_max} bytes")
        return data

    async def _body(self, answer: aiohttp.ClientResponse, nbytes_max: int) -> bytes:
        parts = list[bytes]()
        left = nbytes_max
        while left and (part := await answer.content.read(min(left, PIECE_BYTES))):
            parts.append(part)
            left -= len(part)
            if self._throttle is not None:
                self._throttle.down.total_nbytes += len(part)
                await self._throttle.down.spend(len(part))
        return b"".join(parts)

    @asynccontextmanager
    async def _bounded(self, url: str, nbytes: int) -> AsyncIterator[None]:
        """Enforce a time limit, and convert every failure to Unavailable. A volunteer's own rate limit extends the
        time."""
        rate = SLOWEST_BYTES_PER_S
        if self._throttle is not None and self._throttle.down.bps is not None:
            rate = min(rate, self._throttle.down.bps / 8 / 4)
        try:
            async with asyncio.timeout(CONNECT_S + SILENT_S + nbytes / max(1.0, rate)):
                yield
        except TimeoutError:
            raise Unavailable(f"{url[:200]}: too slow") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Unavailable(f"{url[:200]}: {printable(cause_of(error), 200)}") from None

    @asynccontextmanager
    async def _answer(self, url: str, headers: dict[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        """Response with status 200 or 206, after at most REDIRECTS_MAX redirects, each checked. A redirect of a public
        address leads to public ones alone, whatever this machine's user allows."""
        private = self._rules.private
        for _ in range(REDIRECTS_MAX + 1):
            parts = checked(url)
            assert parts.hostname is not None
            addresses = await self._rules_of(private).resolve(parts.hostname, parts.port or 0)
            private = private and not any(is_public(ipaddress.ip_address(one)) for one in addresses)
            async with self._opened(private).get(
                url,
                headers={**headers, "Accept-Encoding": "identity", "User-Agent": "swarmnode"},
                allow_redirects=False,
            ) as answer:
                if answer.status in (200, 206):
                    if answer.headers.get("Content-Encoding", "identity") != "identity":
                        raise Unavailable(
                            f"{url[:200]}: the server sent a compressed answer to a request without compression"
                        )
                    yield answer
                    return
                if answer.status not in (301, 302, 303, 307, 308):
                    raise Unavailable(f"{url[:200]}: HTTP status {answer.status}")
                target = urljoin(url, answer.headers.get("Location", ""))
                if urlsplit(url).scheme == "https" and urlsplit(target).scheme != "https":
                    raise NotPermitted(f"{url[:200]}: redirects to {target[:100]!r}, away from HTTPS")
                private = private and (not self._rules.named or urlsplit(target)[:2] == urlsplit(url)[:2])
                url = target
        raise Unavailable(f"{url[:200]}: more than {REDIRECTS_MAX} redirects")

    def _rules_of(self, private: bool) -> AddressRules:
        return self._rules if private == self._rules.private else AddressRules(named=self._rules.named)

    def _opened(self, private: bool) -> aiohttp.ClientSession:
        if private not in self._sessions:
            # trust_env=False: neither proxies nor ~/.netrc.
            self._sessions[private] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    use_dns_cache=False,
                    limit_per_host=4,
                    socket_factory=partial(_socket, self._rules_of(private)),
                ),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENT_S),
                trust_env=False,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._sessions[private]


def _socket(rules: AddressRules, info: Any) -> socket.socket:
    """A socket for an address about to be connected. A name may have another address now than when it was checked: one
    that is not allowed fails, and the next one is tried."""
    family, kind, protocol, _, sockaddr = info
    address = ipaddress.ip_address(str(sockaddr[0]).split("%")[0])
    if not rules.allows(address):
        raise PermissionError(errno.EACCES, f"{address} is not a public address")
    sock = socket.socket(family, kind, protocol)
    sock.setblocking(False)
    return sock


def checked(url: str) -> SplitResult:
    """Parse `url`. Raises NotPermitted unless it is http or https, with a host and without a user name."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise NotPermitted(f"{url[:100]!r}: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or len(url) > URL_MAX or port == 0:
        raise NotPermitted(f"{url[:100]!r} is not an http or https URL of a host")
    if parts.username is not None or parts.password is not None:
        raise NotPermitted(f"{parts.scheme}://...@{parts.hostname[:60]}: a URL with a user name is not allowed")
    return parts

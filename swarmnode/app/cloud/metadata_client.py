"""The client of a cloud's metadata service."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import aiohttp

from swarmnode.base.errors import RemoteFault, Unavailable, cause_of

ADDRESS = "http://169.254.169.254"  # the same in all three clouds; link-local, so no request leaves the machine
BODY_BYTES_MAX = 1 << 16  # guess: a hundred scheduled events


@dataclass(frozen=True, slots=True)
class Response:
    """A metadata service's answer; header names in lower case."""

    status: int
    body: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


class Metadata:
    """The metadata service at `base`, without proxies and redirects. Call `close` at the end."""

    def __init__(self, base: str = ADDRESS) -> None:
        self.base = base.rstrip("/")
        # trust_env=False: a proxy set for the machine's other traffic would answer instead of the cloud.
        self._session = aiohttp.ClientSession(trust_env=False, cookie_jar=aiohttp.DummyCookieJar())

    async def ask(
        self, method: str, path: str, headers: Mapping[str, str], *, timeout_s: float, body: str = ""
    ) -> Response:
        """Send one request. Raises Unavailable if nobody answers in time, RemoteFault if the answer cannot be read."""
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(
                    method,
                    f"{self.base}/{path}",
                    headers=headers,
                    data=body or None,
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(total=None),
                ) as answer,
            ):
                data = await answer.content.read(BODY_BYTES_MAX + 1)
                while len(data) <= BODY_BYTES_MAX and (more := await answer.content.read(BODY_BYTES_MAX)):
                    data += more
                lower_headers = {key.lower(): value for key, value in answer.headers.items()}
                status = answer.status
        except TimeoutError:
            raise Unavailable(f"{self.base}/{path} did not answer within {timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Unavailable(f"{self.base}/{path}: {cause_of(error)}") from None
        if len(data) > BODY_BYTES_MAX:
            raise RemoteFault(f"{self.base}/{path} sent more than {BODY_BYTES_MAX} bytes")
        try:
            return Response(status, data.decode(), lower_headers)
        except UnicodeDecodeError:
            raise RemoteFault(f"{self.base}/{path} did not send text") from None

    async def close(self) -> None:
        await self._session.close()

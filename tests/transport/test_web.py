"""What a manifest's URL can make a volunteer's machine ask: public addresses over HTTP, no more bytes than wanted."""

import asyncio
import ipaddress
import socket
from http.server import BaseHTTPRequestHandler

import pytest

from swarmnode.base.errors import NotPermitted, Unavailable
from swarmnode.net.transport.address import is_public
from swarmnode.net.transport.throttle import RateThrottle
from swarmnode.net.transport.web import AddressRules, HttpRangeReader, checked
from tests.support.web_folder import WebAnswer, web_server

DATA = bytes(range(256)) * 40

NOT_PUBLIC = """
127.0.0.1 127.8.9.1 0.0.0.0 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 168.63.129.16 ::ffff:168.63.129.16
64:ff9b::a83f:8110 192.0.0.192 100.64.0.1 192.0.0.1 198.18.0.1 224.0.0.1 240.0.0.1 255.255.255.255 ::1 ::
fe80::1 fc00::1 fd00:ec2::254 ff02::1 fec0::1 ::ffff:127.0.0.1 ::ffff:169.254.169.254 64:ff9b::a9fe:a9fe
64:ff9b::7f00:1 2002:7f00:1:: 2001:0:53aa:64c:0:0:80ff:fffe
""".split()


@pytest.mark.parametrize("text", NOT_PUBLIC)
def test_addresses_that_are_not_public(text: str) -> None:
    assert not is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize(
    "text", ["1.1.1.1", "93.184.215.14", "2606:4700:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"]
)
def test_addresses_that_are(text: str) -> None:
    assert is_public(ipaddress.ip_address(text))


def ranged(handler: BaseHTTPRequestHandler) -> None:
    """As servers do that give ranges."""
    first, last = map(int, handler.headers["Range"].removeprefix("bytes=").split("-"))
    part = DATA[first : last + 1]
    handler.send_response(206)
    handler.send_header("Content-Length", str(len(part)))
    handler.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(DATA)}")
    handler.end_headers()
    handler.wfile.write(part)


def reply(status: int, body: bytes = b"", **headers: str) -> WebAnswer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            handler.send_header(key.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


async def read(
    url: str, offset: int, nbytes: int, *, private: bool = True, throttle: RateThrottle | None = None
) -> bytes:
    reader = HttpRangeReader(AddressRules(private=private), throttle)
    try:
        return await reader.read(url, offset, nbytes)
    finally:
        await reader.close()


async def test_ranges_come_and_are_counted() -> None:
    with web_server(ranged) as url:
        throttle = RateThrottle()
        assert await read(f"{url}/x", 100, 1000, throttle=throttle) == DATA[100:1100]
        assert throttle.down.total_nbytes == 1000, "counts for --quota and --max-down"


@pytest.mark.parametrize(
    "url",
    """
http://127.0.0.1:1/x http://localhost:1/x http://2130706433/x http://0x7f000001/x http://0177.0.0.1/x
http://127.1/x http://[::1]/x http://[::ffff:169.254.169.254]/x
http://169.254.169.254/latest/meta-data/iam/security-credentials/ http://[fd00:ec2::254]/latest/meta-data/
http://192.168.1.1/admin http://0.0.0.0:1/x
""".split(),
)
async def test_a_run_cannot_make_a_machine_ask_itself_or_its_network(url: str) -> None:
    with pytest.raises((NotPermitted, Unavailable), match="not a public address|no address|canonical") as found:
        await read(url, 0, 10, private=False)
    assert "status" not in str(found.value)


async def test_nothing_of_a_local_server_is_reached_without_leave() -> None:
    asked: list[str] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        asked.append(handler.path)
        ranged(handler)

    with web_server(answer) as url:
        with pytest.raises(NotPermitted, match="--allow-private-addresses"):
            await read(f"{url}/secret", 0, 10, private=False)
        port = url.rsplit(":", 1)[1]
        for host in ("localhost", "127.1", "2130706433"):
            with pytest.raises((NotPermitted, Unavailable)):
                await read(f"http://{host}:{port}/secret", 0, 10, private=False)
        assert asked == []
        assert (await read(f"{url}/mine", 0, 10)) == DATA[:10] and asked == ["/mine"]


async def test_a_name_that_resolves_to_this_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it resolved to a public address before: what is connected to is what was checked."""
    answers = iter(["93.184.215.14", "127.0.0.1"])

    async def getaddrinfo(self: object, host: str, port: int, **kind: object) -> list[object]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers), port))]

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(type(loop), "getaddrinfo", getaddrinfo)
    rules = AddressRules()
    assert await rules.resolve("data.example", 80) == ["93.184.215.14"]
    with pytest.raises(NotPermitted, match=r"127\.0\.0\.1"):
        await rules.resolve("data.example", 80)
    asked: list[str] = []
    with web_server(lambda handler: asked.append(handler.path)) as url:
        answers = iter(["93.184.215.14", "127.0.0.1"])
        with pytest.raises(Unavailable, match="not a public address"):
            await read(url.replace("127.0.0.1", "data.example") + "/secret", 0, 10, private=False)
    assert asked == []


async def test_redirects_are_checked_like_first_requests() -> None:
    with web_server(ranged) as inner:
        reached = {
            f"{inner}/x": True,
            "file:///etc/passwd": False,
            "http://user@127.0.0.1/x": False,
            "ftp://h/x": False,
        }
        for target, fine in reached.items():
            with web_server(reply(302, Location=target)) as outer:
                if fine:
                    assert (await read(f"{outer}/a", 5, 5)) == DATA[5:10]
                else:
                    with pytest.raises(NotPermitted):
                        await read(f"{outer}/a", 5, 5)
        # The first host is allowed, where it leads is not.
        with web_server(reply(302, Location="http://169.254.169.254/latest/meta-data/")) as outer:

            class First(AddressRules):
                def allows(self, address: object) -> bool:
                    return str(address) == "127.0.0.1"

            reader = HttpRangeReader(First())
            with pytest.raises(NotPermitted, match=r"169\.254\.169\.254"):
                await reader.read(f"{outer}/a", 0, 5)
            await reader.close()

    # What the user named may be private; where it leads is not, unless the user named it, too.
    with web_server(ranged) as inner, web_server(reply(302, Location=f"{inner}/x")) as outer:
        reader = HttpRangeReader(AddressRules(private=True, named=True))
        with pytest.raises(NotPermitted, match="public"):
            await reader.read(f"{outer}/a", 5, 5)
        assert await reader.read(f"{inner}/a", 5, 5) == DATA[5:10]
        await reader.close()

    with web_server(reply(302, Location="/again")) as url, pytest.raises(Unavailable, match="redirects"):
        await read(f"{url}/a", 0, 5)


def test_no_rules_allow_a_metadata_service() -> None:
    assert not AddressRules(private=True).allows(ipaddress.ip_address("169.254.169.254"))
    assert AddressRules(private=True).allows(ipaddress.ip_address("10.0.0.1"))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (reply(404, b"no"), "status 404"),
        (reply(200, DATA), "does not support ranges"),
        (reply(206, DATA[:10], Content_Range="bytes 0-9/10"), "expected bytes 5-14"),
        (reply(206, DATA[5:10], Content_Range="bytes 5-14/99"), "got 5"),
        (reply(206, DATA[5:15], Content_Range="bytes 5-14/99", Content_Encoding="gzip"), "compressed"),
        (reply(500), "status 500"),
    ],
)
async def test_answers_that_are_not_what_was_asked_for(answer: WebAnswer, reason: str) -> None:
    with web_server(answer) as url, pytest.raises(Unavailable, match=reason):
        await read(f"{url}/x", 5, 10)


async def test_a_file_without_end_is_not_read_to_its_end() -> None:
    sent: list[int] = []

    def endless(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            for _ in range(10_000):
                handler.wfile.write(b"x" * 65536)
                sent.append(65536)
        except OSError:
            pass

    reader = HttpRangeReader(AddressRules(private=True))
    with web_server(endless) as url, pytest.raises(Unavailable, match="longer than"):
        await reader.read_whole(f"{url}/index.json", 1 << 20)
    await reader.close()
    assert sum(sent) < 64 << 20


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "gopher://h/x", "http://", "http://u:p@h/x", "http://h:0/x", "//h/x"]
)
def test_other_urls_are_never_asked(url: str) -> None:
    with pytest.raises(NotPermitted):
        checked(url)

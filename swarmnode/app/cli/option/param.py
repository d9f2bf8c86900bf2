"""Parameter types of the command line: each value is checked before anything starts."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click

from swarmnode.app.daemon.options import RUN_ID
from swarmnode.base.errors import RemoteFault, UsageError
from swarmnode.base.user_folders import default_home
from swarmnode.train.node.limits import LIFTED, LIMIT_KINDS, parse_nbytes, parse_rate

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., object])

PORT_MAX = 65535
ARCHIVE_EVERY_S = 3600.0  # guess: an owner can afford to lose an hour of a swarm's work
ARCHIVE_KEEP = 2  # guess: the newest two, besides the best
TRACK = click.option(
    "--track", type=click.Choice(("trackio", "wandb")), help="Log losses, tokens and machines there, too."
)
STAGES_MAX = 512  # as pipeline.stages
UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
DURATION_MAX_S = 366 * 86400.0

_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_PLAIN = re.compile(r"\d+(?:\.\d+)?\Z")


def check_listen(text: str) -> str:
    """`text`, if it is a multiaddr to listen at: /ip4/ADDRESS/tcp/PORT. Raises ValueError with the problem."""
    from swarmnode.net.transport.address import parse_endpoint

    with _as_value_error():
        if parse_endpoint(text).family not in ("ip4", "ip6"):
            raise UsageError("this machine's IP address is needed, as in /ip4/0.0.0.0/tcp/0 (port 0: any free one)")
    return text


def check_bootstrap(text: str) -> str:
    """`text`, if it is a multiaddr of a peer, which ends in /p2p/PEER_ID. Raises ValueError with the problem."""
    from swarmnode.net.transport.address import parse_bootstrap

    with _as_value_error():
        parse_bootstrap(text)
    return text


@contextlib.contextmanager
def _as_value_error() -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise ValueError(str(error)) from None


def check_run(text: str) -> str:
    """`text`, if it is a run id (made lower case) or the path of an existing signed manifest. Raises ValueError."""
    if RUN_ID.match(text.lower()):
        return text.lower()
    path = Path(text)
    if path.is_dir() and (path / "manifest.signed").is_file():
        path = path / "manifest.signed"
    if not path.is_file():
        raise ValueError(
            "neither a run id (64 hex digits) nor a signed manifest: `swarmnode up` and `coordinator` make one"
        )
    return str(path)


def check_ip(text: str) -> str:
    """`text`, if it is an IP address of this machine or 0.0.0.0. Raises ValueError."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise ValueError("not an IP address; 127.0.0.1: only this machine, 0.0.0.0: all") from None


def check_address(text: str) -> str:
    """`text`, HOST:PORT or a port of 127.0.0.1, as HOST:PORT; "" for none. Raises ValueError."""
    if not text:
        return text
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > PORT_MAX:
        raise ValueError("use HOST:PORT, or PORT for this machine alone (0: any free one)")
    ip = ipaddress.ip_address(check_ip(host.strip("[]"))) if host else ipaddress.IPv4Address("127.0.0.1")
    return f"[{ip}]:{int(port)}" if ip.version == 6 else f"{ip}:{int(port)}"


def check_peer(text: str) -> str:
    """`text`, if it is a peer id. Raises click.UsageError."""
    from swarmnode.base.identity import public_key_of
    from swarmnode.base.ids import PeerId

    try:
        public_key_of(PeerId(text))
    except RemoteFault:
        raise click.UsageError(
            f"{text[:60]!r} is not a peer id (12D3KooW..., as `swarmnode identity` prints it)"
        ) from None
    return text


def check_own_run(text: str) -> str:
    """Like `check_run`; also accepts a folder of `swarmnode init`, which is signed when it is used."""
    if (Path(text) / "manifest.toml").is_file():
        return text
    if not Path(text).exists() and not RUN_ID.match(text.lower()):
        raise ValueError(f"no such folder or file; `swarmnode init {text[:60]}` makes a run")
    return check_run(text)


def check_url(text: str) -> str:
    """`text`, if it is the base URL of a metadata service: http://HOST[:PORT]. Raises ValueError."""
    if not re.match(r"https?://[^/\s?#]+/?\Z", text):
        raise ValueError("use http://HOST:PORT")
    return text.rstrip("/")


def check_notify(text: str) -> str:
    """`text`, if a person can be told there: desktop, the URL of a webhook, "" for nowhere. Raises ValueError."""
    if text not in ("", "desktop") and not re.match(r"https?://[^/\s?#]+", text):
        raise ValueError("use desktop, or a webhook's https://...")
    return text


def check_card(text: str) -> float:
    """Gigabytes of `12GB`, `12GiB` or `12`: sellers of cards use the units alike. Raises ValueError."""
    nbytes = parse_nbytes(f"{text}GB" if text.strip().isdecimal() else text)
    return nbytes / (2**30 if "ib" in text.lower() else 1e9)


def check_limit(name: str, text: str) -> str:
    """`text`, if it is or lifts the limit `name`. Raises ValueError."""
    if text.strip().lower() not in LIFTED:
        LIMIT_KINDS[name].parse(text)
    return text


def parse_duration(text: str) -> float:
    """The seconds of `text`. Raises ValueError unless it is a positive number (of seconds) or has units, large to
    small."""
    text = text.strip().lower()
    if _PLAIN.match(text):
        seconds = float(text)
    else:
        parts = _PART.findall(text)
        sizes = [UNITS_S[unit] for _, unit in parts]
        if not parts or "".join(number + unit for number, unit in parts) != text or sizes != sorted(set(sizes))[::-1]:
            raise ValueError("not a duration: use 90s, 1m30s, 2h or 500ms")
        seconds = sum(float(number) * UNITS_S[unit] for number, unit in parts)
    if not 0 < seconds <= DURATION_MAX_S:
        raise ValueError("a duration is more than 0 and at most a year")
    return seconds


_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%\Z")
_LEAVES = re.compile(r"(\d+(?:\.\d+)?)\s*%\s*/\s*h\Z")
LOSS_MAX = 0.2
LEAVES_MAX = 100.0
BENCH_STAGES_MAX = 8  # numbers of stages, each of which takes minutes


def parse_loss(text: str) -> float:
    """The share in `1%`. Raises ValueError."""
    match = _SHARE.match(text.strip())
    share = float(match[1]) / 100.0 if match else 1.0
    if share > LOSS_MAX:
        raise ValueError(f"not a loss: use 0% to {LOSS_MAX:.0%}, such as 1%; no connection lives with more")
    return share


def parse_leaves(text: str) -> float:
    """Nodes of all that leave in an hour, of `16%/h`. Raises ValueError."""
    match = _LEAVES.match(text.strip())
    share = float(match[1]) / 100.0 if match else LEAVES_MAX + 1.0
    if share > LEAVES_MAX:
        raise ValueError(f"not a rate of leaving: use 0%/h to {LEAVES_MAX:.0%}/h, such as 16%/h")
    return share


def parse_stage(text: str) -> int:
    """The stage, from 0, that a person counts from 1. Raises ValueError."""
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text[:9]) <= STAGES_MAX:
        raise ValueError(f"stages count from 1: the first is 1, the last at most {STAGES_MAX}")
    return int(text) - 1


def parse_stages(text: str) -> tuple[int, ...]:
    """The numbers in `1,3`. Raises ValueError."""
    words = [word.strip() for word in text.split(",")]
    if len(words) > BENCH_STAGES_MAX or not all(re.fullmatch(r"[1-9]\d{0,2}", word) for word in words):
        raise ValueError("numbers of stages with commas between, such as 1,3")
    return tuple(dict.fromkeys(map(int, words)))


class Parsed(click.ParamType[T]):
    """A parameter that one of the functions above accepts. `shown` writes a value as a person types it."""

    def __init__(self, name: str, parse: Callable[[str], T], shown: Callable[[T], str] = str) -> None:
        self.name = name
        self.shown = shown
        self._parse = parse

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> T:
        try:
            return self._parse(str(value))
        except ValueError as error:
            self.fail(f"{str(value)[:100]!r}: {error}", param, ctx)


LISTEN = Parsed("multiaddr", check_listen)
BOOTSTRAP = Parsed("multiaddr", check_bootstrap)
RUN = Parsed("run", check_run)
HOST = Parsed("ip", check_ip)
ADDRESS = Parsed("address", check_address)
OWN_RUN = Parsed("run", check_own_run)
URL = Parsed("url", check_url)
FOLDER = click.Path(file_okay=False, path_type=Path)
CACHE = click.option(
    "--cache", type=FOLDER, help="The run's text as tokens, kept for all runs here.  [default: ~/.cache/swarmnode]"
)
home_option = click.option(
    "--home",
    type=FOLDER,
    callback=lambda ctx, param, value: value or default_home("node"),
    help="The node's own folder.  [default: ~/.local/share/swarmnode/node]",
)
PORT = click.IntRange(0, PORT_MAX)


def together(*adds: Callable[[F], F]) -> Callable[[F], F]:
    """A decorator that adds the arguments and options `adds`, in this order."""
    return lambda command: functools.reduce(lambda made, add: add(made), reversed(adds), command)


NETWORK_OPTIONS = together(
    click.option(
        "--listen", type=LISTEN, default="/ip4/0.0.0.0/tcp/0", help="Where others reach this machine; port 0: any."
    ),
    click.option("--announce", type=LISTEN, hidden=True),  # `bench wan` puts a line in front of the node
    click.option("--lan", is_flag=True, help="Connect to any member in this local network."),
    click.option("--metrics-port", type=PORT, default=0, show_default="any", help="Prometheus, /healthz, /readyz."),
    click.option("--metrics-host", type=HOST, default="127.0.0.1", help="Address to serve them on; 0.0.0.0: all."),
    click.option(
        "--control-listen",
        type=ADDRESS,
        default="",
        show_default=False,
        metavar="[HOST:]PORT",
        help="Also serve the control API by gRPC there, to whoever has the token in HOME/control.token.",
    ),
)
DISK = Parsed("size", parse_nbytes)
STAGE = Parsed("stage", parse_stage, lambda stage: str(stage + 1))
WATTS = click.IntRange(0, 10_000)  # as a report's
STAGE_COUNT = click.IntRange(1, STAGES_MAX)
DURATION = Parsed("duration", parse_duration)
CARD = Parsed("GB", check_card)
RATE = Parsed("Mbit", parse_rate)


def notify_option(text: str) -> Callable[[F], F]:
    """The option --notify."""
    return click.option(
        "--notify", type=Parsed("where", check_notify), default="", show_default=False, metavar="desktop|URL", help=text
    )


def limit_options(command: F) -> F:
    """Add an option for each limit; values are passed as keywords, with underscores for dashes."""
    for name, kind in reversed(list(LIMIT_KINDS.items())):
        parsed = Parsed(kind.example, functools.partial(check_limit, name))
        if kind.example:
            command = click.option(f"--{name}", type=parsed, metavar=kind.example, help=kind.help)(command)
        else:
            command = click.option(f"--{name}/--no-{name}", default=None, help=kind.help)(command)
    return command


def taken_limits(values: dict[str, Any]) -> dict[str, str]:
    """Limits by name, taken out of the keywords `values`; those without a value are left out."""
    texts = {name: values.pop(name.replace("-", "_")) for name in LIMIT_KINDS}
    words = {True: "yes", False: "none"}  # of a limit without a value
    return {name: words.get(text, text) for name, text in texts.items() if text is not None}

"""What a node process is told on its command line, checked here before anything is started."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarmnode.errors import RemoteFault
from swarmnode.node.notice import GRACE_S

if TYPE_CHECKING:
    from swarmnode.membership.invite import Invite

PORT_MAX = 65535
DASHBOARD_PORT = 7070  # guess: free on most machines
STAGES_MAX = 512  # as pipeline.stages
RUN_ID = re.compile(r"[0-9a-f]{64}\Z")
PEER_ID = re.compile(r"[1-9A-HJ-NP-Za-km-z]{20,80}\Z")


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """All a node process is told.

    `run` is the path of a signed manifest or a run id of 64 hex digits (then the manifest comes from a bootstrap).
    `checkpoints` is where it saves the run ("": nowhere, or with `use_bucket` the bucket that the manifest names),
    `resume` what it starts from. `data_root` is the folder that the manifest's paths lie below; None: none is opened.
    `home` is the node's own folder: identity key, events.jsonl, control socket, saved state. `stage` None lets it
    choose. `invite` says whose run it is, and may hold leave to take part. `notice` is the cloud whose notices of
    preemption are watched, at `notice_url` instead of the cloud's own address; `grace_s` is the time between SIGTERM
    and SIGKILL.
    """

    run: str
    bootstrap: tuple[str, ...]
    stage: int | None
    listen: str
    home: Path
    metrics_port: int
    cache: Path
    name: str
    bootstrap_only: bool
    out: Path | None
    metrics_host: str = "127.0.0.1"
    reachability: str = "auto"
    lan: bool = False
    invite: Invite | None = None
    device: str = "cpu"
    precision: str = "auto"
    limits: Mapping[str, str] = field(default_factory=dict)
    settings: tuple[tuple[str, str, str], ...] = ()  # name, value, origin
    dashboard: str | None = None  # HOST:PORT of the page a coordinator serves
    public: bool = False  # the page answers other machines, too
    checkpoints: str = ""
    use_bucket: bool = False
    data_root: Path | None = None
    resume: str = ""
    resume_other: bool = False
    notice: str = "none"
    notice_url: str | None = None
    grace_s: float = GRACE_S


def check_listen(text: str) -> str:
    """`text`, a multiaddr to listen at: /ip4/ADDRESS/tcp/PORT. Raises ValueError that says what is wrong."""
    parts = text.split("/")
    if len(parts) != 5 or parts[0] or parts[1] not in ("ip4", "ip6") or parts[3] != "tcp":
        raise ValueError("say /ip4/ADDRESS/tcp/PORT, for example /ip4/0.0.0.0/tcp/0 (port 0: any free one)")
    _check_ip(parts[1], parts[2])
    _check_port(parts[4])
    return text


def check_bootstrap(text: str) -> str:
    """`text`, a multiaddr of a peer: it ends in /p2p/PEER_ID. Raises ValueError that says what is wrong."""
    parts = text.split("/")
    if len(parts) < 7 or (len(parts) % 2 == 0 and "p2p-circuit" not in parts) or parts[0] or parts[-2] != "p2p":
        raise ValueError("say /ip4/ADDRESS/tcp/PORT/p2p/PEER_ID, as `swarmnode bootstrap` prints it")
    if parts[1] in ("ip4", "ip6"):
        _check_ip(parts[1], parts[2])
    elif parts[1] not in ("dns", "dns4", "dns6") or not parts[2]:
        raise ValueError("an address begins with /ip4/, /ip6/, /dns/, /dns4/ or /dns6/")
    if parts[3] != "tcp":
        raise ValueError("only tcp is spoken here")
    _check_port(parts[4])
    if not PEER_ID.match(parts[-1]):
        raise ValueError(f"{parts[-1][:60]!r} is not a peer id")
    return text


def check_run(text: str) -> str:
    """`text`, a run id in lower case or the path of a signed manifest that exists. Raises ValueError."""
    if RUN_ID.match(text.lower()):
        return text.lower()
    path = Path(text)
    if path.is_dir() and (path / "manifest.signed").is_file():
        path = path / "manifest.signed"
    if not path.is_file():
        raise ValueError(
            "neither a run id (64 hex digits) nor a signed manifest: `swarmnode up` and `bootstrap` make one"
        )
    return str(path)


def check_ip(text: str) -> str:
    """`text`, an IP address of this machine or 0.0.0.0. Raises ValueError."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise ValueError("not an IP address; 127.0.0.1 is this machine alone, 0.0.0.0 everybody") from None


def check_peer(text: str) -> str:
    """`text`, a peer id. Raises click.UsageError."""
    from swarmnode.identity import public_key_of
    from swarmnode.ids import PeerId

    try:
        public_key_of(PeerId(text))
    except RemoteFault:
        raise click.UsageError(
            f"{text[:60]!r} is not a peer id (12D3KooW..., as `swarmnode identity` prints it)"
        ) from None
    return text


def check_own_run(text: str) -> str:
    """As `check_run`, and a folder of `swarmnode init`, which is signed when it is used."""
    return text if (Path(text) / "manifest.toml").is_file() else check_run(text)


def _check_ip(family: str, text: str) -> None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise ValueError(f"{text[:60]!r} is not an {family} address") from None
    if address.version != int(family[-1]):
        raise ValueError(f"{text} is not an {family} address")


def _check_port(text: str) -> None:
    if not text.isdecimal() or int(text) > PORT_MAX:
        raise ValueError(f"port {text[:20]!r} is not between 0 and {PORT_MAX}")


def check_url(text: str) -> str:
    """`text`, the base URL of a metadata service: http://HOST[:PORT]. Raises ValueError."""
    if not re.match(r"https?://[^/\s?#]+/?\Z", text):
        raise ValueError("say http://HOST:PORT, as `swarmnode fake-metadata` prints it")
    return text.rstrip("/")


class Checked(click.ParamType[str]):
    """A parameter that one of the checks above accepts."""

    def __init__(self, name: str, check: object) -> None:
        assert callable(check)
        self.name = name
        self._check = check

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return str(self._check(str(value)))
        except ValueError as error:
            self.fail(f"{str(value)[:100]!r}: {error}", param, ctx)


LISTEN = Checked("multiaddr", check_listen)
BOOTSTRAP = Checked("multiaddr", check_bootstrap)
RUN = Checked("run", check_run)
HOST = Checked("ip", check_ip)
OWN_RUN = Checked("run", check_own_run)
URL = Checked("url", check_url)
FOLDER = click.Path(file_okay=False, path_type=Path)
PORT = click.IntRange(0, PORT_MAX)
STAGE = click.IntRange(0, STAGES_MAX - 1)

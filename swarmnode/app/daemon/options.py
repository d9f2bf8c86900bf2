"""Options of a node process, checked before anything is started."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.base.user_folders import CACHE_NBYTES
from swarmnode.train.node.limits import NodeRole
from swarmnode.train.node.notice import GRACE_S

if TYPE_CHECKING:
    from swarmnode.run.admission.invite import Invite

DASHBOARD_PORT = 7070  # as no well-known program (IANA: ARCP, obsolete)
HOME_ADVICE = "free space there, or choose another --home"
# Derived: events.jsonl twice, 16 MiB each (base/metrics/events.py), and as much for what the process says and keeps.
LOGS_NBYTES = 64 << 20
RUN_ID = re.compile(r"[0-9a-f]{64}\Z")


def host_port(address: str) -> tuple[str, int]:
    """The host, without brackets, and the port of HOST:PORT."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


@dataclass(frozen=True, slots=True)
class ArchiveOptions:
    """Place and schedule of the owner's archive of the run. `warrant`: file with the owner's permission; None: the
    owner's key is beside the manifest. `data`: folder of the run's data set or tokenizer. `once`: make one copy, then
    leave. `asked`: requested explicitly; otherwise a missing key is no error."""

    folder: Path
    every_s: float
    keep: int
    push: str = ""
    hub: str = ""  # a repository of the Hugging Face Hub that gets the newest checkpoint
    warrant: Path | None = None
    data: Path | None = None
    once: bool = False
    asked: bool = True
    tells: bool = True  # with `once`: print the checkpoint's folder
    publish: bool = False  # the page offers the model to strangers although the run is restricted


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """All options of a node process.

    `run` is the path of a signed manifest or a run id of 64 hex digits (then the manifest comes from a bootstrap).
    `checkpoints`: where it saves the run ("": nowhere, or with `use_bucket` the manifest's bucket); `resume`: what it
    starts from. `data_root`: folder of the run's data set or tokenizer; None: no file is opened. `data_cache_nbytes`
    bounds the kept chunks; `allow_private_addresses` permits `data.locations` and `base.locations` to name machines of
    this network. `base`: folder of the base model's files; None: those in the run's folder, if it has any. `home`: the
    node's own folder, with identity key, events.jsonl, control socket and saved state. `stage` None lets it choose;
    `role` says whether it may feed. `invite` names the run's owner, and may hold permission to take part.
    `notice`: cloud whose preemption notices are watched, at `notice_url` instead of the cloud's own address; `grace_s`:
    time between SIGTERM and SIGKILL.
    """

    run: str
    bootstrap: tuple[str, ...]
    stage: int | None
    listen: str
    home: Path
    metrics_port: int
    cache: Path
    name: str
    credited: bool = False  # published models may give this name
    watts: int = 0  # what this machine takes at work, as its owner says; 0: not told
    bootstrap_only: bool = False
    out: Path | None = None
    metrics_host: str = "127.0.0.1"
    control_listen: str = ""  # HOST:PORT of the control API by gRPC, with a token; empty: on the unix sockets alone
    reachability: str = "auto"
    lan: bool = False
    invite: Invite | None = None
    device: str = "cpu"
    precision: str = "auto"
    priority: str = "normal"  # "lowest": behind this machine's other programs
    optimizer_state: str = "auto"
    limits: Mapping[str, str] = field(default_factory=dict)
    announce: str | None = None  # a multiaddr told to others in place of `listen`
    device_flops: float = 0.0  # microbatches take as long as on a device of so many FLOP/s; 0: as long as here
    pace: float = 1.0  # of local time, by which hours and the day's quota go; tests let a day pass sooner
    settings: tuple[tuple[str, str, str], ...] = ()  # name, value, origin
    dashboard: str | None = None  # HOST:PORT of a coordinator's page
    public: bool = False  # the page answers other machines, too
    track: str = ""  # the library that the page's numbers are logged by: trackio, wandb
    notify: str = ""  # where a person is told of alarms, pauses and the end: "desktop", or a webhook's URL
    archive: ArchiveOptions | None = None
    checkpoints: str = ""
    use_bucket: bool = False
    data_root: Path | None = None
    data_cache_nbytes: int = CACHE_NBYTES
    max_give_nbytes: int | None = None  # of chunks in a day, by a meeting point
    base: Path | None = None
    allow_private_addresses: bool = False
    role: NodeRole = NodeRole.ANY
    stages_max: int | None = None  # served at once; None: as the run's pipeline.span_max has it
    resume: str = ""
    resume_other: bool = False
    notice: str = "none"
    notice_url: str | None = None
    grace_s: float = GRACE_S

    @property
    def base_folder(self) -> Path | None:
        """The folder where this machine's user keeps the run's base model."""
        from swarmnode.data.base_index import FOLDER  # NumPy with it: no --help pays for that

        return self.base or (None if self.run_folder is None else self.run_folder / FOLDER)

    @property
    def run_folder(self) -> Path | None:
        """The organiser's folder, where `run` is a signed manifest in one."""
        return None if RUN_ID.match(self.run) else Path(self.run).resolve().parent

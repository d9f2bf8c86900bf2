"""One checkpoint of a running swarm, copied by a machine that takes no part in the run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.daemon.launch import launch
from swarmnode.daemon.options import ArchiveOptions, NodeOptions
from swarmnode.errors import NotPermitted, Unavailable
from swarmnode.transport import key_file

if TYPE_CHECKING:
    from swarmnode.daemon.ready_file import Ready
    from swarmnode.membership.invite import Invite

KEY_FILE = "node.key"


def pull_checkpoint(invite: Invite, home: Path, warrant: Path | None, folder: Path, cache: Path) -> Path:
    """The folder, below `folder`, of a checkpoint that is copied now from the swarm of `invite`. `home` holds this
    machine's key, and `warrant` is the owner's permission for it.

    Raises NotPermitted without a permission that holds, Unavailable if the swarm gives no checkpoint.
    """
    me = key_file.load_or_create(home / KEY_FILE).peer_id
    if warrant is None:
        raise NotPermitted(
            "an invite lets this machine train, and not copy the model: the run's owner decides who may. Ask the owner"
            f" for the output of `swarmnode archive RUN --allow {me}`, save it as FILE, and give --warrant FILE"
        )
    options = NodeOptions(
        run=invite.run_id,
        bootstrap=invite.bootstraps,
        invite=invite,
        stage=None,
        listen="/ip4/0.0.0.0/tcp/0",
        home=home,
        metrics_port=0,
        cache=cache,
        name="export",
        bootstrap_only=True,
        out=None,
        archive=ArchiveOptions(folder=folder, every_s=0.0, keep=1, warrant=warrant, once=True, tells=False),
    )
    code = launch(options, _quiet)
    folders = sorted(path.parent for path in folder.rglob("checkpoint.json"))
    if code or not folders:
        raise Unavailable(f"the swarm gave no checkpoint (exit code {code})")
    return folders[-1]


async def _quiet(ready: Ready) -> None:
    pass

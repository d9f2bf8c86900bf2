"""`swarmnode join INVITE`: this machine takes part."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarmnode.cli.duration import Duration
from swarmnode.cli.limiting import given_limits, limit_options
from swarmnode.cli.options import BOOTSTRAP, FOLDER, HOST, LISTEN, PORT, RUN, STAGE, URL, NodeOptions
from swarmnode.cli.origin import origins
from swarmnode.node.notice import GRACE_S
from swarmnode.place import default_cache, default_home

if TYPE_CHECKING:
    from swarmnode.local.ready import Ready
    from swarmnode.membership.invite import Invite


@click.command(short_help="join a run with this machine")
@click.argument("words", metavar="INVITE | - | BOOTSTRAP...", nargs=-1)
@click.option("--run", "run", type=RUN, help="With BOOTSTRAP: run id (64 hex digits), or the path of manifest.signed.")
@click.option("--invite-file", type=click.Path(dir_okay=False, path_type=Path), help="Read the invite from this file.")
@click.option("--stage", type=STAGE, help="Stage to serve.  [default: the neediest]")
@click.option("--listen", type=LISTEN, default="/ip4/0.0.0.0/tcp/0", show_default=True, help="Where peers reach us.")
@click.option("--home", type=FOLDER, help="The node's own folder.  [default: ~/.local/share/swarmnode/node]")
@click.option("--metrics-port", type=PORT, default=0, show_default="any", help="Prometheus, /healthz, /readyz.")
@click.option(
    "--reachability",
    type=click.Choice(["auto", "public", "private"]),
    default="auto",
    show_default=True,
    help="auto: others try, and relays are used if they cannot; public: they can; private: by relays.",
)
@click.option("--lan", is_flag=True, help="Find members in this network by multicast, and be found.")
@click.option("--metrics-host", type=HOST, default="127.0.0.1", show_default=True, help="Who may ask: 0.0.0.0 all.")
@click.option("--name", default=socket.gethostname, show_default="host name", help="What people call this node.")
@click.option("--checkpoints", default="", metavar="URL", help="Save the run there.  [default: nowhere]")
@click.option(
    "--use-bucket", is_flag=True, help="Save it in the bucket that the manifest names, with this user's keys."
)
@click.option("--data-root", type=FOLDER, help="Let the run read its data files, below this folder.  [default: none]")
@click.option("--resume", default="", metavar="URL", help="Start from the newest checkpoint there.")
@click.option("--resume-other", is_flag=True, help="Also from one of another run with the same model.")
@click.option("--cache", type=FOLDER, help="Folder of tokens.  [default: ~/.cache/swarmnode]")
@click.option(
    "--notice",
    type=click.Choice(["auto", "aws", "gcp", "azure", "none"]),
    default="auto",
    show_default=True,
    envvar="SWARMNODE_NOTICE",
    help="Cloud that says when it takes this machine away; auto: the one this machine is of.",
)
@click.option(
    "--notice-url",
    type=URL,
    envvar="SWARMNODE_NOTICE_URL",
    help="Where its metadata service is; `swarmnode fake-metadata` is one to rehearse with.",
)
@click.option(
    "--grace",
    type=Duration(),
    default=GRACE_S,
    show_default="30s",
    envvar="SWARMNODE_GRACE",
    help="Time between SIGTERM and SIGKILL on this machine.",
)
@click.option("--device", default="cpu", show_default=True, metavar="cpu|cuda|cuda:1|mps", help="Where it works.")
@click.option(
    "--precision",
    type=click.Choice(["auto", "fp32", "bf16"]),
    default="auto",
    show_default=True,
    help="Of matrix products; weights stay float32. auto: bf16 where that is faster, as measured here.",
)
@limit_options
def command(
    words: tuple[str, ...],
    run: str | None,
    invite_file: Path | None,
    stage: int | None,
    listen: str,
    home: Path | None,
    metrics_port: int,
    reachability: str,
    lan: bool,
    metrics_host: str,
    name: str,
    checkpoints: str,
    use_bucket: bool,
    data_root: Path | None,
    resume: str,
    resume_other: bool,
    cache: Path | None,
    notice: str,
    notice_url: str | None,
    grace: float,
    device: str,
    precision: str,
    **limits: str | None,
) -> int:
    """Join the run that INVITE (a line of `swarmnode invite`) is for, train until told to leave.

    A secret on a command line can be seen by others: `join -` reads the invite from stdin, --invite-file from a file,
    and without arguments it is taken from SWARMNODE_INVITE. Without an invite: give --run and a BOOTSTRAP, a multiaddr
    that ends in /p2p/PEER_ID.

    SIGTERM and Ctrl-C leave cleanly: what is held is finished, what was learnt is passed on, the stage is saved in the
    home. The second one exits at once. A cloud's notice that the machine will be taken away does the same within the
    time it gives; exit code 30 then says that nothing was lost, 31 that something was. Says on stderr where its metrics
    and its control socket are.

    URL is a folder (one that nodes share, for a run on several machines) or s3://BUCKET/PREFIX, with keys and endpoint
    from the environment. A stage that nobody serves is read from the checkpoint; everything else comes from peers.

    Nothing that the manifest says opens a file or a bucket here by itself. A run on files is fed (stage 0) by machines
    that were given --data-root; without it this one serves the other stages.
    """
    from swarmnode.cli.joining import find_invite
    from swarmnode.cli.launch import launch

    invite = find_invite(words, invite_file)
    bootstraps = invite.bootstraps if invite is not None else _bootstraps(words)

    options = NodeOptions(
        run=_run_of(run, invite),
        bootstrap=bootstraps,
        invite=invite,
        stage=stage,
        listen=listen,
        home=home or default_home("node"),
        metrics_port=metrics_port,
        cache=cache or default_cache(),
        name=name,
        bootstrap_only=False,
        out=None,
        metrics_host=metrics_host,
        lan=lan,
        checkpoints=checkpoints,
        use_bucket=use_bucket,
        data_root=data_root,
        resume=resume,
        resume_other=resume_other,
        notice=notice,
        notice_url=notice_url,
        grace_s=grace,
        reachability=reachability,
        device=device,
        precision=precision,
        limits=given_limits(limits),
        settings=origins(click.get_current_context()),
    )
    return launch(options, _tell)


def _run_of(run: str | None, invite: Invite | None) -> str:
    """The run asked for by id, by file or by invite. Raises click.UsageError for none, and for two."""
    if run is None and invite is None:
        raise click.UsageError("which run? give an INVITE, or --run with a BOOTSTRAP")
    if run is not None and invite is not None and run != invite.run_id:
        raise click.UsageError(f"--run {run[:80]}: the invite is for run {invite.run_id[:16]}; leave --run out")
    return run or (invite.run_id if invite is not None else "")


def _tell(ready: Ready) -> None:
    click.echo(f"peer {ready.peer_id}", err=True)
    click.echo(f"metrics http://{ready.metrics_address}/metrics", err=True)
    click.echo(f"control {ready.control}", err=True)


def _bootstraps(words: tuple[str, ...]) -> tuple[str, ...]:
    """`words` as addresses of bootstraps. Raises click.UsageError for none, and for one that is no address."""
    if not words:
        raise click.UsageError(
            "Missing argument: an INVITE (one line, as `swarmnode invite` prints it) or BOOTSTRAP..."
        )
    return tuple(BOOTSTRAP.convert(word, None, None) for word in words)

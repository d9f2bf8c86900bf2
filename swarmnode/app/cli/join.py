"""`swarmnode join INVITE`: join a run with this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click

from swarmnode.app.cli.option.config_file import origins
from swarmnode.app.cli.option.param import (
    BOOTSTRAP,
    CACHE,
    DISK,
    DURATION,
    FOLDER,
    NETWORK_OPTIONS,
    RUN,
    STAGE,
    STAGE_COUNT,
    URL,
    WATTS,
    limit_options,
    notify_option,
    taken_limits,
)
from swarmnode.app.cli.output.sectioned import SectionedCommand
from swarmnode.app.control.socket_path import TOKEN_FILE
from swarmnode.app.daemon.options import NodeOptions
from swarmnode.base.errors import SwarmnodeError, cause_of
from swarmnode.base.user_folders import default_cache, default_home
from swarmnode.train.node.limits import LIMIT_KINDS, NodeRole
from swarmnode.train.node.notice import GRACE_S

if TYPE_CHECKING:
    from swarmnode.app.daemon.ready_file import Ready
    from swarmnode.base.wire.report_pb2 import StatusReply
    from swarmnode.run.admission.invite import Invite


PERIOD_S = 1.0
LINE_PERIOD_S = 600.0  # without a change; a log of a week then has a thousand lines
HINT = "Ctrl-C is fine: this machine then finishes what it holds"


class JoinScreen:
    """Shows the node of `home`, which pushes its status. For one use."""

    def __init__(self, home: Path, notify: str = "") -> None:
        self._home = home
        self._notify = notify
        self._notified = ""
        self._last: StatusReply | None = None

    async def run(self, ready: Ready) -> None:
        """Show the node until cancelled."""
        if sys.stderr.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb":
            await self._live()
        else:
            click.echo(f"peer {ready.peer_id}", err=True)
            click.echo(f"metrics http://{ready.metrics_address}/metrics", err=True)
            click.echo(f"control {ready.control}", err=True)
            if ready.grpc:
                click.echo(f"control by gRPC {ready.grpc}, token in {self._home / TOKEN_FILE}", err=True)
            await self._lines()

    def thank(self) -> None:
        """Thank whoever started the node for what it gave, by the receipts that it has now that it left."""
        if self._last is not None:
            from swarmnode.app.local.swarm_view import thanks
            from swarmnode.app.machine.receipt_store import given

            with contextlib.suppress(SwarmnodeError):
                self._last.tokens_given = given(self._home, self._last.run_id).tokens
            click.echo(thanks(self._last), err=True)
            self._tell_person(thanks(self._last))

    def _tell_person(self, text: str) -> None:
        """Notify of `text` if whoever joined asked for it, and it is new."""
        if not self._notify or text in ("", self._notified) or self._last is None:
            return
        from swarmnode.app.dashboard.start import notify

        self._notified = text
        try:
            notify(self._notify, self._last.run_name, text)
        except (OSError, subprocess.SubprocessError) as error:
            click.echo(f"swarmnode: --notify {self._notify[:60]}: {cause_of(error)}", err=True)
            self._notify = ""

    async def _statuses(self) -> AsyncGenerator[StatusReply, None]:
        """The statuses that the node pushes, until cancelled."""
        from swarmnode.app.control.watch import watch

        while True:
            with contextlib.suppress(SwarmnodeError):  # it ends, is busy, or starts again in another cut
                async for status in watch(self._home, PERIOD_S):
                    self._last = status
                    if self._notify:
                        await asyncio.to_thread(self._tell_person, _news(status))
                    yield status
            await asyncio.sleep(PERIOD_S)

    async def _live(self) -> None:
        from rich.console import Console, Group
        from rich.file_proxy import FileProxy
        from rich.live import Live
        from rich.text import Text

        from swarmnode.app.local.swarm_view import NodeWatch, panel

        class Above(FileProxy):
            encoding = "utf-8"  # without one click.echo takes the file behind it, and tears the panel

        console = Console(stderr=True)
        watch = NodeWatch()
        loop = asyncio.get_running_loop()
        hint = Text(HINT, style="dim")  # a line with room for the ^C that a terminal writes after it
        live = Live(console=console, auto_refresh=False, redirect_stderr=False)
        with live, contextlib.redirect_stderr(Above(console, sys.stderr)):
            async for status in self._statuses():
                watch.add(loop.time(), status)
                live.update(Group(panel(watch), hint), refresh=True)

    async def _lines(self) -> None:
        from swarmnode.app.local.swarm_view import headline, paused_text, thanks, wait_text

        last = ""
        said_s = dict[str, float]()  # by the headline, and by the cause of a wait
        loop = asyncio.get_running_loop()
        async for status in self._statuses():
            paused = status.limits.reason and not status.limits.running
            text = f"paused: {paused_text(status)}" if paused else headline(status)
            now_s = loop.time()
            said_s = {one: when for one, when in said_s.items() if now_s <= when + LINE_PERIOD_S}
            if text not in said_s:  # what comes and goes is said once
                click.echo(f"{text}; {thanks(status)}" if text == last else text, err=True)
                said_s[text] = now_s
            for wait in status.waits:
                if wait.cause not in said_s:
                    click.echo(f"waits: {wait_text(wait)}", err=True)
                    said_s[wait.cause] = now_s
            last = text


def _news(status: StatusReply) -> str:
    """The text of a notification: that the machine trains, or why and until when it pauses; "" in between."""
    from swarmnode.app.local.swarm_view import of_stages, paused_text, trains

    if not status.limits.running and status.limits.reason:
        return f"paused: {paused_text(status)}"
    return f"trains {of_stages(status)}" if trains(status) else ""


def device_arguments(arguments: Sequence[str], words: Sequence[str], device: str, home: Path, name: str) -> list[str]:
    """`arguments` of `join` for the node on `device`, without `words`: of options given twice the last one counts."""
    mark = device.replace(":", "-")
    kept = [one for one in arguments if one not in words]
    named = ["--name", f"{name} {mark}"] if name else []
    own = ["--device", device, "--home", str(home / mark), *named, "--metrics-port", "0"]
    return [*kept, *own, "-"] if words else [*kept, *own]


def join_each(commands: Sequence[Sequence[str]], invite: str) -> int:
    """Run `commands` until all have ended, each with `invite` on stdin; SIGTERM and SIGINT are passed on. Returns the
    first exit code that is not 0. A node that fails does not end the others."""
    nodes: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: object) -> None:
        for node in nodes:
            if node.poll() is None:
                node.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for command in commands:
            node = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
            nodes.append(node)
            assert node.stdin is not None
            try:
                node.stdin.write(invite.encode() + b"\n")
                node.stdin.close()
            except BrokenPipeError:  # it has ended already; its exit code says why
                pass
        return next((code for code in map(_wait, nodes) if code), 0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(node: subprocess.Popen[bytes]) -> int:
    code = node.wait()
    return 128 - code if code < 0 else code


def join_all(arguments: Sequence[str], words: Sequence[str], home: Path, name: str, invite: str) -> int:
    """Join with each accelerator, or with the CPU if there is none. Returns an exit code as `join_each`."""
    from swarmnode.model.device import devices

    names = devices()
    click.echo(f"one node each on {', '.join(names)}", err=True)
    node = [sys.executable, "-m", "swarmnode.app.cli.main", "join"]
    commands = [[*node, *device_arguments(arguments, words, device, home, name)] for device in names]
    return join_each(commands, invite)


class JoinCommand(SectionedCommand):
    """Everyday options first."""

    sections: ClassVar[Mapping[str, Sequence[str]]] = {
        "Your invite": ("invite_file", "run"),
        "What it may take": (*(name.replace("-", "_") for name in LIMIT_KINDS), "priority", "data_cache_nbytes"),
        "You": ("name", "credited", "watts", "notify"),
        "Its part": ("stage", "stages_max", "role"),
        "Its device": ("device", "precision", "optimizer_state"),
        "Its network": ("listen", "reachability", "lan", "metrics_port", "metrics_host", "control_listen"),
        "Its folders": ("home", "cache", "data_root", "base", "allow_private_addresses"),
        "Checkpoints": ("checkpoints", "use_bucket", "resume", "resume_other"),
        "In a cloud": ("notice", "notice_url", "grace_s"),
    }


@click.command(cls=JoinCommand, short_help="join a run with this machine")
@click.argument("words", metavar="INVITE | -", nargs=-1)
@click.option("--run", "run", type=RUN, help="Without an invite: run id (64 hex digits), or path of manifest.signed.")
@click.option("--invite-file", type=click.Path(dir_okay=False, path_type=Path), help="Read the invite from this file.")
@click.option("--stage", type=STAGE, help="Stage to serve, counted from 1.  [default: the one that needs it most]")
@click.option(
    "--stages-max",
    type=STAGE_COUNT,
    help="Most stages to serve at once.  [default: as many as memory holds and the run lets one machine serve]",
)
@click.option(
    "--role",
    type=click.Choice([role.value for role in NodeRole]),
    default=NodeRole.ANY.value,
    help="replica: only later stages, which read no text; any: also the first, which reads the text for all.",
)
@NETWORK_OPTIONS
@click.option("--home", type=FOLDER, help="The node's own folder.  [default: ~/.local/share/swarmnode/node]")
@click.option(
    "--reachability",
    type=click.Choice(["auto", "public", "private"]),
    default="auto",
    help="auto: peers test it, with relays as fallback; public: direct; private: through relays.",
)
@click.option("--name", help="Display name of this node.  [default: two words made of its key]")
@click.option(
    "--watts",
    type=WATTS,
    default=0,
    show_default="not told",
    help="What this machine takes at work; the run's page and report add it up.",
)
@click.option("--credit", "credited", is_flag=True, help="Let published models name this node by --name.")
@notify_option("Tell you that it trains, pauses or ends: on this desktop, or by a POST to a webhook.")
@click.option(
    "--checkpoints", default="", show_default=False, metavar="URL", help="Save the run there.  [default: nowhere]"
)
@click.option("--use-bucket", is_flag=True, help="Save it in the manifest's bucket, with this user's keys.")
@click.option("--data-root", type=FOLDER, help="Folder of the run's data set, or of its tokenizer.  [default: none]")
@click.option(
    "--base",
    type=FOLDER,
    help="Folder of the pretrained model that the run starts from.  [default: fetched, only the stage's part]",
)
@click.option(
    "--data-cache",
    "data_cache_nbytes",
    type=DISK,
    default="8GB",
    help="Keep at most so much of the run's data set and base model on disk.",
)
@click.option(
    "--allow-private-addresses",
    is_flag=True,
    help="Let the manifest name machines of this network as places of its data.",
)
@click.option("--resume", default="", show_default=False, metavar="URL", help="Start from the newest checkpoint there.")
@click.option("--resume-other", is_flag=True, help="Also one of another run with the same model.")
@CACHE
@click.option(
    "--notice",
    type=click.Choice(["auto", "aws", "gcp", "azure", "none"]),
    default="auto",
    envvar="SWARMNODE_NOTICE",
    help="Cloud whose preemption notices to watch; auto: the cloud of this machine.",
)
@click.option("--notice-url", type=URL, envvar="SWARMNODE_NOTICE_URL", help="URL of its metadata service.")
@click.option(
    "--grace",
    "grace_s",
    type=DURATION,
    default=GRACE_S,
    show_default="30s",
    envvar="SWARMNODE_GRACE",
    help="Time between SIGTERM and SIGKILL on this machine.",
)
@click.option(
    "--device",
    default="auto",
    metavar="auto|all|cpu|cuda|cuda:1|mps|xpu",
    help="Device to use. auto: the GPU with the most free memory, else the CPU; all: one node for each GPU."
    " mps, xpu and ROCm were never run.",
)
@click.option(
    "--precision",
    type=click.Choice(["auto", "fp32", "bf16"]),
    default="auto",
    help="Precision of matrix products. auto: bf16 on GPUs (fp16 before Ampere), the faster on CPUs.",
)
@click.option(
    "--optimizer-state",
    type=click.Choice(["auto", "device", "8bit", "host"]),
    default="auto",
    help="Where optimizer moments are kept: on the device, there in 8 bits, or in main memory. auto: the first of them"
    " with which the stage fits.",
)
@click.option(
    "--priority",
    type=click.Choice(["lowest", "normal"]),
    default="lowest",
    show_default=True,
    help="lowest: whatever else runs on this machine comes first, for processor and disk.",
)
@click.option("--device-flops", type=click.FloatRange(0.0, 1e18), default=0.0, hidden=True)  # `bench wan` paces with it
@click.option("--pace", type=click.FloatRange(1.0, 1e4), default=1.0, hidden=True)  # of --hours: tests use it
@limit_options
def command(
    words: tuple[str, ...],
    run: str | None,
    invite_file: Path | None,
    stage: int | None,
    role: str,
    home: Path | None,
    cache: Path | None,
    name: str | None,
    device: str,
    **given: Any,
) -> int:
    """Join the run of INVITE (a line printed by `swarmnode invite`) and train until told to leave.

    A secret on a command line can be seen by others: `join -` reads the invite from stdin, --invite-file from a file,
    and without arguments it is taken from SWARMNODE_INVITE. Without an invite give --run, and addresses of meeting
    points in its place: /ip4/203.0.113.7/tcp/4001/p2p/PEER_ID.

    SIGTERM and Ctrl-C leave in order: the node finishes what it holds, passes on its progress, and saves its stage in
    the home. A second signal exits at once. A cloud's preemption notice has the same effect, within its time; exit code
    30 then means that nothing was lost, 31 that something was. A terminal shows this machine at work; without one, or
    with NO_COLOR, stderr gets a line where something changes.

    The URL of --checkpoints and --resume is a folder (a shared one, for a run on several machines) or
    s3://BUCKET/PREFIX, with keys and endpoint from the environment. --resume reads a stage there only if no machine
    serves it; any other comes from the machines that do. A run opens none of your files or buckets without these
    options.
    """
    from swarmnode.app.cli.option.invite import find_invite

    invite = find_invite(words, invite_file)
    options = NodeOptions(
        run=_run_of(run, invite),
        bootstrap=invite.bootstraps if invite is not None else _bootstraps(words),
        invite=invite,
        stage=stage,
        role=NodeRole(role),
        home=home or default_home("node"),
        cache=cache or default_cache(),
        name=name or "",
        device=device,
        limits=taken_limits(given),
        settings=origins(click.get_current_context()),
        **given,  # the other options, by the names of NodeOptions
    )
    return _join_all(() if invite_file else words, options, invite) if device == "all" else _join(options)


def _join(options: NodeOptions) -> int:
    """Join with one device, and thank for what it gave."""
    from swarmnode.app.daemon.launch import launch

    screen = JoinScreen(options.home, options.notify)
    code = launch(options, screen.run)
    screen.thank()
    return code


def _join_all(words: tuple[str, ...], options: NodeOptions, invite: Invite | None) -> int:
    """Join with each accelerator. The invite in `words` reaches the nodes by their stdin."""
    from swarmnode.run.admission.invite import encode

    by_words, text = ((), "") if invite is None else (words or ("-",), encode(invite))
    given = sys.argv[2:]
    if options.control_listen:  # a port each
        given += ["--control-listen", f"{options.control_listen.rpartition(':')[0]}:0"]
    return join_all(given, by_words, options.home, options.name, text)


def _run_of(run: str | None, invite: Invite | None) -> str:
    """The requested run, by id, file or invite. Raises click.UsageError for none, and for two."""
    if run is None and invite is None:
        raise click.UsageError(
            "no run given: paste the line that the organiser sent, which begins with swarm1., or name its file with"
            " --invite-file; a meeting point's address needs --run beside it"
        )
    if run is not None and invite is not None and run != invite.run_id:
        raise click.UsageError(f"--run {run[:80]}: the invite is for run {invite.run_id[:16]}; omit --run")
    return run or (invite.run_id if invite is not None else "")


def _bootstraps(words: tuple[str, ...]) -> tuple[str, ...]:
    """`words` as addresses of bootstraps. Raises click.UsageError for none, and for one that is no address."""
    if not words:
        raise click.UsageError("with --run give a meeting point's address, as /ip4/203.0.113.7/tcp/4001/p2p/PEER_ID")
    return tuple(BOOTSTRAP.convert(word, None, None) for word in words)

"""Run a node in this process: what can be checked at once, event loop, start messages, exit code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarmnode.app.control.socket_path import take_home
from swarmnode.app.daemon import ready_file
from swarmnode.app.daemon.options import HOME_ADVICE, LOGS_NBYTES, ArchiveOptions, NodeOptions, host_port
from swarmnode.app.daemon.ready_file import Ready
from swarmnode.app.daemon.service_manager import doing
from swarmnode.base import landlock
from swarmnode.base.atomic_file import check_free, check_writable
from swarmnode.base.errors import NotPermitted, Unavailable, cause_of, os_errors
from swarmnode.base.limited_child import deny_calls
from swarmnode.base.user_folders import default_cache
from swarmnode.net.transport import key_file
from swarmnode.net.transport.address import Endpoint, check_listenable, parse_endpoint

if TYPE_CHECKING:
    from swarmnode.app.daemon.ready_file import Ready
    from swarmnode.run.admission.invite import Invite


def launch(options: NodeOptions, tell: Callable[[Ready], Awaitable[None]]) -> int:
    """Run the node until it leaves; `tell` runs beside it once it is reachable. Returns its exit code.

    Home, disk and ports are checked before torch is imported, which takes seconds. Raises NotPermitted if the home
    cannot be made, UsageError if another daemon or program has home or port, and the node's own errors.
    """
    with os_errors(NotPermitted, f"--home {options.home}"):
        options.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = take_home(options.home)
    check_writable(options.home, HOME_ADVICE)
    check_free(options.home, LOGS_NBYTES, "what this node keeps", HOME_ADVICE)
    _check_ports(options)
    if lacks := _confine(options):
        click.echo(f"this machine holds the node less tightly than others do: {lacks.removeprefix('; ')}", err=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; more threads per node run slower
    with doing("loading PyTorch"), _nothing_to_end():
        import uvloop

        from swarmnode.app.daemon.process import run_node

    async def run() -> int:
        async with asyncio.TaskGroup() as group:
            telling = group.create_task(_tell(options, tell))
            try:
                ended = await run_node(options, lock)
                while not isinstance(ended, int):
                    ended = await run_node(options, None, ended)
                return ended
            finally:
                telling.cancel()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


LIBRARIES = "libraries"  # a folder of our cache: what libraries compile and keep
LIBRARY_CACHES = ("CUDA_CACHE_PATH", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def _confine(options: NodeOptions) -> str:
    """Keep this process and its p2pd out of its user's other files, and from calls of the kernel that no node makes.
    Files of the system can be read as before; of all homes only Python's own folders and what `options` name. An
    owner's archive, which keeps keys, is free to open files. Returns what this kernel lacks for it, "" if nothing."""
    numbers = landlock.DENIED.get(os.uname().machine)
    filtered = sys.platform == "linux" and numbers is not None and deny_calls(numbers)
    lacks = "" if filtered else "; calls of the kernel that no node makes are open: seccomp of Linux would refuse them"
    if options.archive is not None or not landlock.available():
        return ("" if options.archive is not None else landlock.missing()) + lacks
    kept = default_cache() / LIBRARIES
    os.environ.update((name, str(kept / name.lower())) for name in LIBRARY_CACHES if name not in os.environ)
    home, *places = (Path(os.environ.get(name, "/tmp")) for name in ("HOME", "TMPDIR", "XDG_RUNTIME_DIR"))
    texts = (text.removeprefix("file://") for text in (options.checkpoints, options.resume))
    saved, resumed = (Path(text).expanduser() if text and "://" not in text else None for text in texts)
    own = (Path(os.environ[name]) for name in LIBRARY_CACHES)
    ours = [options.home, options.cache, default_cache(), *own, *filter(None, (options.out, saved))]
    if options.track == "trackio":
        ours.append(home / ".cache" / "huggingface")
    for folder in ours:
        folder.mkdir(parents=True, exist_ok=True)  # a folder that is absent could not be made later
    write = [*ours, *places, *map(Path, ("/tmp", "/dev", "/proc"))]
    read = landlock.system_folders()
    base = options.base_folder
    aws = home / ".aws" if options.use_bucket else None
    blobs = base and base / "../../blobs"  # of the Hugging Face hub's cache
    read += filter(None, (options.data_root, base, blobs, options.run_folder, resumed, aws, home / ".Xauthority"))
    desktop = options.notify == "desktop" or not {"when_idle_s", "yield_to"}.isdisjoint(options.limits)
    try:
        landlock.confine(read, write, desktop=desktop)
    except OSError as error:  # a container may know the call and refuse it
        return f"the node can open its user's files: {cause_of(error)}{lacks}"
    return landlock.missing() + lacks


async def _tell(options: NodeOptions, tell: Callable[[Ready], Awaitable[None]]) -> None:
    await tell(await ready_file.wait(options.home, os.getpid()))


def _check_ports(options: NodeOptions) -> None:
    check_listenable(parse_endpoint(options.listen), "--listen")
    check_listenable(_endpoint(options.metrics_host, options.metrics_port), "--metrics-port")
    for flag, address in (("--port", options.dashboard), ("--control-listen", options.control_listen)):
        if address:
            check_listenable(_endpoint(*host_port(address)), flag)


def _endpoint(host: str, port: int) -> Endpoint:
    return Endpoint("ip6" if ":" in host else "ip4", host, port)


@contextlib.contextmanager
def _nothing_to_end() -> Iterator[None]:
    """Let Ctrl-C end the process without a word: nothing is held yet."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, or a test's
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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

"""A child node process: started so that it dies with us, in its own session, queried, and reliably ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import swarmnode
from swarmnode.app.control import client
from swarmnode.app.daemon import ready_file
from swarmnode.app.daemon.ready_file import Ready
from swarmnode.app.local.spawn import NODE, SPAWNER, ChildProcess
from swarmnode.base.errors import (
    EXIT_PREEMPTED,
    EXIT_PREEMPTED_INCOMPLETE,
    DataError,
    DiskFull,
    HardwareFault,
    LocalFault,
    NotPermitted,
    SwarmnodeError,
    UsageError,
    VersionMismatch,
    cause_of,
)
from swarmnode.base.wire.record_pb2 import NODE_STATE_TRAINING
from swarmnode.base.wire.report_pb2 import StatusReply

STATUS_TIMEOUT_S = 2.0
"""Guess. A node that answers later is shown with its previous status."""

LEAVE_TIMEOUT_S = 3.0
TAIL_BYTES = 4096
TAIL_CHARS_MAX = 400
FATAL: Mapping[int, type[SwarmnodeError]] = {
    error.exit_code: error for error in (UsageError, VersionMismatch, HardwareFault, DiskFull, NotPermitted, DataError)
}
"""By exit code, what a service manager does not start a node again after (docs/exit-codes.md)."""

LOOPBACK = "/ip4/127.0.0.1/tcp/0"  # of any free port
LOCAL = "/ip4/127."
STDOUT_NAME = "stdout.log"
STDERR_NAME = "stderr.log"


@dataclass(frozen=True, slots=True)
class NodePlan:
    """Parameters of one process. `stage` None lets it choose; `bootstrap` makes it serve none."""

    name: str
    home: Path
    manifest: Path
    cache: Path
    bootstraps: tuple[str, ...] = ()
    stage: int | None = None
    bootstrap: bool = False
    dashboard_port: int | None = None  # of a bootstrap's page; None: no page
    checkpoints: str = ""
    data_root: Path | None = None  # folder of the run's data set or tokenizer
    resume: str = ""
    listen: str = LOOPBACK
    flags: tuple[str, ...] = ("--notice", "none")  # of `join`; many nodes on one machine would all be notified


def node_command(plan: NodePlan) -> list[str]:
    """The command line of a real node for `plan`."""
    common = ["--listen", plan.listen, "--home", str(plan.home), "--metrics-port", "0", "--name", plan.name]
    if not plan.listen.startswith(LOCAL):
        common.append("--lan")  # the machines of one house find each other
    if plan.bootstrap:
        page = [] if plan.dashboard_port is None else ["--no-archive", "--port", str(plan.dashboard_port)]
        return [*NODE, "coordinator" if page else "bootstrap", str(plan.manifest), *page, *common]
    join = ["join", *plan.bootstraps, "--run", str(plan.manifest), "--cache", str(plan.cache), *plan.flags]
    stage = None if plan.stage is None else plan.stage + 1  # as people count
    given = {"stage": stage, "checkpoints": plan.checkpoints, "data-root": plan.data_root, "resume": plan.resume}
    options = [word for key, value in given.items() if value not in (None, "") for word in (f"--{key}", str(value))]
    return [*NODE, *join, *common, *options, *(["--resume-other"] if plan.resume else [])]


def environment() -> dict[str, str]:
    """The environment of a node process: one arithmetic thread each (two processes of two threads run slower than two
    of one, measured), and this package's path."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    variables.setdefault("SWARMNODE_PRIORITY", "normal")  # whoever starts a whole swarm here wants it to train
    source = Path(swarmnode.__file__).resolve().parent.parent
    if source.name != "site-packages":
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(source), variables.get("PYTHONPATH", "")]))
    return variables


class Child:
    """A started process. `reason`: how it ended ("" while it runs); `status`: its last one."""

    def __init__(self, plan: NodePlan, process: ChildProcess) -> None:
        self.plan = plan
        self.ready: Ready | None = None
        self.status: StatusReply | None = None
        self.reason = ""
        self.told: str | None = None
        self._process = process

    @classmethod
    async def start(cls, plan: NodePlan, command: Sequence[str], *, fork: bool = True) -> Child:
        """Run `command` for `plan`, with its output in files of its home. Call it from the main thread: the child dies
        with the thread that starts it. `fork` False: start as a command, as a volunteer does. Raises LocalFault if the
        system refuses."""
        try:
            plan.home.mkdir(mode=0o700, parents=True, exist_ok=True)
            ready_file.clear(plan.home)
            with (plan.home / STDOUT_NAME).open("ab") as out, (plan.home / STDERR_NAME).open("ab") as error:
                process = await SPAWNER.start(command, environment(), out, error, fork=fork)
        except OSError as failure:
            raise LocalFault(f"cannot start {plan.name} in {plan.home}: {cause_of(failure)}") from None
        return cls(plan, process)

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stage(self) -> int | None:
        """The known stage: by its status, else as planned."""
        if self.status is not None:
            return self.status.stage
        return self.plan.stage

    @property
    def trained(self) -> bool:
        """Whether it reached training. A process that never did would only fail again."""
        status = self.status
        return status is not None and (status.state == NODE_STATE_TRAINING or status.inner_steps > 0)

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def poll(self) -> None:
        """Ask for the status once, within a timeout; without an answer the last one stays."""
        try:
            if self.ready is None:
                self.ready = ready_file.read(self.plan.home)
            if self.ready is not None and self.alive:
                self.status = await asyncio.to_thread(client.status, self.plan.home, timeout_s=STATUS_TIMEOUT_S)
        except SwarmnodeError:
            pass  # not yet, no longer, or frozen: `alive` and the age of `status` show it

    async def leave(self, reason: str, checkpoint: str = "") -> None:
        """Take its last status and ask it to leave, with its stage saved in `checkpoint` unless that is ""; SIGTERM if
        its control socket does not answer."""
        await self.poll()
        if not self.alive:
            return
        try:
            values = {"reason": reason, "checkpoint": checkpoint, "stopping": True}
            await asyncio.to_thread(client.ask, self.plan.home, "leave", timeout_s=LEAVE_TIMEOUT_S, **values)
        except SwarmnodeError:
            self.signal(signal.SIGTERM)

    async def limit(self, limit: str, value: str) -> None:
        """Change one of its limits, as `swarmnode limit`. Raises Unavailable if it does not answer."""
        await asyncio.to_thread(client.ask, self.plan.home, "limit", changed={limit: value})

    def signal(self, number: signal.Signals, told: str | None = None) -> None:
        """Send signal `number` to the process, if it still runs; `told` becomes the reason of its end."""
        if self.alive:
            self.told = told if told is not None else self.told
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def kill(self, told: str | None = None) -> None:
        """Send SIGKILL to the process and all its children."""
        if self.alive:
            self.told = told if told is not None else self.told
            self._kill_group()

    async def wait(self, timeout_s: float) -> bool:
        """Whether it ended within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            return False
        return True

    @property
    def fault(self) -> SwarmnodeError | None:
        """Why it ended, where another start would end alike (FATAL): with its own last line and its exit code."""
        kind = None if self.told is not None else FATAL.get(self._process.returncode or 0)
        if kind is None:
            return None
        said = tail(self.plan.home / STDERR_NAME).removeprefix("swarmnode: ")
        return kind(f"{self.name}: {said or self.reason}; see {self.plan.home}")

    def bury(self) -> None:
        """Clean up after its end: kill leftover children, set `reason`."""
        code = self._process.returncode
        assert code is not None, f"{self.name} still runs"
        if not self.reason:
            self._kill_group()
            self.reason = self.told or explain(code, tail(self.plan.home / STDERR_NAME))

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # it leads its own session, so its pid is the group's


def explain(code: int, last_line: str) -> str:
    """Description of a process's end, from its return code and the last line of its stderr."""
    if code == 0:
        return "left"
    if code in (EXIT_PREEMPTED, EXIT_PREEMPTED_INCOMPLETE):
        return "preempted" if code == EXIT_PREEMPTED else f"preempted, incomplete: {last_line}"
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
    return f"{how}: {last_line}" if last_line else how


def tail(path: Path) -> str:
    """The last non-blank line of `path`, shortened; "" if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip()[:TAIL_CHARS_MAX] for line in reversed(lines) if line.strip()), "")

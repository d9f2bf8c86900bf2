"""One node process of ours: started on a leash in a session of its own, asked what it does, ended for certain."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import swarmnode
from swarmnode.control import client
from swarmnode.control.client import ControlClient
from swarmnode.errors import EXIT_PREEMPTED, EXIT_PREEMPTED_INCOMPLETE, LocalFault, SwarmnodeError
from swarmnode.local import ready
from swarmnode.local.ready import Ready
from swarmnode.local.starting import NODE, NURSERY, Process
from swarmnode.wire.control_pb2 import DrainReply, LimitRequest, StatusReply
from swarmnode.wire.record_pb2 import NODE_STATE_TRAINING

STATUS_TIMEOUT_S = 2.0
"""A node that answers later is shown with what it said last. Guess."""

LEAVE_TIMEOUT_S = 3.0
TAIL_BYTES = 4096
TAIL_CHARS_MAX = 200
STDOUT_NAME = "stdout.log"
STDERR_NAME = "stderr.log"


@dataclass(frozen=True, slots=True)
class NodePlan:
    """What one process shall be; `stage` None lets it choose, `bootstrap` makes it serve none."""

    name: str
    home: Path
    manifest: Path
    cache: Path
    bootstraps: tuple[str, ...] = ()
    stage: int | None = None
    bootstrap: bool = False
    dashboard_port: int | None = None  # of the page a bootstrap shows; None: no page
    checkpoints: str = ""
    data_root: Path | None = None  # below which the manifest's paths lie; None: nothing is opened
    resume: str = ""
    flags: tuple[str, ...] = ("--notice", "none")  # of `join`; many nodes on one machine would all be told


def node_command(plan: NodePlan) -> list[str]:
    """The command line of a real node of `plan`."""
    command = [*NODE]
    common = ["--listen", "/ip4/127.0.0.1/tcp/0", "--home", str(plan.home), "--metrics-port", "0", "--name", plan.name]
    if plan.bootstrap and plan.dashboard_port is not None:
        return [*command, "coordinator", str(plan.manifest), "--port", str(plan.dashboard_port), *common]
    if plan.bootstrap:
        return [*command, "bootstrap", str(plan.manifest), *common]
    stage = [] if plan.stage is None else ["--stage", str(plan.stage)]
    join = ["join", *plan.bootstraps, "--run", str(plan.manifest), "--cache", str(plan.cache), *plan.flags]
    saving = ["--checkpoints", plan.checkpoints] if plan.checkpoints else []
    reading = ["--data-root", str(plan.data_root)] if plan.data_root is not None else []
    resuming = ["--resume", plan.resume, "--resume-other"] if plan.resume else []
    return [*command, *join, *stage, *common, *saving, *reading, *resuming]


def environment() -> dict[str, str]:
    """Of a node process: one thread of arithmetic each (two processes of two threads run slower than two of one,
    measured, test-lab section 7), and this very package."""
    found = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    source = Path(swarmnode.__file__).resolve().parent.parent
    if source.name != "site-packages":
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(source), found.get("PYTHONPATH", "")]))
    return found


class Child:
    """A started process. `reason` says how it ended ("" while it runs); `status` is the last it said of itself."""

    def __init__(self, plan: NodePlan, process: Process) -> None:
        self.plan = plan
        self.ready: Ready | None = None
        self.status: StatusReply | None = None
        self.reason = ""
        self.told: str | None = None
        self._process = process
        self._client: ControlClient | None = None

    @classmethod
    async def start(cls, plan: NodePlan, command: Sequence[str], *, fork: bool = True) -> Child:
        """Run `command` for `plan`, its output in files of its home. Call it from the main thread: the leash is held by
        the thread that starts. `fork` False: as a command, as a volunteer does. Raises LocalFault when the system
        refuses."""
        try:
            plan.home.mkdir(mode=0o700, parents=True, exist_ok=True)
            ready.clear(plan.home)
            with (plan.home / STDOUT_NAME).open("ab") as out, (plan.home / STDERR_NAME).open("ab") as error:
                process = await NURSERY.start(command, environment(), out, error, fork=fork)
        except OSError as failure:
            raise LocalFault(f"cannot start {plan.name} in {plan.home}: {failure.strerror}") from None
        return cls(plan, process)

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stage(self) -> int | None:
        """The stage it serves as far as known: what it says, else what it was told."""
        if self.status is not None:
            return self.status.stage
        return self.plan.stage

    @property
    def trained(self) -> bool:
        """Whether it got as far as training: what never did would only fail again."""
        status = self.status
        return status is not None and (status.state == NODE_STATE_TRAINING or status.inner_steps > 0)

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def poll(self) -> None:
        """Ask for the status once, bounded; a node that does not answer keeps its last one."""
        try:
            if self.ready is None:
                self.ready = ready.read(self.plan.home)
            if self.ready is not None and self.alive:
                if self._client is None:
                    self._client = ControlClient(self.plan.home)
                self.status = await self._client.status(timeout_s=STATUS_TIMEOUT_S)
        except SwarmnodeError:
            pass  # not yet, no more, or frozen: `alive` and the age of `status` tell

    async def leave(self, reason: str, checkpoint: str = "") -> None:
        """Take its last words and ask it to leave, with its stage saved in `checkpoint` unless that is ""; SIGTERM when
        its control socket does not answer."""
        await self.poll()
        if not self.alive:
            return
        try:
            if self._client is None:
                self._client = ControlClient(self.plan.home)
            await self._client.leave(reason, checkpoint, stopping=True, timeout_s=LEAVE_TIMEOUT_S)
        except SwarmnodeError:
            self.signal(signal.SIGTERM)

    async def drain(self, notice_s: float, reason: str) -> DrainReply:
        """Tell it that its machine will be taken away in `notice_s`; returns how it left. Raises Unavailable when it
        has not by then."""
        return await asyncio.to_thread(client.drain, self.plan.home, notice_s, reason)

    async def limit(self, limit: str, value: str) -> None:
        """Change one of its limits, as `swarmnode limit` does. Raises Unavailable when it does not answer."""
        request = LimitRequest(changed={limit: value})
        await asyncio.to_thread(client.ask, self.plan.home, "Limit", request)

    def signal(self, number: signal.Signals, told: str | None = None) -> None:
        """Send `number` to the process itself, if it still runs; `told` is then why it ended."""
        if self.alive:
            self.told = told if told is not None else self.told
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def kill(self, told: str | None = None) -> None:
        """SIGKILL to the process and to whatever it started."""
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

    async def bury(self) -> None:
        """After its end: end what it left running, say how it ended in `reason`, let go of the connection."""
        code = self._process.returncode
        assert code is not None, f"{self.name} still runs"
        if self._client is not None:
            client, self._client = self._client, None
            await client.close()
        if not self.reason:
            self._kill_group()
            self.reason = self.told or explain(code, tail(self.plan.home / STDERR_NAME))

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # it leads its own session, so the group is its pid


def explain(code: int, last_line: str) -> str:
    """How a process ended, from its return code and the last line of its stderr."""
    if code == 0:
        return "left"
    if code in (EXIT_PREEMPTED, EXIT_PREEMPTED_INCOMPLETE):
        return "preempted" if code == EXIT_PREEMPTED else f"preempted, incomplete: {last_line}"
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
    return f"{how}: {last_line}" if last_line else how


def tail(path: Path) -> str:
    """The last line of `path` that is not blank, cut to a line's length; "" when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip()[:TAIL_CHARS_MAX] for line in reversed(lines) if line.strip()), "")

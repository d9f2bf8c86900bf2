"""Start a child process: forked from a fork server if possible, else run as a command. Both have the same interface."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from swarmnode.app.local import fork_server, parent_death

NODE = (sys.executable, "-m", "swarmnode.app.cli.main")
FORK_SERVER = (sys.executable, "-m", "swarmnode.app.cli.fork_server")  # its program
PRELOADED = (
    "swarmnode.app.cli.join",
    "swarmnode.app.cli.bootstrap",
    "swarmnode.app.daemon.process",
    "uvloop",
    "netaddr",
    "torch.fx.experimental.symbolic_shapes",  # torch itself imports it in its first step
)
"""Modules that each node imports sooner or later (seen with -X importtime)."""

ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd")  # device files of CUDA and ROCm drivers
ALIKE = ("PYTHONPATH", "PYTHONHASHSEED", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables that matter when a process starts or imports: if they differ from the fork server's, it cannot fork."""

GOODBYE_S = 5.0


def several_devices() -> tuple[str, ...]:
    """This machine's accelerators, if there are several."""
    if not any(map(os.path.exists, ACCELERATORS)):  # then PyTorch need not be imported to know
        return ()
    from swarmnode.model.device import devices

    names = devices()
    return names if len(names) > 1 else ()


class ChildProcess(Protocol):
    """The interface of a started process, as asyncio.subprocess.Process."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def send_signal(self, signal: int) -> None: ...

    async def wait(self) -> int: ...


class Spawner:
    """Starts a fork server with the first node. Nodes that still run when it is closed are killed."""

    def __init__(self) -> None:
        self._fork_server: subprocess.Popen[bytes] | None = None
        self._asking: socket.socket | None = None
        self._environment: Mapping[str, str] = {}

    async def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        out: IO[bytes],
        error: IO[bytes],
        *,
        fork: bool = True,
    ) -> ChildProcess:
        """Run `command` in its own session so that it dies with us; with `fork` forked if possible. Call it from the
        main thread, which the children die with. Raises OSError if the system refuses."""
        if fork and self._forkable(command, environment):
            with contextlib.suppress(ConnectionError):  # the fork server could not start, or has ended
                return await self._fork(command[len(NODE) :], environment, out, error)
        return await asyncio.create_subprocess_exec(
            *_on_leash(command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=error,
            env=environment,
            start_new_session=True,
        )

    def close(self) -> None:
        """End the fork server, and with it the processes it forked."""
        if self._asking is not None:
            self._asking.close()
            self._asking = None
        if self._fork_server is not None:
            server = self._fork_server
            self._fork_server = None
            try:
                server.wait(GOODBYE_S)
            except subprocess.TimeoutExpired:  # still importing
                server.kill()
                server.wait()

    def _forkable(self, command: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Whether it is a node of this Python on a machine without accelerators: an open device in a forked process is
        not worth a saved second."""
        if sys.platform != "linux" or tuple(command[: len(NODE)]) != NODE or any(map(os.path.exists, ACCELERATORS)):
            return False
        if self._fork_server is None:
            self._open(environment)
        return all(environment.get(name) == self._environment.get(name) for name in ALIKE)

    def _open(self, environment: Mapping[str, str]) -> None:
        self._asking, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._environment = dict(environment)
        with theirs:
            self._fork_server = subprocess.Popen(
                _on_leash([*FORK_SERVER, str(theirs.fileno()), *PRELOADED]),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # an error here shows again in the node started as a command
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    async def _fork(
        self, arguments: Sequence[str], environment: Mapping[str, str], out: IO[bytes], error: IO[bytes]
    ) -> ChildProcess:
        assert self._asking is not None
        forked = ForkedProcess()
        ours, theirs = socket.socketpair()
        with theirs:
            transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: forked, sock=ours)
            socket.send_fds(self._asking, [b"\n"], [theirs.fileno(), out.fileno(), error.fileno()])
        said = json.dumps({"arguments": list(arguments), "environment": dict(environment)}).encode()
        transport.write(fork_server.LENGTH.pack(len(said)) + said)
        await forked.born
        return forked


SPAWNER = Spawner()
"""The spawner of this process. It needs no closing: the fork server ends with its parent."""


class ForkedProcess(asyncio.Protocol):
    """A process forked by the fork server, which reports its pid and later its exit code."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.born: asyncio.Future[int] = loop.create_future()
        self._ended: asyncio.Future[int] = loop.create_future()
        self._transport: asyncio.BaseTransport | None = None
        self._heard = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        *lines, self._heard = (self._heard + data).split(b"\n")
        for line in lines:
            if not self.born.done():
                self.born.set_result(int(line))
            elif not self._ended.done():
                self._ended.set_result(int(line))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.born.done():
            self.born.set_exception(ConnectionError("the zygote is gone"))
        elif not self._ended.done():
            self._ended.set_result(-signal.SIGKILL)  # the fork server ended, and with it all it forked

    @property
    def pid(self) -> int:
        return self.born.result()

    @property
    def returncode(self) -> int | None:
        return self._ended.result() if self._ended.done() else None

    def send_signal(self, signal: int) -> None:
        """Send a signal. Raises ProcessLookupError if the process has ended."""
        if self.returncode is None:
            os.kill(self.pid, signal)

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)


def _on_leash(command: Sequence[str]) -> list[str]:
    return [sys.executable, "-I", "-S", str(Path(parent_death.__file__)), str(os.getpid()), *command]

"""Starting a process of ours: forked from a zygote where that can be, else run as a command; the same to whoever
watches it."""

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

from swarmnode.local import leash, zygote

NODE = (sys.executable, "-m", "swarmnode.cli.main")
PRELOADED = (
    "swarmnode.cli.join",
    "swarmnode.cli.bootstrap",
    "swarmnode.cli.daemon",
    "uvloop",
    "netaddr",
    "torch.fx.experimental.symbolic_shapes",  # torch itself imports it in the first step it does
)
"""What each node imports sooner or later (seen with -X importtime)."""

ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd")  # of CUDA and ROCm, as their drivers name them

ALIKE = ("PYTHONPATH", "PYTHONHASHSEED", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables that matter when a process starts or imports: with others than the zygote's it cannot be forked."""

GOODBYE_S = 5.0


class Process(Protocol):
    """A started process, as asyncio.subprocess.Process has it."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def send_signal(self, signal: int) -> None: ...

    async def wait(self) -> int: ...


class Nursery:
    """Has a zygote from the first node on. Nodes that still run when it is closed are killed."""

    def __init__(self) -> None:
        self._zygote: subprocess.Popen[bytes] | None = None
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
    ) -> Process:
        """Run `command` in a session of its own, on a leash; with `fork` forked where that can be. Call it from the
        main thread, which holds the leash. Raises OSError when the system refuses."""
        if fork and self._forkable(command, environment):
            with contextlib.suppress(ConnectionError):  # the zygote could not be, or is no more
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
        """End the zygote, and with it what it forked."""
        if self._asking is not None:
            self._asking.close()
            self._asking = None
        if self._zygote is not None:
            found, self._zygote = self._zygote, None
            try:
                found.wait(GOODBYE_S)
            except subprocess.TimeoutExpired:  # still importing
                found.kill()
                found.wait()

    def _forkable(self, command: Sequence[str], environment: Mapping[str, str]) -> bool:
        """A node of this very Python, on a machine without accelerators: a device in a forked process is more trouble
        than a second."""
        if sys.platform != "linux" or tuple(command[: len(NODE)]) != NODE or any(map(os.path.exists, ACCELERATORS)):
            return False
        if self._zygote is None:
            self._open(environment)
        return all(environment.get(name) == self._environment.get(name) for name in ALIKE)

    def _open(self, environment: Mapping[str, str]) -> None:
        self._asking, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._environment = dict(environment)
        with theirs:
            self._zygote = subprocess.Popen(
                _on_leash([sys.executable, "-m", zygote.__name__, str(theirs.fileno()), *PRELOADED]),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # what fails here fails again in the node that is started the long way
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    async def _fork(
        self, arguments: Sequence[str], environment: Mapping[str, str], out: IO[bytes], error: IO[bytes]
    ) -> Process:
        assert self._asking is not None
        forked = Forked()
        ours, theirs = socket.socketpair()
        with theirs:
            transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: forked, sock=ours)
            socket.send_fds(self._asking, [b"\n"], [theirs.fileno(), out.fileno(), error.fileno()])
        said = json.dumps({"arguments": list(arguments), "environment": dict(environment)}).encode()
        transport.write(zygote.LENGTH.pack(len(said)) + said)
        await forked.born
        return forked


NURSERY = Nursery()
"""Of this process. It needs no closing: the zygote ends with whoever started it."""


class Forked(asyncio.Protocol):
    """A process that a zygote forked: hears from it the pid, later the exit code."""

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
            self._ended.set_result(-signal.SIGKILL)  # the zygote ended, and with it all it forked

    @property
    def pid(self) -> int:
        return self.born.result()

    @property
    def returncode(self) -> int | None:
        return self._ended.result() if self._ended.done() else None

    def send_signal(self, signal: int) -> None:
        """Raises ProcessLookupError when it is no more."""
        if self.returncode is None:
            os.kill(self.pid, signal)

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)


def _on_leash(command: Sequence[str]) -> list[str]:
    return [sys.executable, "-I", "-S", str(Path(leash.__file__)), str(os.getpid()), *command]

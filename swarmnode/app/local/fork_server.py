"""A process that has imported a node's modules and forks a node on request: `fork_server.py FD MODULE...`.

Importing torch is most of the cost of starting a node (measured: 2.9 s of processor time, of which 0.3 remain). It runs
in a single thread, opens no device and starts no event loop, so that forking is safe. If that does not hold it ends,
and nodes are started as commands (app/local/spawn.py).

A request is one datagram on FD that carries three descriptors: a stream, stdout, stderr. The node reads its arguments
and environment from the stream, as JSON after a length; the fork server writes there "PID\\n" and, when the node has
ended, its exit code. It ends when FD is closed, and its nodes with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import socket
import struct
import sys
from collections.abc import Callable, Sequence

from swarmnode.app.local import parent_death

PR_SET_NAME = 15
NAME_BYTES_MAX = 15  # of a process name, by the kernel
LENGTH = struct.Struct("!I")
DESCRIPTORS = 3


class ForkServer:
    """Forks on request, and reports when forked processes have ended."""

    def __init__(self, asked: socket.socket) -> None:
        self._asked = asked
        self._poll = select.poll()
        self._poll.register(asked, select.POLLIN)
        self._nodes: dict[int, tuple[int, socket.socket]] = {}  # pidfd -> (pid, stream)

    def serve(self) -> list[str] | None:
        """Serve requests. Returns its arguments in a forked node, and None in the fork server once FD is closed."""
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor != self._asked.fileno():
                    self._bury(descriptor)
                    continue
                word, descriptors, _, _ = socket.recv_fds(self._asked, 1, DESCRIPTORS)
                if not word:
                    return None
                arguments = self._fork(descriptors)
                if arguments is not None:
                    return arguments

    def _fork(self, descriptors: list[int]) -> list[str] | None:
        stream, out, error = socket.socket(fileno=descriptors[0]), *descriptors[1:]
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._let_go()
            return become_child(parent, stream, out, error)
        os.close(out)
        os.close(error)
        pidfd = os.pidfd_open(pid)
        self._nodes[pidfd] = pid, stream
        self._poll.register(pidfd, select.POLLIN)
        _tell(stream, f"{pid}\n")
        return None

    def _bury(self, pidfd: int) -> None:
        self._poll.unregister(pidfd)
        os.close(pidfd)
        pid, stream = self._nodes.pop(pidfd)
        _, status = os.waitpid(pid, 0)
        _tell(stream, f"{os.waitstatus_to_exitcode(status)}\n")
        stream.close()

    def _let_go(self) -> None:
        """In a node: close the fork server's descriptors."""
        self._asked.close()
        for pidfd, (_, stream) in self._nodes.items():
            os.close(pidfd)
            stream.close()


def become_child(parent: int, stream: socket.socket, out: int, error: int) -> list[str]:
    """Set up the forked process: it dies with its parent, leads its own session, writes into its files, and has the
    given environment. Returns its arguments."""
    if not parent_death.hold(parent):
        os._exit(parent_death.EXIT_NOT_RUN)
    os.setsid()
    os.dup2(out, 1)
    os.dup2(error, 2)
    os.close(out)
    os.close(error)
    with stream, stream.makefile("rb") as reading:
        (length,) = LENGTH.unpack(reading.read(LENGTH.size))
        said = json.loads(reading.read(length))
    os.environ.clear()
    os.environ.update(said["environment"])
    arguments: list[str] = said["arguments"]
    name = " ".join(["swarmnode", *arguments[:1]]).encode()
    ctypes.CDLL(None).prctl(PR_SET_NAME, name[:NAME_BYTES_MAX], 0, 0, 0)
    return arguments


def alone() -> bool:
    """Whether this process has one thread, so that forking copies all of it."""
    return len(os.listdir("/proc/self/task")) == 1


def _tell(stream: socket.socket, text: str) -> None:
    with contextlib.suppress(OSError):  # the requester is gone or no longer listens
        stream.sendall(text.encode())


def serve(words: Sequence[str], run: Callable[[list[str]], int], program: str) -> int:
    """Import the modules and fork on request; in a forked node call `run` with its arguments, as if started as
    `program`.

    `words` are the descriptor of the requests and names of modules. Returns the exit code of this process.
    """
    asked = socket.socket(fileno=int(words[0]))
    os.set_inheritable(asked.fileno(), False)
    for module in words[1:]:
        importlib.import_module(module)
    if not alone():
        return 1
    gc.collect()
    gc.freeze()  # keep shared pages shared: no garbage collection writes to them
    arguments = ForkServer(asked).serve()
    if arguments is None:
        return 0
    sys.argv = [program, *arguments]
    return run(arguments)

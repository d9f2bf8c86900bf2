"""A process that has imported what a node needs, and forks a node whenever it is asked: `zygote.py FD MODULE...`.

Importing torch is most of what starting a node costs (measured: 2.9 s of processor time, of which 0.3 remain). It runs
alone in one thread, opens no device and starts no event loop, so that nothing is forked which does not bear it; where
that does not hold, it ends, and nodes are started the long way (local/starting.py).

Asked with one datagram on FD that carries three descriptors: a stream, stdout, stderr. The node reads from the stream
its arguments and environment as JSON after a length; the zygote writes there "PID\\n" and, when it has ended, its exit
code. It ends with FD, and its nodes with it.
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

from swarmnode.local import leash

PR_SET_NAME = 15
NAME_BYTES_MAX = 15  # of a process, by the kernel
LENGTH = struct.Struct("!I")
DESCRIPTORS = 3


class Zygote:
    """Forks on request, and tells when the forked have ended."""

    def __init__(self, asked: socket.socket) -> None:
        self._asked = asked
        self._poll = select.poll()
        self._poll.register(asked, select.POLLIN)
        self._nodes: dict[int, tuple[int, socket.socket]] = {}  # pidfd -> (pid, stream)

    def serve(self) -> list[str] | None:
        """Returns in a node that was forked, with its arguments; and None in the zygote, when nobody asks any more."""
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
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            self._let_go()
            return be_born(parent, stream, out, error)
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
        """In a node: of what is the zygote's alone."""
        self._asked.close()
        for pidfd, (_, stream) in self._nodes.items():
            os.close(pidfd)
            stream.close()


def be_born(parent: int, stream: socket.socket, out: int, error: int) -> list[str]:
    """Make the forked process one of its own: dies with its parent, leads its session, writes into its files, has the
    environment it is told. Returns its arguments."""
    if not leash.hold(parent):
        os._exit(leash.EXIT_NOT_RUN)
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
    """Whether this process has one thread, so that forking it forks all of it."""
    return len(os.listdir("/proc/self/task")) == 1


def _tell(stream: socket.socket, text: str) -> None:
    with contextlib.suppress(OSError):  # whoever asked is gone, or does not listen any more
        stream.sendall(text.encode())


def main(words: list[str]) -> int:
    """Import the modules, serve; in a node, be `swarmnode ARGUMENTS`."""
    asked = socket.socket(fileno=int(words[0]))
    os.set_inheritable(asked.fileno(), False)
    for module in words[1:]:
        importlib.import_module(module)
    swarmnode = importlib.import_module("swarmnode.cli.main")
    if not alone():
        return 1
    gc.collect()
    gc.freeze()  # what is shared stays shared: no collection writes to it
    arguments = Zygote(asked).serve()
    if arguments is None:
        return 0
    sys.argv = [str(swarmnode.__file__), *arguments]
    return int(swarmnode.main(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

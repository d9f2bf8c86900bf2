"""Sandbox of the virtual world: threads, sockets, processes and sleeps raise inside it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn


class SandboxViolation(RuntimeError):
    """Code in the virtual world used a real thread, socket, process or clock."""


def forbidden(what: str) -> Callable[..., Any]:
    def refuse(self: object, *args: object, **kwargs: object) -> NoReturn:
        raise SandboxViolation(f"{what} in the virtual world; only the simulation's ports are allowed")

    return refuse


inside: set[int] = set()
"""Threads that are running a virtual loop."""

_watched = False
_BORDERS = {
    "_thread.start_new_thread": "a thread",
    "_thread.start_joinable_thread": "a thread",
    "socket.__new__": "a socket",
    "socket.connect": "a socket",
    "socket.bind": "a socket",
    "subprocess.Popen": "a subprocess",
    "os.fork": "a subprocess",
    "os.forkpty": "a subprocess",
    "os.posix_spawn": "a subprocess",
    "os.system": "a subprocess",
    "time.sleep": "time.sleep",
}


def watch() -> None:
    """Install an audit hook that reports threads, sockets and processes. It cannot be removed, and does nothing unless
    a virtual loop runs in the thread."""
    global _watched
    if _watched:
        return
    _watched = True

    def hook(event: str, args: tuple[object, ...]) -> None:
        if inside and event in _BORDERS and threading.get_ident() in inside:
            raise SandboxViolation(f"{_BORDERS[event]} ({event}) in the virtual world")

    sys.addaudithook(hook)
    if sys.version_info < (3, 12):  # earlier versions do not audit a thread's start
        start = threading.Thread.start

        def guarded(thread: threading.Thread) -> None:
            hook("_thread.start_new_thread", ())
            start(thread)

        threading.Thread.start = guarded  # type: ignore[method-assign,assignment]

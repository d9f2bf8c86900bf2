"""The daemon's local API: JSON over HTTP on a unix socket that only its owner can open.

curl --unix-socket HOME/control.sock -d '{"for_s": 60}' http://localhost/v1/pause
"""

from __future__ import annotations

import inspect
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiohttp import web
from google.protobuf import json_format
from google.protobuf.message import Message

from swarmnode.control import socket_path
from swarmnode.errors import LocalFault, Unavailable, UsageError

STOP_GRACE_S = 0.5
"""Time for calls in flight to finish, often the one that asked the daemon to leave. Guess."""

REASON_CHARACTERS_MAX = 200
SECONDS_MAX = 366 * 86400.0

VERBS: Mapping[str, Mapping[str, object]] = {
    "status": {},
    "leave": {"reason": "", "checkpoint": "", "stopping": False},
    "drain": {"notice_s": 0.0, "reason": ""},
    "pause": {"for_s": 0.0, "reason": ""},
    "resume": {},
    "finish": {"reason": ""},
    "limit": {"changed": {}},
    "config": {},
    "examine": {},
    "copy": {"older_s": 0.0},
}
"""Verbs with the defaults of their arguments; each is a method of daemon.control_api.ControlApi, which has their
meaning. Numbers are seconds, from 0 to a year."""


def arguments_of(verb: str, raw: bytes) -> dict[str, Any]:
    """The arguments of a call, each of its default's type; texts are cut, and keys that are unknown here left out.
    Raises UsageError."""
    try:
        given = json.loads(raw or b"{}")
    except (ValueError, RecursionError):
        raise UsageError("not JSON") from None
    if not isinstance(given, dict):
        raise UsageError("not a JSON object")
    return {name: _checked(name, given.get(name, default), default) for name, default in VERBS[verb].items()}


def _checked(name: str, value: object, default: object) -> object:
    match default, value:
        case bool(), bool():
            return value
        case float(), int() | float() if not isinstance(value, bool) and 0 <= value <= SECONDS_MAX:
            return float(value)
        case float(), _:
            raise UsageError(f"{name}: at most a year, in seconds")
        case str(), str():
            return value[:REASON_CHARACTERS_MAX]
        case dict(), dict() if all(isinstance(text, str) for text in value.values()):
            return value
        case _:
            raise UsageError(f"{name}: not a {type(default).__name__}")


class ControlServer:
    """Serves VERBS, methods of `api`, for the daemon of `home`."""

    def __init__(self, home: Path, api: object, lock: int | None = None) -> None:
        """`lock` is that of `take_home`, if the home is held already."""
        self._home = home
        self._api = api
        self._runner: web.AppRunner | None = None
        self._path: Path | None = None
        self._lock = lock

    def hold(self) -> None:
        """Lock `home` until `stop` or the end of the process. A daemon does this before it touches a file there.

        Raises UsageError if another daemon holds it, LocalFault if it cannot be written.
        """
        if self._lock is None:
            self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = socket_path.take_home(self._home)

    async def start(self) -> Path:
        """Listen, after `hold`; return the socket's path (permissions 0600).

        Raises as `hold`, and LocalFault if the socket cannot be made.
        """
        self.hold()
        try:
            path = self._home.resolve() / socket_path.SOCKET_NAME
            path.unlink(missing_ok=True)  # left by a killed daemon: we hold the lock, so nobody listens there
            listening = _bind(self._home)
            app = web.Application()
            app.router.add_post("/v1/{verb}", self._answer)
            self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=STOP_GRACE_S)
            await self._runner.setup()
            await web.SockSite(self._runner, listening).start()
        except BaseException:
            self._release()
            raise
        self._path = path
        return path

    async def stop(self) -> None:
        """Finish calls in flight and remove the socket. Does nothing if not started."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None
        self._release()

    async def _answer(self, request: web.Request) -> web.Response:
        verb = request.match_info["verb"]
        if verb not in VERBS:
            return _error(404, f"unknown verb {verb[:40]!r}")
        try:
            answer = getattr(self._api, verb)(**arguments_of(verb, await request.read()))
            if inspect.isawaitable(answer):
                answer = await answer
        except UsageError as error:
            return _error(400, str(error))
        except Unavailable as error:
            return _error(503, str(error))
        if isinstance(answer, Message):
            answer = json_format.MessageToDict(
                answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
            )
        return web.json_response(answer or {})

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)


def _bind(home: Path) -> socket.socket:
    """A socket in `home` that only this user can open. Raises LocalFault."""
    listening = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        with socket_path.short_path(home) as path:
            listening.bind(str(path))
    except OSError as error:
        listening.close()
        why = error.strerror or error
        raise LocalFault(f"cannot make a control socket in {home} ({why}): give another, shorter --home") from None
    finally:
        os.umask(before)
    return listening

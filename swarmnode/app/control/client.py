"""Client of a daemon on this machine for one question: JSON over HTTP on its unix socket.

No verb waits until gRPC is imported. watch.py is the client for more than one answer.
"""

from __future__ import annotations

import http.client
import json
import socket
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from swarmnode.app.control import socket_path
from swarmnode.base.errors import LocalFault, Unavailable, UsageError
from swarmnode.base.wire.report_pb2 import StatusReply

TIMEOUT_S = 5.0
"""Timeout of one call. A daemon answers within its loop's lag, a few milliseconds; a swapping machine takes longer."""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, home: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._home = home

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        with socket_path.short_folder(self._home) as folder:
            self.sock.connect(str(folder / socket_path.SOCKET_NAME))


def ask(home: Path, verb: str, *, timeout_s: float = TIMEOUT_S, **arguments: Any) -> dict[str, Any]:
    """The JSON answer of the daemon of `home` to a verb of control.verb.VERBS.

    Raises NoDaemon if none answers, NotPermitted if it belongs to another user, UsageError if it rejects the arguments,
    Unavailable if it cannot serve the verb now or not within `timeout_s`.
    """
    socket_path.check(home)
    connection = _UnixConnection(home, timeout_s)
    try:
        try:
            connection.connect()
        except OSError:
            raise socket_path.no_daemon(home) from None
        connection.request("POST", f"/v1/{verb}", json.dumps(arguments), {"Content-Type": "application/json"})
        response = connection.getresponse()
        body = response.read()
        reply = json.loads(body) if response.status in (200, 400, 503) else {}
    except TimeoutError:
        raise Unavailable(f"the daemon at {home} did not answer within {timeout_s:g} s: frozen, or too busy") from None
    except (OSError, http.client.HTTPException, ValueError):
        raise other_version(home) from None
    finally:
        connection.close()
    match response.status:
        case 200:
            return dict(reply)
        case 400:
            raise UsageError(reply["error"])
        case 404:
            raise other_version(home)
        case 503:
            raise Unavailable(reply["error"])
        case _:
            raise LocalFault(f"the daemon at {home} failed: see its log")


def status(home: Path, *, timeout_s: float = TIMEOUT_S) -> StatusReply:
    """The status of the daemon of `home`. Raises as `ask`."""
    return json_format.ParseDict(ask(home, "status", timeout_s=timeout_s), StatusReply(), ignore_unknown_fields=True)


def drain(home: Path, notice_s: float, reason: str) -> dict[str, Any]:
    """Tell the daemon of `home` that its machine will be taken away in `notice_s`; return how it left, as the fields of
    node.drain.DrainReport. Raises as `ask`, and Unavailable if it has not left by then."""
    return ask(home, "drain", timeout_s=notice_s + TIMEOUT_S, notice_s=notice_s, reason=reason)


def other_version(home: Path) -> LocalFault:
    """The error for a daemon that does not speak as this package does."""
    return LocalFault(f"the daemon at {home} ended just now, or has another version: restart it")

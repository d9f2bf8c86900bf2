"""Sources of an invite, and its protection from other users.

Every user of a machine can read command lines (`ps`). An invite with a secret on ours is put into a pipe and the
program is started again with the pipe's number instead, so that it is visible only for a fraction of a second; so is
one from SWARMNODE_INVITE. Stdin (`join -`) and a file never show it.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from swarmnode.base.errors import UsageError, os_errors
from swarmnode.base.text_file import decoded
from swarmnode.run.admission.invite import INVITE_CHARACTERS_MAX, Invite, decode, looks_like_invite

VARIABLE = "SWARMNODE_INVITE"
VERBS = ("join", "export")  # that take an invite
_BY_PIPE = "fd:"


def find_invite(words: Sequence[str], file: Path | None) -> Invite | None:
    """The invite in `words` (the arguments of `join` or `export`), on stdin ("-"), in `file`, or in SWARMNODE_INVITE;
    None without any. A file that others can read is made private. Raises UsageError and VersionMismatch for a damaged
    one."""
    if file is not None:
        return decode(_read_file(file))
    if list(words) == ["-"]:
        if sys.stdin.isatty():
            sys.stderr.write("paste the invite, then Enter: ")
            sys.stderr.flush()
            return decode(sys.stdin.readline())
        return decode(sys.stdin.read(2 * INVITE_CHARACTERS_MAX))
    if len(words) == 1 and words[0].startswith(_BY_PIPE):
        with os.fdopen(int(words[0][len(_BY_PIPE) :]), "rb") as pipe:
            return decode(pipe.read(2 * INVITE_CHARACTERS_MAX).decode("ascii", "replace"))
    if words and looks_like_invite("".join(words)):
        invite = decode("".join(words))
        if invite.is_secret:
            _hide("".join(words), words, sys.argv)
        return invite
    if not words and VARIABLE in os.environ:
        text = os.environ.pop(VARIABLE)
        invite = decode(text)
        if invite.is_secret:  # removed, so that no child and no dump of the environment shows it
            _hide(text, (), sys.argv)
        return invite
    return None


def _hide(invite: str, words: Sequence[str], argv: Sequence[str]) -> None:
    """Start this program again with `invite` read from a pipe in place of `words`.

    Returns if command lines are not visible, or this process was not started by that command line.
    """
    verb = next((verb for verb in VERBS if verb in argv[1:]), None)
    if not Path("/proc/self/cmdline").exists() or verb is None:
        return
    rest = [argument for argument in argv[1:] if argument not in words]
    if len(rest) + len(words) != len(argv) - 1:
        return
    reading, writing = os.pipe()
    os.write(writing, "".join(invite.split()).encode())
    os.close(writing)
    os.set_inheritable(reading, True)
    at = rest.index(verb) + 1
    command = [*rest[:at], f"{_BY_PIPE}{reading}", *rest[at:]]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "swarmnode.app.cli.main", *command])


def _read_file(path: Path) -> str:
    with os_errors(UsageError, f"--invite-file {path}"), path.open("rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        raw = file.read(2 * INVITE_CHARACTERS_MAX)
    try:
        lines = decoded(raw).splitlines()
    except UnicodeDecodeError:
        raise UsageError(f"--invite-file {path}: not text; one line, as `swarmnode invite` prints it") from None
    invite = "\n".join(line for line in lines if not line.startswith("#"))  # how to install
    if mode & 0o077 and decode(invite).is_secret:
        with contextlib.suppress(OSError):
            path.chmod(0o600)
        sys.stderr.write(f"{path} holds a secret and others could read it (mode {mode:04o}): it is private now\n")
    return invite

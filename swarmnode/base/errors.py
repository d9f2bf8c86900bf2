"""Errors, classified by fault. The class decides how the error is handled.

| class | at fault | handling |
| --- | --- | --- |
| `ManifestError` | the operator | stop and say what to change |
| `DataError` | the operator | stop and name the file, the place and the remedy |
| `LocalFault` | this process | crash and be restarted |
| `RemoteFault` | the peer | drop it, lower its standing, go on |
| `Unavailable` | nobody | retry with a bound |
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import ClassVar, Final

EXIT_PREEMPTED: Final = 30
"""The machine was preempted and no work was lost."""

EXIT_PREEMPTED_INCOMPLETE: Final = 31
"""The machine was preempted before all work was handed over."""


class SwarmnodeError(Exception):
    """Base of every error a user may see. `str(error)` is one line that names the problem, the place and the remedy."""

    exit_code: ClassVar[int] = 1


class UsageError(SwarmnodeError):
    """A flag or an argument is wrong."""

    exit_code: ClassVar[int] = 2


class KeyInUse(UsageError):
    """Another process runs with this node's key: its home was copied."""


class ManifestError(SwarmnodeError):
    """The manifest is malformed, out of range, unsigned, or belongs to another run."""

    exit_code: ClassVar[int] = 78


class ManifestVersionError(ManifestError):
    """The manifest was made by another version of swarmnode."""

    exit_code: ClassVar[int] = 10


class ConfigError(SwarmnodeError):
    """The config file is malformed or sets an unknown key."""

    exit_code: ClassVar[int] = 78


class DataError(SwarmnodeError):
    """A data source, shard or tokenizer cannot be used."""

    exit_code: ClassVar[int] = 78


class NotPermitted(SwarmnodeError):
    """This process may not use a file, or a peer may not use this node."""

    exit_code: ClassVar[int] = 77


class VersionMismatch(SwarmnodeError):
    """Data was written by a version of swarmnode that this one does not understand."""

    exit_code: ClassVar[int] = 10


class HardwareFault(SwarmnodeError):
    """This machine cannot take part: too little memory, no disk, a broken device, other rounding."""

    exit_code: ClassVar[int] = 20


class Unreachable(SwarmnodeError):
    """No peer answers at the given addresses."""

    exit_code: ClassVar[int] = 21


class NoDaemon(SwarmnodeError):
    """No daemon answers on the given control socket."""

    exit_code: ClassVar[int] = 69


class LocalFault(SwarmnodeError):
    """This process is broken (disk, p2pd or memory): it crashes and is restarted."""

    exit_code: ClassVar[int] = 70


class DiskFull(LocalFault):
    """The disk is full, or this user's quota of it: the message says where and how much is needed."""

    exit_code: ClassVar[int] = 74


class RemoteFault(SwarmnodeError):
    """A peer broke the protocol, died, or sent implausible data."""

    exit_code: ClassVar[int] = 69


class PeerTimeout(RemoteFault):
    """A peer did not answer within the call's timeout."""


class Broken(RemoteFault):
    """The stream to a peer ended before its answer arrived: the peer died, or only the connection did."""


class Refused(RemoteFault):
    """A peer rejected our request as wrong. Repeating it there is useless, and the fault may be ours."""


class Forbidden(Refused):
    """A peer may not take part in the run, or this node may not.

    `evidence` is the owner's signed allow list, serialised, if the refusal is based on it; else empty.
    """

    exit_code: ClassVar[int] = 77

    def __init__(self, message: str, evidence: bytes = b"") -> None:
        super().__init__(message)
        self.evidence = evidence


class Unavailable(SwarmnodeError):
    """The service is temporarily unavailable; nobody is at fault. `retry_after_s` is a hint, 0 if there is none."""

    exit_code: ClassVar[int] = 75

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Busy(Unavailable):
    """All of a peer's slots are taken."""


class MicrobatchLost(Unavailable):
    """A microbatch found no route onward before its deadline."""


class StartAnew(MicrobatchLost):
    """A replica has counted the microbatch in a call whose answer does not fit this one; its feeder can start it anew,
    and nobody else."""


_WORDS: Final = {
    "TimeoutError": "no answer in time",
    "ConnectionRefusedError": "the connection was refused",
    "ConnectionError": "the connection broke off",
    "EOFError": "it ended early",
    "MemoryError": "out of memory",
    "CancelledError": "it was called off",
}
"""Of errors that carry no text, by the name of their class or the nearest base: asyncio's is imported slowly."""

CAUSE_CHARACTERS_MAX = 512  # guess: longer error texts repeat themselves


def cause_of(error: BaseException) -> str:
    """The words of `error`, on one line and never empty: its text, its system's reason, its message where a binding of
    another language keeps it (iroh), the first error of a group, or what its type means."""
    if isinstance(error, BaseExceptionGroup):
        return cause_of(error.exceptions[0])
    if isinstance(inner := getattr(error, "reason", None), BaseException):  # urllib
        return cause_of(inner)
    own = isinstance(error, OSError) and type(error).__module__ in ("builtins", "socket")
    text = (getattr(error, "strerror", None) if own else None) or str(error)
    if not text.strip():
        message = getattr(error, "message", "")
        text = str(message() if callable(message) else message)
    if not text.strip():
        names = [kind.__name__ for kind in type(error).__mro__]
        text = next((_WORDS[name] for name in names if name in _WORDS), names[0])
    return " ".join(text.split())[:CAUSE_CHARACTERS_MAX]


@contextlib.contextmanager
def os_errors(kind: type[SwarmnodeError], what: str, advice: str = "") -> Iterator[None]:
    """Raises `kind` for an OSError in the block: `what` failed, the system's reason, `advice`."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {cause_of(error)}{advice}") from error

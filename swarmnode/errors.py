"""Errors by whose fault they are (charter, point 8). The class decides what is done about one.

| class | whose | what happens |
| --- | --- | --- |
| `ManifestError` | the operator's | stop and say what to change |
| `DataError` | the operator's | stop and say which file, where, what to do |
| `LocalFault` | ours | crash, be restarted |
| `RemoteFault` | the peer's | drop, lower its standing, go on |
| `Unavailable` | nobody's | retry with a bound |
"""

from __future__ import annotations

from typing import ClassVar, Final

EXIT_PREEMPTED: Final = 30
"""The machine was taken away, and nothing was lost by it."""

EXIT_PREEMPTED_INCOMPLETE: Final = 31
"""The machine was taken away before everything was brought home."""


class SwarmnodeError(Exception):
    """Base of every error a user may see; `str(error)` is one line that says what, where and what to do."""

    exit_code: ClassVar[int] = 1


class UsageError(SwarmnodeError):
    """A flag or an argument is wrong."""

    exit_code: ClassVar[int] = 2


class ManifestError(SwarmnodeError):
    """The manifest is malformed, out of range, unsigned, or another run's."""

    exit_code: ClassVar[int] = 78


class ManifestVersionError(ManifestError):
    """The manifest was made by another version of swarmnode."""

    exit_code: ClassVar[int] = 10


class ConfigError(SwarmnodeError):
    """The config file is malformed, or sets what does not exist."""

    exit_code: ClassVar[int] = 78


class DataError(SwarmnodeError):
    """A data source, shard or tokenizer cannot be used."""

    exit_code: ClassVar[int] = 78


class NotPermitted(SwarmnodeError):
    """A file or a peer may not be used by us."""

    exit_code: ClassVar[int] = 77


class VersionMismatch(SwarmnodeError):
    """Something was made by a version of swarmnode that this one does not understand."""

    exit_code: ClassVar[int] = 10


class HardwareFault(SwarmnodeError):
    """This machine cannot take part: too little memory, no disk, a broken device, other rounding."""

    exit_code: ClassVar[int] = 20


class Unreachable(SwarmnodeError):
    """Nobody answers at the addresses given."""

    exit_code: ClassVar[int] = 21


class NoDaemon(SwarmnodeError):
    """No daemon answers on the control socket asked for."""

    exit_code: ClassVar[int] = 69


class LocalFault(SwarmnodeError):
    """This process is broken (its disk, its p2pd, its memory): crash and be restarted."""

    exit_code: ClassVar[int] = 70


class RemoteFault(SwarmnodeError):
    """A peer broke the protocol, died, or sent what cannot be believed."""

    exit_code: ClassVar[int] = 69


class PeerTimeout(RemoteFault):
    """A peer did not answer in the time the call allowed."""


class Broken(RemoteFault):
    """The stream to a peer ended before its answer was here: it died, or only the connection did."""


class Refused(RemoteFault):
    """A peer says that what we sent is wrong: repeating it there is useless, and the fault may be ours."""


class Forbidden(Refused):
    """A peer may not take part in the run, or we may not.

    `evidence` is the owner's signed guest list, serialised, when it is the list that says so."""

    exit_code: ClassVar[int] = 77

    def __init__(self, message: str, evidence: bytes = b"") -> None:
        super().__init__(message)
        self.evidence = evidence


class Unavailable(SwarmnodeError):
    """Nobody's fault: not now. `retry_after_s` is a hint, 0 when there is none."""

    exit_code: ClassVar[int] = 75

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Busy(Unavailable):
    """A peer's places are all taken."""


class MicrobatchLost(Unavailable):
    """No way onward was found for a microbatch before its deadline."""

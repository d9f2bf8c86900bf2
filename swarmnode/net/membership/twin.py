"""Whether a second process runs with this node's key: a home was copied with its key, as machines' images are.

A process sees its own record as others hold it. One that it did not sign is of another process of the same key, which
may be its own former life, killed a moment ago. Only one that goes on signing is a twin. So no old record, whoever
repeats it, makes an honest node stand aside, and a stranger cannot sign one. Of twins the one that began later stands
aside. Pure: times are arguments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from swarmnode.base.remembered import Remembered
from swarmnode.base.wire import record_pb2
from swarmnode.net.membership.record import CLOCK_SKEW_MAX_S

GOING = (record_pb2.NODE_STATE_DRAINING, record_pb2.NODE_STATE_LEFT)  # a home that moves: the old place says goodbye
SIGNED_MAX = 64  # own records that are recognised; older ones have expired


class TwinWatch:
    """The knowledge of one process of others with its key. `began_ms`: of this process, as in its records."""

    def __init__(self, began_ms: int, ttl_s: float) -> None:
        self.began_ms = began_ms
        self._born_s = began_ms / 1000.0
        self._ttl_s = ttl_s
        self._signed = deque[bytes](maxlen=SIGNED_MAX)
        self._first_s = Remembered[int, float]()  # by when a process began: its record was first seen
        self._former = set[int]()  # beginnings that this process said before

    def signs(self, signature: bytes) -> None:
        """This process signed a record."""
        self._signed.append(signature)

    def is_own(self, signed: record_pb2.SignedRecord) -> bool:
        """Whether this process signed the record, which names its key."""
        return signed.signature in self._signed

    def former(self, record: record_pb2.Record) -> bool:
        """Whether the record, which another process signed, is of this node's life before this process."""
        return self._signed_s(record) < self._born_s

    def lives(self, record: record_pb2.Record, now_s: float) -> bool:
        """Whether the process that signed `record` with this key still runs at Unix time `now_s`."""
        began = record.joined_unix_ms
        if began in self._former or record.state in GOING:
            return False
        if began not in self._first_s:
            self._first_s[began] = now_s
        return self._signed_s(record) > self._first_s[began] + CLOCK_SKEW_MAX_S

    def yields(self, record: record_pb2.Record) -> bool:
        """Whether this process stands aside for the one that signed `record`, which runs."""
        return record.joined_unix_ms < self.began_ms

    def begin_again(self, now_s: float, draw: Callable[[], float]) -> None:
        """Tell this process from its exact copy, as of a machine that was copied while it ran: it begins now."""
        self._former.add(self.began_ms)
        self.began_ms = max(self.began_ms + 1, int((now_s + draw()) * 1000))

    def _signed_s(self, record: record_pb2.Record) -> float:
        return record.expires_unix_ms / 1000.0 - max(1, record.stretch) * self._ttl_s

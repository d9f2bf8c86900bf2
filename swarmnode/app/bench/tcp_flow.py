"""The bytes of a TCP connection over a home line, as arithmetic on given times: rate, delay, loss, and TCP's answer.

A lost segment comes a round trip later, and nothing of its connection comes before it. The sender's window follows
CUBIC (RFC 9438), which Linux, Windows and macOS use: a loss shrinks it to 0.7 of itself, whatever the line could carry.
Over a round trip of 100 ms with 1 % loss that is 1.2 Mbit/s a connection; Linux's own was measured to carry 2.3 there.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

SEGMENT = 1448  # bytes of a TCP segment on Ethernet with timestamps
FIRST_WINDOW = 10 * SEGMENT  # RFC 6928
WINDOW_MAX = 4 << 20  # bytes; guess: Linux lets receive buffers grow to 6 MiB
BETA = 0.7  # RFC 9438, section 4.6
C = 0.4  # RFC 9438: segments a second cubed
TICK_S = 1e-4  # least wait for a queue
QUEUE_S = 0.02  # guess: of its own bytes that a connection lets wait in a line, beside those of others


@dataclass(slots=True)
class Line:
    """One direction of a machine's line, which carries `bps` bits a second in the order in which they come."""

    bps: float
    nbytes: int = 0  # carried so far
    free_s: float = 0.0

    def carry(self, now_s: float, nbytes: int) -> float:
        """The time at which the last of `nbytes` that come at `now_s` has left the line."""
        self.free_s = max(self.free_s, now_s) + 8.0 * nbytes / self.bps
        self.nbytes += nbytes
        return self.free_s


@dataclass(slots=True)
class Flow:
    """One direction of a connection: through the sender's line `up`, `delay_s` of wire, and the receiver's `down`. Each
    segment is lost with probability `loss`, drawn from `chance`."""

    up: Line
    down: Line
    delay_s: float
    loss: float
    chance: Random
    window: float = FIRST_WINDOW  # bytes that may be under way
    segments: int = 0
    lost: int = 0
    _slow_start_ends: float = WINDOW_MAX
    _peak: float = 0.0  # the window at the last loss
    _lost_s: float = 0.0
    _reno: float = FIRST_WINDOW  # RFC 9438, section 4.3: no less than Reno would send
    _left_s: float = 0.0  # when the last byte leaves `up`
    _came_s: float = 0.0  # and `down`
    _delivered_s: float = 0.0  # and is with the receiver, in order
    _under_way: deque[tuple[float, int]] = field(default_factory=deque)  # time of the acknowledgement, bytes

    def room(self, now_s: float) -> int:
        """Bytes that may be sent now; 0: not before `next_s`."""
        while self._under_way and self._under_way[0][0] <= now_s:
            at_s, nbytes = self._under_way.popleft()
            self._acknowledged(at_s, nbytes)
        waiting = self._queues_s(now_s) > QUEUE_S
        free = self.window - sum(nbytes for _, nbytes in self._under_way)
        return 0 if waiting or (free < SEGMENT and self._under_way) else max(SEGMENT, int(free))

    def next_s(self, now_s: float) -> float:
        """The time at which to ask for room again, when there was none at `now_s`."""
        queue_s = self._queues_s(now_s) - QUEUE_S
        return now_s + max(queue_s, TICK_S) if queue_s > 0.0 or not self._under_way else self._under_way[0][0]

    def send(self, now_s: float, nbytes: int) -> float:
        """The time at which `nbytes`, sent now, are all with the receiver."""
        count = -(-nbytes // SEGMENT)
        gone = sum(self.chance.random() < self.loss for _ in range(count))
        self.segments += count
        self.lost += gone
        self._left_s = self.up.carry(now_s, nbytes)
        self._came_s = came_s = self.down.carry(self._left_s + self.delay_s, nbytes)
        if gone:
            came_s += self._round_trip_s
            self._on_loss(now_s)
        self._delivered_s = max(self._delivered_s, came_s)
        self._under_way.append((self._delivered_s + self.delay_s, nbytes))
        return self._delivered_s

    def _queues_s(self, now_s: float) -> float:
        """Seconds for which bytes of this connection wait in the fuller of its lines. So connections take turns."""
        return max(self._left_s - now_s, self._came_s - now_s - self.delay_s)

    @property
    def _round_trip_s(self) -> float:
        return 2.0 * self.delay_s

    def _acknowledged(self, at_s: float, nbytes: int) -> None:
        if self.window < self._slow_start_ends:
            self.window += nbytes
        else:
            past_s = at_s - self._lost_s - (self._peak * (1.0 - BETA) / (C * SEGMENT)) ** (1 / 3)
            self._reno += 3.0 * (1.0 - BETA) / (1.0 + BETA) * SEGMENT * nbytes / self.window
            self.window = max(self._reno, self._peak + C * SEGMENT * past_s**3, SEGMENT)
        self.window = min(self.window, WINDOW_MAX)

    def _on_loss(self, now_s: float) -> None:
        if now_s - self._lost_s < self._round_trip_s:
            return  # of the same window
        self._lost_s = now_s
        self._peak = self.window
        self.window = self._reno = self._slow_start_ends = max(BETA * self.window, 2.0 * SEGMENT)

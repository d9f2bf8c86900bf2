"""The microbatches a replica is working on: bounded slots, and each microbatch counts once."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from swarmnode.base.ema import Ema, EmaStart
from swarmnode.base.errors import Busy, LocalFault, StartAnew, SwarmnodeError, Unavailable, cause_of
from swarmnode.base.ids import MicrobatchId, PeerId
from swarmnode.base.metrics import name
from swarmnode.base.ports import Answer, Telemetry
from swarmnode.base.remembered import REMEMBERED_MAX, Remembered

CACHE_BYTES_MAX = 8 << 20  # guess: the last 32 answers at the demo size; a retry comes within seconds
# Guess: sixteen of each caller, 16 bytes each; a retry comes within one microbatch deadline.
COUNTED_MAX = 16 * REMEMBERED_MAX

# A microbatch that our code does not foresee fails alone: else whoever finds one ends all nodes with it. What a device
# raises, RuntimeError and its kin, ends the node, because the device would raise it for the next one as well.
MISTAKES = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError)

Key = tuple[MicrobatchId, int]
"""A microbatch at a position of its itinerary."""


# Bound the microbatches a replica holds at one time, in total and per caller.
#
# Slots are counted per position in the itinerary. A call that waits onward holds its slot and waits only for slots of
# the next position, so swapped routes cannot deadlock.
#
# One caller cannot take all slots while others work with this replica. Callers that have not worked with it yet cannot
# take more than half of them together. Only local observation counts: a caller has worked with this replica once
# WORKED_MIN of its microbatches went through, forward and back.

WORKED_MIN = 4  # guess: microbatches; honest callers reach it within seconds
ACTIVE_S = 60.0  # guess: a caller counts as active so long after its last microbatch
SHARE = 2.0  # guess: one caller's limit over an even share of the slots: callers come in bursts


@dataclass(frozen=True, slots=True)
class Slot:
    """The slot of one microbatch. `fresh`: its caller had not worked with us when it took the slot."""

    position: int
    caller: PeerId
    fresh: bool


class Slots:
    """A replica's slots: `slots` per position."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self.taken: Counter[int] = Counter()  # places taken at each position
        self._taken_by: Counter[tuple[int, PeerId]] = Counter()
        self._fresh: Counter[int] = Counter()  # slots held by callers that have not worked with us
        self._worked = Remembered[PeerId, tuple[int, float]]()  # microbatches, loop time of the last

    def __len__(self) -> int:
        return self.taken.total()

    def refusal(self, position: int, caller: PeerId, now_s: float) -> str | None:
        """Why `caller` gets no slot at `position` now; None if it may take one."""
        if self.taken[position] >= self._slots:
            return self.full(position)
        others = self._others(caller, now_s)
        if not others:
            return None
        most = max(1, min(self._slots - 1, math.ceil(SHARE * self._slots / (1 + others))))
        if (mine := self._taken_by[position, caller]) >= most:
            return f"{mine} slots of position {position} are yours; {others} others call here"
        if not self._known(caller) and self._fresh[position] >= max(1, self._slots // 2):
            return f"{self._fresh[position]} slots of position {position} are held by callers as new as you"
        return None

    def full(self, position: int) -> str:
        """The words for a caller when no slot of `position` is left."""
        return f"all {self._slots} slots of position {position} are taken"

    def take(self, position: int, caller: PeerId) -> Slot:
        """Take a slot, to be given back once."""
        slot = Slot(position, caller, not self._known(caller))
        self.taken[position] += 1
        self._taken_by[position, caller] += 1
        self._fresh[position] += slot.fresh
        return slot

    def give(self, slot: Slot) -> None:
        """Give `slot` back."""
        self.taken[slot.position] -= 1
        self._taken_by[slot.position, slot.caller] -= 1
        self._fresh[slot.position] -= slot.fresh
        if not self._taken_by[slot.position, slot.caller]:
            del self._taken_by[slot.position, slot.caller]

    def record_work(self, caller: PeerId, now_s: float) -> None:
        """Record a completed microbatch of `caller`."""
        self._worked[caller] = (self._worked.get(caller, (0, 0.0))[0] + 1, now_s)

    def _others(self, caller: PeerId, now_s: float) -> int:
        """Number of other callers that have worked with us and did so recently."""
        others = 0
        for peer, (count, last_s) in reversed(self._worked.items()):
            if now_s - last_s > ACTIVE_S:
                break
            others += peer != caller and count >= WORKED_MIN
        return others

    def _known(self, caller: PeerId) -> bool:
        return self._worked.get(caller, (0, 0.0))[0] >= WORKED_MIN


@dataclass(slots=True)
class InFlight:
    """A microbatch in work on this replica. Exactly one of two things happens to its gradient:

    `commit`: the compute thread adds it when it starts the backward. The work then completes even if all callers give
    up, so that a retry gets the answer instead of adding the gradient again. `withdraw`: the event loop drops it when
    all callers have given up. It is never added here, and another replica does it.
    """

    slot: Slot
    task: asyncio.Task[None] | None = None
    begun: bool = False  # the task has had its first turn
    over: bool = False  # all waiters have been answered
    waiters: list[asyncio.Future[Answer]] = field(default_factory=list)
    committed: bool = False
    withdrawn: bool = False
    _decided: threading.Lock = field(default_factory=threading.Lock)

    def commit(self) -> None:
        """Decide to add the gradient. On any thread. Raises Unavailable if all callers gave up: the gradient must not
        be added."""
        with self._decided:
            if self.withdrawn:
                raise Unavailable("the caller of this microbatch has given up")
            self.committed = True

    def revoke(self) -> None:
        """Undo `commit` before anything was added, because the next stage's answer was bad. Raises Unavailable if all
        callers gave up."""
        with self._decided:
            self.committed = False
            self.withdrawn = not self.waiters
        if self.withdrawn:
            raise Unavailable("the caller of this microbatch has given up")

    def withdraw(self) -> bool:
        """Drop the microbatch for good unless it is committed; return whether it was dropped."""
        with self._decided:
            self.withdrawn = not self.committed
            return self.withdrawn

    def tell(self, answer: Answer | SwarmnodeError) -> None:
        """Give all waiters the answer. Each has a future of its own: shielding a shared one needs two more
        callbacks."""
        self.over = True
        for waiter in self.waiters:
            if waiter.done():
                continue
            if isinstance(answer, Answer):
                waiter.set_result(answer)
            else:
                waiter.set_exception(answer)
                waiter.exception()  # mark as retrieved: its task may be cancelled before it looks


class Backlog:
    """At most `slots` microbatches per position. A retry joins the running one or gets its kept answer."""

    def __init__(
        self, tasks: asyncio.TaskGroup, slots: int, telemetry: Telemetry, cache_bytes_max: int = CACHE_BYTES_MAX
    ) -> None:
        self._tasks = tasks
        self.slots = Slots(slots)
        self._telemetry = telemetry
        self._cache_bytes_max = cache_bytes_max
        self._held: dict[Key, InFlight] = {}
        self._answers: OrderedDict[Key, tuple[Answer, int]] = OrderedDict()
        self._answers_nbytes = 0
        self._counted: OrderedDict[Key, None] = OrderedDict()
        self._seconds = Ema(start=EmaStart.FIRST)  # that a microbatch takes here
        self._first_s: float | None = None  # start of the first one
        self._empty = asyncio.Event()
        self._empty.set()
        self.refusing: str | None = None  # the reason for which no new microbatch is taken; None: they are taken
        self.finished = 0  # microbatches answered since start

    def __len__(self) -> int:
        return len(self.slots)

    def __contains__(self, key: Key) -> bool:
        """Whether the microbatch is in work here, or its answer is kept."""
        return key in self._held or key in self._answers

    def refuse(self, reason: str | None) -> None:
        """Take no new microbatch for `reason`; None: take them again."""
        self.refusing = reason

    @property
    def seconds(self) -> float:
        """Smoothed seconds that a microbatch takes here, there and back. Before the first answer nobody knows more than
        that it takes longer than until now: callers who ask again after so long ask ever more rarely."""
        if self._seconds.known or self._first_s is None:
            return self._seconds.value
        return asyncio.get_running_loop().time() - self._first_s

    async def empty(self) -> None:
        """Return when no microbatch is held."""
        await self._empty.wait()

    async def once(self, key: Key, work: Callable[[InFlight], Awaitable[Answer]], caller: PeerId) -> Answer:
        """The answer of `work` for `key`, which runs at most once however often the microbatch arrives.

        Raises Busy if `caller` gets no slot. Raises Unavailable while draining, StartAnew if the microbatch was
        counted earlier and its answer is no longer kept. If all callers give up before `commit`, the work is cancelled.
        """
        if (kept := self._answers.get(key)) is not None:
            self._telemetry.count(name.MICROBATCHES, outcome="duplicate")
            return kept[0]
        held = self._held.get(key)
        if held is not None:
            self._telemetry.count(name.MICROBATCHES, outcome="duplicate")
        elif key in self._counted:
            raise StartAnew("microbatch was counted here already and its answer is no longer kept")
        else:
            held = self._begin(key, work, caller)
        waiter: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        held.waiters.append(waiter)
        try:
            return await waiter
        finally:
            held.waiters.remove(waiter)
            if not held.waiters and not held.over and held.task is not None and held.withdraw():
                self._held.pop(key, None)  # a retry from now on starts anew
                held.task.cancel()
            del waiter  # break the reference cycle: it holds the error, whose traceback holds this frame

    def _begin(self, key: Key, work: Callable[[InFlight], Awaitable[Answer]], caller: PeerId) -> InFlight:
        if self.refusing is not None:
            raise Unavailable(self.refusing)
        now_s = asyncio.get_running_loop().time()
        position = key[1]
        if (why := self.slots.refusal(position, caller, now_s)) is not None:
            self._telemetry.count(name.BUSY)
            raise Busy(why, retry_after_s=self.seconds)
        held = InFlight(self.slots.take(position, caller))
        working = self._work(key, held, work)
        try:
            held.task = self._tasks.create_task(working)
        except RuntimeError:  # the task group is closing while the transport still serves
            working.close()
            self.slots.give(held.slot)
            raise Unavailable("this node is shutting down") from None
        held.task.add_done_callback(lambda task: self._over(key, held))
        if self._first_s is None:
            self._first_s = now_s
        self._held[key] = held
        self._empty.clear()
        return held

    async def _work(self, key: Key, held: InFlight, work: Callable[[InFlight], Awaitable[Answer]]) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        held.begun = True
        try:
            answer = await work(held)
            self._seconds.add(loop.time() - begun)
            self._keep(key, held, answer)
            self.finished += 1
            self.slots.record_work(held.slot.caller, loop.time())
            held.tell(answer)
        except SwarmnodeError as error:
            if held.committed:
                self._count(key)
            held.tell(error)
        except MISTAKES as error:
            if held.committed:
                raise  # the replica may hold a part of the gradient
            held.tell(LocalFault(f"{type(error).__name__}: {cause_of(error)}"))
        except asyncio.CancelledError:
            self._unfinished(held)
            raise
        finally:
            self._let_go(key, held)

    def _over(self, key: Key, held: InFlight) -> None:
        """Clean up after a task has ended. A task cancelled before its first turn has run no line of its own."""
        if not held.begun:
            self._unfinished(held)
            self._let_go(key, held)

    def _unfinished(self, held: InFlight) -> None:
        """Answer waiting callers at once, so that they ask another replica."""
        held.tell(Unavailable("this node has left the stage with the microbatch unfinished"))

    def _let_go(self, key: Key, held: InFlight) -> None:
        if self._held.get(key) is held:
            del self._held[key]
        self.slots.give(held.slot)
        if not self.slots:
            self._empty.set()

    def _keep(self, key: Key, held: InFlight, answer: Answer) -> None:
        if not held.committed:
            return  # validation: repeating it does no harm
        self._count(key)
        nbytes = 256
        for tensor in answer.tensors:
            nbytes += tensor.nbytes
        self._answers[key] = (answer, nbytes)
        self._answers_nbytes += nbytes
        while self._answers_nbytes > self._cache_bytes_max:
            _, (_, dropped) = self._answers.popitem(last=False)
            self._answers_nbytes -= dropped

    def _count(self, key: Key) -> None:
        self._counted[key] = None
        while len(self._counted) > COUNTED_MAX:
            self._counted.popitem(last=False)

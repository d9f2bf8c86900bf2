"""What a replica holds at one time, as far as its places go (places.py), and that it counts no microbatch twice."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from swarmnode.errors import Busy, SwarmnodeError, Unavailable
from swarmnode.ids import MicrobatchId, PeerId
from swarmnode.metrics import name
from swarmnode.pipeline.places import Place, Places
from swarmnode.ports import Answer, Telemetry

CACHE_BYTES_MAX = 8 << 20  # guess: the last 32 answers at the demo size; a repeat comes within seconds
COUNTED_MAX = 65_536  # guess: 16 bytes each; a retry comes within one microbatch deadline
RETRY_FIRST_S = 0.05  # guess: until the first microbatch told how long one takes
WAITED_SHARE = 0.25  # guess: a refused caller asks again after so much of the time the first one has taken so far

Key = tuple[MicrobatchId, int]
"""A microbatch at a position of its itinerary."""


@dataclass(slots=True)
class Held:
    """One microbatch in work here. Its gradient is either added (`commit`, by the compute thread as it begins with it),
    and then the work is completed even when nobody waits for it any more, so that a repeat finds the answer instead of
    adding the gradient again; or it was withdrawn, by the event loop when its callers had given up, and is never added:
    another replica does it. Until the compute thread comes to it both may happen."""

    place: Place
    task: asyncio.Task[None] | None = None
    begun: bool = False  # the task has had its first turn
    over: bool = False  # all who wait have been told
    waiters: list[asyncio.Future[Answer]] = field(default_factory=list)
    committed: bool = False
    withdrawn: bool = False
    _decided: threading.Lock = field(default_factory=threading.Lock)

    def commit(self) -> None:
        """On any thread. Raises Unavailable when nobody waits any more: the gradient must not be added."""
        with self._decided:
            if self.withdrawn:
                raise Unavailable("who asked for this microbatch has given up")
            self.committed = True

    def revoke(self) -> None:
        """Nothing was added: what came back from onward was bad. Raises Unavailable when nobody waits any more."""
        with self._decided:
            self.committed, self.withdrawn = False, not self.waiters
        if self.withdrawn:
            raise Unavailable("who asked for this microbatch has given up")

    def withdraw(self) -> bool:
        """Whether it can still be dropped; if so it is, for good."""
        with self._decided:
            self.withdrawn = not self.committed
            return self.withdrawn

    def tell(self, answer: Answer | SwarmnodeError) -> None:
        """To all who wait; a cancelled one waits no longer. A future of each caller's own: to shield one that all share
        takes two callbacks more."""
        self.over = True
        for waiter in self.waiters:
            if waiter.done():
                continue
            if isinstance(answer, Answer):
                waiter.set_result(answer)
            else:
                waiter.set_exception(answer)
                waiter.exception()  # seen: its task may be cancelled before it looks


class Backlog:
    """At most `places` microbatches per position; repeats join the one in work or get its answer again."""

    def __init__(
        self, tasks: asyncio.TaskGroup, places: int, telemetry: Telemetry, cache_bytes_max: int = CACHE_BYTES_MAX
    ) -> None:
        self._tasks = tasks
        self.places = Places(places)
        self._telemetry = telemetry
        self._cache_bytes_max = cache_bytes_max
        self._held: dict[Key, Held] = {}
        self._answers: OrderedDict[Key, tuple[Answer, int]] = OrderedDict()
        self._answers_nbytes = 0
        self._counted: OrderedDict[Key, None] = OrderedDict()
        self._seconds = RETRY_FIRST_S
        self._unknown = True  # no microbatch has come back yet
        self._first_s: float | None = None  # when the first was begun, until one has come back
        self._empty = asyncio.Event()
        self._empty.set()
        self.refusing: str | None = None  # why no new microbatch is taken (draining)
        self.finished = 0  # microbatches answered, ever

    def __len__(self) -> int:
        return len(self.places)

    @property
    def seconds(self) -> float:
        """What a microbatch takes here, there and back, smoothed."""
        return self._seconds

    async def empty(self) -> None:
        """Returns when nothing is held."""
        await self._empty.wait()

    async def once(self, key: Key, work: Callable[[Held], Awaitable[Answer]], caller: PeerId) -> Answer:
        """The answer of `work` for `key`, run at most once however often the microbatch arrives.

        Raises Busy when `caller` gets no place, Unavailable when draining or when the microbatch was counted
        long ago and its answer is no longer kept. If every caller gives up before `commit`, the work is cancelled.
        """
        if (kept := self._answers.get(key)) is not None:
            self._telemetry.count(name.MICROBATCHES, outcome="duplicate")
            return kept[0]
        held = self._held.get(key)
        if held is not None:
            self._telemetry.count(name.MICROBATCHES, outcome="duplicate")
        elif key in self._counted:
            raise Unavailable("microbatch was counted here already and its answer is no longer kept")
        else:
            held = self._begin(key, work, caller)
        waiter: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        held.waiters.append(waiter)
        try:
            return await waiter
        finally:
            held.waiters.remove(waiter)
            if not held.waiters and not held.over and held.task is not None and held.withdraw():
                self._held.pop(key, None)  # a repeat that comes now begins anew
                held.task.cancel()
            del waiter  # it knows the error, and its traceback this frame

    def _begin(self, key: Key, work: Callable[[Held], Awaitable[Answer]], caller: PeerId) -> Held:
        if self.refusing is not None:
            raise Unavailable(self.refusing)
        now_s, position = asyncio.get_running_loop().time(), key[1]
        if (why := self.places.refusal(position, caller, now_s)) is not None:
            self._telemetry.count(name.BUSY)
            # Until one has come back nobody knows how long it takes, but that it takes longer than until now.
            waited_s = now_s - self._first_s if self._first_s is not None else 0.0
            raise Busy(why, retry_after_s=self._seconds + WAITED_SHARE * waited_s)
        held = Held(self.places.take(position, caller))
        working = self._work(key, held, work)
        try:
            held.task = self._tasks.create_task(working)
        except RuntimeError:  # all that goes on here is being ended, and the transport still serves
            working.close()
            self.places.give(held.place)
            raise Unavailable("this node is ending") from None
        held.task.add_done_callback(lambda task: self._over(key, held))
        if self._unknown and self._first_s is None:
            self._first_s = now_s
        self._held[key] = held
        self._empty.clear()
        return held

    async def _work(self, key: Key, held: Held, work: Callable[[Held], Awaitable[Answer]]) -> None:
        loop = asyncio.get_running_loop()
        begun, held.begun = loop.time(), True
        try:
            answer = await work(held)
            if self._unknown:
                self._unknown, self._first_s, self._seconds = False, None, loop.time() - begun
            self._seconds += 0.1 * (loop.time() - begun - self._seconds)
            self._keep(key, held, answer)
            self.finished += 1
            self.places.worked(held.place.caller, loop.time())
            held.tell(answer)
        except SwarmnodeError as error:
            if held.committed:
                self._count(key)
            held.tell(error)
        except asyncio.CancelledError:
            self._unfinished(held)
            raise
        finally:
            self._let_go(key, held)

    def _over(self, key: Key, held: Held) -> None:
        """Its task has ended. Of one that was cancelled before its first turn not a line has run."""
        if not held.begun:
            self._unfinished(held)
            self._let_go(key, held)

    def _unfinished(self, held: Held) -> None:
        """Who waits is told at once, and asks another replica: a node that moves ends what it could not finish."""
        held.tell(Unavailable("this node has left the stage with the microbatch unfinished"))

    def _let_go(self, key: Key, held: Held) -> None:
        if self._held.get(key) is held:
            del self._held[key]
        self.places.give(held.place)
        if not self.places:
            self._empty.set()

    def _keep(self, key: Key, held: Held, answer: Answer) -> None:
        if not held.committed:
            return  # validation: repeating it does no harm
        self._count(key)
        nbytes = sum(tensor.nbytes for tensor in answer.tensors) + 256
        self._answers[key] = (answer, nbytes)
        self._answers_nbytes += nbytes
        while self._answers_nbytes > self._cache_bytes_max:
            _, (_, dropped) = self._answers.popitem(last=False)
            self._answers_nbytes -= dropped

    def _count(self, key: Key) -> None:
        self._counted[key] = None
        while len(self._counted) > COUNTED_MAX:
            self._counted.popitem(last=False)

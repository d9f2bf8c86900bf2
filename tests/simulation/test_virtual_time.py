"""Virtual time: it jumps, it repeats, it admits nothing from outside."""

import asyncio
import subprocess
from collections.abc import Iterator

import pytest

from swarmsim import event_queue, virtual_time
from swarmsim.virtual_time import Deadlock, SandboxViolation, Standstill, VirtualLoop, owned, run


@pytest.fixture(params=["c", "python"], autouse=True)
def language(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each test with agenda.c and with what it stands for."""
    if request.param == "c":
        if not event_queue.build():
            pytest.skip("no compiler, or no Python.h, here")
        assert event_queue.best() is not event_queue.EventQueue
        yield "c"
    else:
        with event_queue.unused():
            yield "python"


async def rivals(log: list[object]) -> None:
    """Timers of equal deadlines, a task group that falls, a timeout, a wait over a set."""

    async def rival(number: int) -> None:
        try:
            while True:
                await asyncio.sleep(1)
                log.append(number)
                if number == 3 and len(log) > 40:
                    raise ValueError
        except asyncio.CancelledError:
            log.append(-number)
            raise

    try:
        async with asyncio.TaskGroup() as tasks:
            for number in range(1, 12):
                tasks.create_task(rival(number))
    except* ValueError:
        pass
    try:
        async with asyncio.timeout(5):
            await asyncio.Event().wait()
    except TimeoutError:
        log.append("timeout")
    loop = asyncio.get_running_loop()
    done, pending = await asyncio.wait({loop.create_task(asyncio.sleep(n, n)) for n in range(9)}, timeout=4.5)
    log += [task.result() for task in done] + [len(pending), loop.time()]


def told(seed: int) -> list[object]:
    log: list[object] = []
    run(rivals(log), seed)
    return log


def test_time_jumps_and_the_seed_decides_who_is_first() -> None:
    assert told(1) == told(1)
    assert told(1) != told(2)
    assert {told(1)[-1], told(2)[-1]} <= {13.5, 14.5}, "4 or 5 s of rivals, 5 s of timeout, 4.5 s of waiting"


def test_a_deadlock_says_who_waits_for_what() -> None:
    async def stuck() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        task = asyncio.get_running_loop().create_task(stuck(), context=owned("n7"))
        await task

    with pytest.raises(Deadlock, match=r"main: .*test_virtual_time.py:\d+ .*main(.|\n)*n7: locks.py:\d+ Event.wait"):
        run(main())


def test_time_that_stands_still_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_time, "STANDSTILL_CALLBACKS", 1000)

    async def main() -> None:
        while True:
            await asyncio.sleep(0)

    async def again() -> None:
        loop = asyncio.get_running_loop()

        def spin() -> None:
            loop.call_later(0.0, spin)

        spin()
        await asyncio.sleep(1)

    for spinning in (main, again):
        with pytest.raises(Standstill):
            run(spinning())


def test_nothing_from_outside() -> None:
    import socket
    import threading

    def reaches(work: object) -> None:
        async def main() -> None:
            assert callable(work)
            work()

        with pytest.raises(SandboxViolation):
            run(main())

    reaches(lambda: threading.Thread(target=print).start())
    reaches(socket.socket)
    reaches(lambda: subprocess.Popen(["true"]))
    reaches(lambda: asyncio.get_running_loop().run_in_executor(None, print))

    thread = threading.Thread(target=print, args=("",))
    thread.start()  # allowed again outside
    thread.join()


def test_a_wakeup_from_another_thread_is_refused() -> None:
    loop = VirtualLoop()
    with pytest.raises(SandboxViolation):
        loop.call_soon_threadsafe(print)


def test_a_frozen_process_sleeps_through_and_wakes_late() -> None:
    async def main() -> list[tuple[float, str]]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        log: list[tuple[float, str]] = []

        async def ticking(name: str) -> None:
            while loop.time() < 10:
                await asyncio.sleep(1)
                log.append((loop.time(), name))

        for name in ("a", "b"):
            loop.create_task(ticking(name), context=owned(name))  # noqa: RUF006
        await asyncio.sleep(2.5)
        loop.freeze("a")
        await asyncio.sleep(4)
        loop.thaw("a")
        await asyncio.sleep(5)
        return log

    log = run(main())
    assert [at for at, name in log if name == "b"] == list(range(1, 11))
    assert [at for at, name in log if name == "a"] == [1, 2, 6.5, 7.5, 8.5, 9.5, 10.5]


def test_exceptions_nobody_took_are_told() -> None:
    async def main() -> None:
        def bad() -> None:
            raise KeyError("lost")

        asyncio.get_running_loop().call_soon(bad)
        await asyncio.sleep(1)

    with pytest.raises(RuntimeError, match="lost"):
        run(main())

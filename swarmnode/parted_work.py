"""Work for the device that comes in parts, some of which need no device and run beside its other work.

A part that needs none is yielded, as a function without arguments. It runs in another thread, while the device goes on
with microbatches and nothing else. The generator then continues on the device's thread with the function's value.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

Parts = Generator[Callable[[], Any], Any, T]
"""The parts of a piece of work whose value is T."""


def run_whole(parts: Parts[T]) -> T:
    """The value of `parts`, all done here, one after the other."""
    found, error = None, None
    try:
        while True:
            beside = parts.send(found) if error is None else parts.throw(error)
            found, error = outcome(beside)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def outcome(beside: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """(the value of `beside`, None), or (None, its error)."""
    try:
        return beside(), None
    except BaseException as error:  # noqa: BLE001  handed to the generator
        return None, error


def timed(parts: Parts[T], time_s: Callable[[], float]) -> Parts[tuple[T, float]]:
    """The parts of the same work, whose value is (that of `parts`, the seconds it took on the device's thread)."""
    took_s, found, error = 0.0, None, None
    while True:
        begun_s = time_s()
        try:
            beside = parts.send(found) if error is None else parts.throw(error)
        except StopIteration as end:
            return end.value, took_s + time_s() - begun_s
        took_s += time_s() - begun_s
        found, error = yield partial(outcome, beside)

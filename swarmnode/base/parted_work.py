"""Work for the device that comes in parts, some of which need no device and run beside its other work.

A part that needs none is yielded, as a function without arguments. It runs in another thread, while the device goes on
with microbatches and nothing else. The generator then continues on the device's thread with the function's value.

A piece of work whose value is needed before the piece is over returns `GivenEarly`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")

Parts = Generator[Callable[[], Any], Any, T]
"""The parts of a piece of work whose value is T."""

Outcome = tuple[Any, BaseException | None]
"""The value of a part, or its error; (None, None) before the first."""


@dataclass(frozen=True, slots=True)
class GivenEarly(Generic[T]):
    """The `value` of a piece of work, given to its caller at once. `rest` follows in the same turn, so that nothing
    comes between; it must not raise. `then` is called with its value on the event loop."""

    value: T
    rest: Callable[[], Any]
    then: Callable[[Any], None]


def run_whole(parts: Parts[T]) -> T:
    """The value of `parts`, all done here, one after the other."""
    before: Outcome = (None, None)
    try:
        while True:
            before = outcome(following(parts, before))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def following(parts: Parts[Any], before: Outcome) -> Callable[[], Any]:
    """The next part beside the device, after the one whose outcome was `before`. Raises StopIteration with the value,
    and what the work raises."""
    value, error = before
    return parts.send(value) if error is None else parts.throw(error)


def outcome(beside: Callable[[], Any]) -> Outcome:
    """(the value of `beside`, None), or (None, its error)."""
    try:
        return beside(), None
    except BaseException as error:  # noqa: BLE001  handed to the generator
        return None, error


def timed(parts: Parts[T], time_s: Callable[[], float]) -> Parts[tuple[T, float]]:
    """The parts of the same work, whose value is (that of `parts`, the seconds it took on the device's thread)."""
    took_s = 0.0
    before = (None, None)
    while True:
        begun_s = time_s()
        try:
            beside = following(parts, before)
        except StopIteration as end:
            return end.value, took_s + time_s() - begun_s
        took_s += time_s() - begun_s
        before = yield partial(outcome, beside)

"""The way of a microbatch stays short: whoever reads it, and each core that trains, goes all of it."""

from tests.support.calls import calls_of_a_microbatch

MODULES_MAX = 46
CALLS_MAX = 270
"""At a node, in a run whose answers are checked. With slack for a new feature: `python -m tests.support.calls` shows
where they are."""


async def test_a_microbatch_takes_few_calls_of_few_modules() -> None:
    calls = await calls_of_a_microbatch(128)
    assert len(calls.modules) <= MODULES_MAX, calls.table()
    assert calls.total <= CALLS_MAX, calls.table()

"""Seconds' worth of fuzzing: damaged valid inputs, and what Hypothesis thinks of. `python -m tests.fuzz` does more."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarmnode.ids import seeded
from tests.fuzz.mutate import inputs
from tests.fuzz.targets import targets

NAMES = (
    *(
        "frame",
        "record",
        "record inside",
        "pass",
        "access_list",
        "access list inside",
        "invite",
        "manifest",
        "signed manifest",
    ),
    *("manifest inside", "packet", "control", "receipt", "report"),
)
COUNT = {"manifest": 300, "manifest inside": 300, "packet": 300, "report": 400}  # slower ones


def test_every_target_is_tested() -> None:
    assert set(NAMES) == set(targets())


@pytest.mark.parametrize("name", NAMES)
def test_damaged_input_is_refused_quietly(name: str) -> None:
    target = targets()[name]
    for raw in inputs(target.seeds, COUNT.get(name, 1500), seeded("fuzz", name), target.tokens):
        target.take(raw)


@pytest.mark.parametrize("name", NAMES)
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(raw=st.binary(max_size=300))
def test_any_bytes_are_refused_quietly(name: str, raw: bytes) -> None:
    targets()[name].take(raw)


@pytest.mark.parametrize("name", ["invite", "manifest"])
@given(text=st.text(max_size=200))
def test_any_text_is_refused_quietly(name: str, text: str) -> None:
    targets()[name].take(text.encode("utf-8", "replace"))

"""`config show` of a running node: what it was started with, what was changed since, and where each is from."""

from swarmnode.app.daemon.current_settings import manifest_now, settings_now
from swarmnode.run.admission.amendment import Amendments
from swarmnode.run.manifest import Manifest
from swarmnode.train.node.limits import Limits, SensorReading, change
from swarmnode.train.node.pause import PauseControl, StageSlot
from swarmnode.train.node.regulator import Regulator
from tests.membership.test_amendment import BASE, OWNER, RATE, RUN, chain
from tests.node.test_pause import FakePresence
from tests.support.fake_telemetry import Quiet

STARTED = (("name", "attic", "flag"), ("max-up", "40Mbit", "environment"), ("on-ac-only", "True", "file"))


async def bare(limits: Limits) -> SensorReading:
    """A machine that tells nothing but the time."""
    return SensorReading(1_700_000_000.0, 0)


async def test_limits_that_were_changed_are_shown_as_they_are_now() -> None:
    presence = FakePresence()
    quiet = Quiet()
    control = PauseControl(presence, StageSlot(), quiet)  # type: ignore[arg-type]
    start = change(Limits(), {"max-up": "40Mbit", "on-ac-only": "yes"})
    regulator = Regulator(start, bare, control, presence, quiet)  # type: ignore[arg-type]
    assert settings_now(STARTED, None) == settings_now(STARTED, regulator) == list(STARTED)
    regulator.change({"max-up": "30Mbit", "on-ac-only": "none", "when-idle": "5m"})
    assert settings_now(STARTED, regulator) == [
        ("name", "attic", "flag"),
        ("max-up", "30Mbit", "swarmnode limit"),
        ("on-ac-only", "-", "swarmnode limit"),
        ("when-idle", "5m", "swarmnode limit"),
    ]
    await regulator.look()
    assert "nothing here tells when" in regulator.verdict.reason


def test_fields_that_were_amended_are_shown_as_they_are_in_force() -> None:
    made = chain()
    made.sign(OWNER, 200, RATE)
    first = made.chain[0]
    [name] = first.values
    before, after = (
        {field: (value, origin) for field, value, origin in manifest_now(BASE, made, done)}
        for done in (first.from_round - 1, first.from_round)
    )
    assert before[name][1] == "manifest"
    assert after[name] == (str(first.values[name]), "amendment")
    assert {field for field in before if before[field] != after[field]} == set(first.values)
    assert manifest_now(BASE, made, None) == manifest_now(BASE, None, None)


def test_a_run_without_amendments_shows_its_manifest() -> None:
    rows = manifest_now(Manifest(), Amendments(Manifest(), RUN, b"k" * 32), 5)
    assert {origin for _, _, origin in rows} == {"manifest"}

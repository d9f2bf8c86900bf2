"""The speed of a device by size of microbatch, before it works."""

from __future__ import annotations

import pytest

from swarmnode.node.membership_handlers import probing
from swarmnode.pipeline.microbatch_size import SampleRates
from swarmnode.ports import Priority
from tests.support.fake_telemetry import Quiet
from tests.support.tiny_model import manifest


class QuickDevice:
    """A device that needs far less than a millisecond, which is as fine as the loop's clock may be."""

    waiting = 0

    def __init__(self) -> None:
        self.worked_s = 0.0

    async def run(self, priority: Priority, samples: int, work: object) -> None:
        self.worked_s += 2e-5 + 1e-5 * samples


async def test_a_quick_device_is_measured_by_its_own_clock() -> None:
    run = manifest(stages=3)
    known = list[SampleRates]()
    await probing(None, run, 1, lambda *arguments: None, QuickDevice(), Quiet(), known.append)  # type: ignore[arg-type]
    rates = known[0]
    largest = max(rates.measured)
    assert largest == run.inner.microbatch > 1
    for samples, rate in rates.measured.items():
        assert rate == pytest.approx(samples / (3.0 * (2e-5 + 1e-5 * samples)))

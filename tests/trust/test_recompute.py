"""Evidence of answers that a replica keeps: as many as can be on their way, not a number of its own."""

from dataclasses import replace
from typing import Any, cast

import pytest

from swarmnode.base.errors import Unavailable
from swarmnode.base.ids import PeerId
from swarmnode.base.ports import Call, WireTensor
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.run.manifest.recipe import PRESETS
from swarmnode.trust.recompute import KEPT_TIMES, RecomputeService
from swarmnode.trust.statement import HopEvidence
from tests.support.fake_telemetry import Quiet

UNUSED = cast(Any, None)
CALLER = PeerId("12D3KooWCaller")


@pytest.mark.parametrize("in_flight_max", [8, 64])
async def test_answers_on_their_way_are_kept(in_flight_max: int) -> None:
    """On a slow line a caller asks after many other answers were made: an honest replica was left out for it."""
    run = replace(PRESETS["tiny"], limits=replace(PRESETS["tiny"].limits, in_flight_max=in_flight_max))
    service = RecomputeService(run, 1, UNUSED, UNUSED, b"", Quiet())
    small = WireTensor("f32", (2,), bytes(8))
    most = KEPT_TIMES * in_flight_max
    names = [number.to_bytes(16, "big") for number in range(most + 1)]
    for name in names:
        service.keep(name, 2, HopEvidence(small, small, wire.Statement()))

    def asked(name: bytes) -> Call:
        return Call(wire.Request(opening=wire.Opening(microbatch_id=name, position=2)))

    with pytest.raises(Unavailable, match="no longer kept"):
        await service.serve_opening(CALLER, asked(names[0]))
    for name in names[1:]:
        assert (await service.serve_opening(CALLER, asked(name))).tensors == (small, small)

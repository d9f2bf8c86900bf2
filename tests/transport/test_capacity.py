"""Measuring a link: the arithmetic, what the other side grants, and two real transports."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.base.errors import Busy, RemoteFault
from swarmnode.base.identity import Identity
from swarmnode.base.ports import Call, WireTensor
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.net.transport.capacity import (
    ALL_BURST_BYTES,
    MEASURE_BURST_BYTES,
    SIZES,
    CapacityResponder,
    TimedTransfer,
    rate_bps,
)

pytestmark = pytest.mark.node  # some seconds

PEERS = [Identity.of_seed(bytes([n]) * 32).peer_id for n in range(64)]


@given(st.floats(1e5, 1e9), st.floats(0.0001, 0.3))
def test_a_steady_link_is_found_whatever_its_length(bps: float, round_trip_s: float) -> None:
    transfers = [TimedTransfer(nbytes, round_trip_s + 8 * nbytes / bps) for nbytes in SIZES]
    found = rate_bps(transfers)
    assert found <= bps * 1.0001
    if 8 * SIZES[-1] / bps >= round_trip_s:
        assert found >= bps * 0.999


@given(st.lists(st.builds(TimedTransfer, st.sampled_from(SIZES), st.floats(0.0, 10.0)), max_size=8))
def test_any_timings_give_a_rate_that_is_a_number(transfers: list[TimedTransfer]) -> None:
    assert 0.0 <= rate_bps(transfers) <= 8.0 * SIZES[-1] / 1e-6


def asked(reply_nbytes: int, sent: int = 0) -> Call:
    return Call(
        wire.Request(measure=wire.Measure(reply_nbytes=reply_nbytes)), (WireTensor("u8", (sent,), bytes(sent)),)
    )


async def test_measurements_are_bounded_each_and_together() -> None:
    counterpart = CapacityResponder()
    with pytest.raises(RemoteFault, match="at most"):
        await counterpart.answer(PEERS[0], asked(SIZES[-1] + 1))
    got = dict.fromkeys(PEERS, 0)
    for peer in PEERS:
        for _ in range(2 * MEASURE_BURST_BYTES // SIZES[-1]):
            try:
                answer = await counterpart.answer(peer, asked(SIZES[-1]))
            except Busy:
                break
            got[peer] += sum(tensor.nbytes for tensor in answer.tensors)
    assert got[PEERS[0]] == MEASURE_BURST_BYTES
    # The buckets fill again while this runs: some of a megabyte.
    assert ALL_BURST_BYTES <= sum(got.values()) <= 2 * ALL_BURST_BYTES
    with pytest.raises(Busy):  # what is sent to it counts as well
        await counterpart.answer(PEERS[0], asked(0, SIZES[-1]))

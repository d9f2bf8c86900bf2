"""An outer step beside the device of the fast weights: what training changed there meanwhile is kept."""

import math

import pytest
import torch

from swarmnode.base.ports import Packet
from swarmnode.model import state_stream
from swarmnode.model.architecture import Shapes
from swarmnode.model.moments import PART
from swarmnode.model.state_stream import spans_of
from swarmnode.model.tensor import decode
from swarmnode.train.gossip.compression import codec
from swarmnode_methods import noloco
from swarmnode_methods.noloco import Average, NoLoCo
from tests.support.fake_device import elsewhere

PARAMETERS = 64 * 40 + 17


def weights(seed: int) -> torch.Tensor:
    return torch.randn(PARAMETERS, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noloco, "BLOCK_REMOTE", 512)


@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_a_step_in_two_halves_is_the_whole_step(alpha: float, fragments: int, monkeypatch: pytest.MonkeyPatch) -> None:
    theta = weights(1)
    learned = 0.01 * weights(2)

    def method(flat: torch.Tensor) -> NoLoCo:
        if alpha:
            return NoLoCo(flat, codec("fp32"), alpha, 0.7, 0.7, fragments)
        return Average(flat, codec("fp32"), fragments)

    here = method(theta.clone())
    partner = method(weights(3))
    with elsewhere(monkeypatch) as device:
        there = method(theta.to(device))
        assert there.remote and there.splits and there.phi.device.type == "cpu"
        for round_index in range(1, 4):
            packet = Packet(1.0, 8, partner.message(round_index), sender="b")
            for ours, theirs in zip(here.message(round_index), there.message(round_index), strict=True):
                torch.testing.assert_close(decode(theirs), decode(ours))
            here.theta += learned
            there.theta += learned.to(device)
            wanted = here.apply(round_index, 1.0, [packet], lone=False)
            there.prepare([packet])
            report = there.apply_slow(round_index, 1.0, [packet], lone=False)
            assert report.delta_norm == pytest.approx(wanted.delta_norm)
            assert there.stepping, "the other half must follow"
            there.theta += learned.to(device)  # an inner step between the halves
            there.follow()
            here.theta += learned
            assert not there.stepping
            torch.testing.assert_close(there.phi, here.phi)
            torch.testing.assert_close(there.theta.cpu(), here.theta)
            torch.testing.assert_close(there.momentum, here.momentum)
            partner.round = None


def test_a_round_without_a_believed_packet_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with elsewhere(monkeypatch) as device:
        there = Average(weights(1).to(device), codec("fp32"))
        there.message(1)
        there.theta += 1.0
        nothing = Packet(0.0, 0, there.message(1), sender="b")
        there.prepare([nothing])
        assert not there.apply_slow(1, 1.0, [nothing], lone=False).believed
        there.follow()
        torch.testing.assert_close(there.theta.cpu(), weights(1) + 1.0)
        assert there.apply(1, 1.0, [], lone=True).members == 1
        torch.testing.assert_close(there.theta.cpu(), weights(1) + 1.0)


def test_another_fragment_is_read_before_the_device_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A final delta has all fragments: those that the round is not about are read in `prepare`, not while weights are
    swapped for a validation."""
    with elsewhere(monkeypatch) as device:
        there = Average(weights(1).to(device), codec("fp32"), 3)
        leaver = Average(weights(2), codec("fp32"), 3)
        packet = Packet(1.0, 8, leaver.final_delta(1), final_delta=True)
        there.message(1)
        there.prepare([packet])
        before = there.theta.clone()
        there.theta.fill_(100.0)
        there.apply_slow(1, 1.0, [packet])
        there.theta.copy_(before)
        there.follow()
        torch.testing.assert_close(there.theta.cpu(), (weights(1) + weights(2)) / 2)


def test_no_writer_is_copied_in_two_steps() -> None:
    """A row-wise mixture of two steps would leave the subspace."""
    shapes: Shapes = {"a": (3 * PART,), "layers.0.o_proj": (2, PART + 7), "b": (40 * PART,), "c": (5,)}
    (writer,) = spans_of(shapes, lambda name: "o_proj" in name)
    assert writer == (3 * PART, 5 * PART + 14)
    part = torch.empty(sum(math.prod(shape) for shape in shapes.values()), device="meta")
    for many in (1, 4, 16):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(state_stream, "SPANS_AT_ONCE", many)
            groups = list(state_stream._groups(part, [writer]))
        assert [span for some in groups for span in some] == list(state_stream._spans(part))
        assert sum(some[0][0] < writer[1] and writer[0] < some[-1][1] for some in groups) == 1
        assert len(groups) > 2

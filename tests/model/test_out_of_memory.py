"""Memory that runs out costs a microbatch: at a third of the allocations of one, at each of a step, a round, a load."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from swarmnode.app.machine.replica import TorchReplica
from swarmnode.base.errors import Busy, LocalFault
from swarmnode.base.ports import Packet, WireTensor
from swarmnode.model import memory_budget
from swarmnode.model.device import is_out_of_memory, twice
from swarmnode.model.memory_budget import Passes
from swarmnode.model.tensor import decode, encode
from swarmnode.run.manifest import DataSpec
from tests.support.tiny_model import TINY, manifest, token_batch, token_wire

pytestmark = pytest.mark.node  # some seconds

SMALL = replace(TINY, layers=2, context=8)
ROUNDING = 1e-10  # passes over some samples add up in another order


class Scarce(TorchDispatchMode):
    """Memory that runs out at the allocations `at` of a block, counted from 0."""

    def __init__(self, at: range) -> None:
        super().__init__()
        self.count = 0
        self._at = at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if 0 < self._at.stop <= self.count:  # all of `at` was: counting costs more than what is counted
            return func(*args, **(kwargs or {}))
        given = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        out = func(*args, **(kwargs or {}))
        made = [one for one in tree_leaves(out) if isinstance(one, Tensor)]
        if any(one.untyped_storage()._cdata not in given for one in made):
            self.count += 1
            if self.count - 1 in self._at:
                raise torch.OutOfMemoryError("injected")
        return out


def allocations(work: Callable[[], object]) -> int:
    with Scarce(range(0)) as memory:
        work()
    return memory.count


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head in chunks of 13 rows of float64, of which the last is not whole."""
    monkeypatch.setitem(memory_budget.CHUNK_NBYTES, "cpu", 13 * SMALL.vocabulary * 8)


def replicas(documents: str = "joined", **given: Any) -> list[TorchReplica]:
    """Two stages that have a gradient already."""
    run = replace(manifest(SMALL, stages=2, **given), data=DataSpec(documents=documents, end_token=3))
    found = [TorchReplica(run, stage, dtype=torch.float64) for stage in range(2)]
    assert microbatch(found, FIRST) is not None
    return found


FIRST, SECOND, THIRD = (token_wire(token_batch(SMALL, seed=seed)) for seed in (5, 6, 7))


def microbatch(pipeline: list[TorchReplica], tokens: WireTensor) -> list[Any] | None:
    """One microbatch there and back: its loss and gradient; None if a replica was busy."""
    try:
        y, tape = pipeline[0].forward(tokens, keep=True, tokens=tokens)
        assert tape is not None
        result = pipeline[1].loss(y, tokens, 4, train=True)
        assert result.gradient is not None
        pipeline[0].backward(tape, result.gradient, 4)
    except Busy:
        return None
    return [result.loss_sum, decode(result.gradient)]


class Saved:
    """A replica's state, to go back to."""

    NAMES = ("theta", "grad", "exp_avg", "exp_avg_sq")

    def __init__(self, replica: TorchReplica) -> None:
        self.stage = replica.stage
        self.flats = [getattr(replica.stage, name).clone() for name in self.NAMES]

    def restore(self) -> None:
        for name, flat in zip(self.NAMES, self.flats, strict=True):
            getattr(self.stage, name).copy_(flat)
        self.stage.touched()
        self.stage.inner_steps = 0
        self.stage.gradient_norm = 0.0
        self.stage.accumulated = self.stage._weight = 4


@pytest.mark.parametrize("lasting", [1, 10**9], ids=["once", "from-then-on"])
def test_a_microbatch_is_counted_as_a_whole_or_not_at_all(small_chunks: None, lasting: int) -> None:
    """Each gradient is that before the microbatch, that after it, or none at all, and its count of samples fits."""
    pipeline = replicas()
    saved = [Saved(replica) for replica in pipeline]
    wanted = microbatch(pipeline, SECOND)
    assert wanted is not None
    grads = [(torch.zeros_like(one.flats[1]), one.flats[1], one.stage.grad.clone()) for one in saved]
    later = microbatch(pipeline, THIRD)
    total = allocations(lambda: microbatch(pipeline, SECOND))
    assert total > 100 and later is not None
    for k in range(0, total, 3 if lasting == 1 else 11):
        for one, replica in zip(saved, pipeline, strict=True):
            one.restore()
            replica.stage.backprop.budget = None
        before = sum(replica.out_of_memory for replica in pipeline)
        with Scarce(range(k, k + lasting)):
            found = microbatch(pipeline, SECOND)
        assert sum(replica.out_of_memory for replica in pipeline) > before
        for replica, states in zip(pipeline, grads, strict=True):
            torch.testing.assert_close(replica.stage.grad, states[replica.accumulated // 4], rtol=0, atol=ROUNDING)
        if lasting == 1:
            assert found is not None and all(replica.accumulated == 8 for replica in pipeline)
            assert found[0] == pytest.approx(wanted[0], abs=1e-9)
            torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=ROUNDING)
        else:
            assert found is None
        if k % 21 == 0:  # it lives, and computes in smaller passes
            again = microbatch(pipeline, THIRD)
            assert again is not None and again[0] == pytest.approx(later[0], abs=1e-9)
            torch.testing.assert_close(again[1], later[1], rtol=0, atol=ROUNDING)


@pytest.mark.parametrize(
    "given", [{}, {"optimizer": "adamw"}, {"optimizer": "adamw", "boundary": "subspace", "rank": 8}], ids=str
)
def test_a_step_is_taken_as_a_whole(given: dict[str, Any]) -> None:
    pipeline = replicas(**given)
    for replica in pipeline:
        saved = Saved(replica)
        total = allocations(lambda replica=replica: replica.step(100))
        wanted = replica.stage.theta.clone()
        for k in range(total):
            saved.restore()
            with Scarce(range(k, k + 1)):
                report = replica.step(100)
            assert report.step == 1 and not replica.stage.grad.any() and replica.accumulated == 0
            torch.testing.assert_close(replica.stage.theta, wanted, rtol=0, atol=1e-9)
        saved.restore()
        with Scarce(range(10**9)):
            report = replica.step(100)
        assert report.step == 0 and not replica.stage.grad.any() and replica.accumulated == 0
        assert torch.equal(replica.stage.theta, saved.flats[0]) and total >= 1


def test_a_load_is_repeated_and_refused() -> None:
    giver = replicas()[0]
    taker = replicas()[0]
    giver.step(100)
    state = giver.snapshot(packed=True)
    total = allocations(lambda: taker.load(state))
    for k in range(total):
        with Scarce(range(k, k + 1)):
            taker.load(state)
        assert taker.digest() == giver.digest()
        with Scarce(range(k, 10**9)), pytest.raises(Busy, match="out of memory"):
            taker.load(state)
    taker.load(state)
    assert taker.digest() == giver.digest() and total > 4


def test_graphs_in_flight_are_dropped_and_made_again() -> None:
    first = replicas()[0]
    tapes = [first.forward(FIRST, keep=True, tokens=FIRST)[1] for _ in range(2)]
    assert tapes[0] is not None and tapes[1] is not None
    held = tapes[0].nbytes
    gradient = encode(torch.zeros(4, SMALL.context, SMALL.width, dtype=torch.float64))
    with Scarce(range(1)):
        first.backward(tapes[0], gradient, 4)
    assert tapes[1].nbytes < held and first.recomputed == 1
    budget = first.stage.backprop.budget
    assert budget is not None and 0 < budget < first.stage.backprop.memory.pass_nbytes(4, False)


def test_a_graph_waits_for_its_backward_only_if_it_fits_by_layer() -> None:
    first = replicas()[0]
    backprop = first.stage.backprop
    whole, by_layer = (backprop.memory.pass_nbytes(4, each) for each in (False, True))
    held = []
    for budget in (whole, min(whole, by_layer) - 1):
        backprop.limit(budget)
        tape = first.forward(FIRST, keep=True, tokens=FIRST)[1]
        assert tape is not None
        held.append(tape.nbytes)
    assert held[0] > 100 * held[1]  # the input is all that is left


@pytest.mark.parametrize("passes", [Passes(2, False), Passes(1, False), Passes(1, True)], ids=str)
@pytest.mark.parametrize("boundary", ["fp32", "subspace"])
def test_passes_have_the_gradient_of_the_whole(small_chunks: None, passes: Passes, boundary: str) -> None:
    """A microbatch in passes of two samples, of one, and of one by layer."""
    given = {"boundary": boundary, "rank": 8 if boundary == "subspace" else 0, "documents": "masked"}
    whole = replicas(**given)  # type: ignore[arg-type]
    cut = replicas(**given)  # type: ignore[arg-type]
    wanted = microbatch(whole, SECOND)
    for replica in cut:
        backprop = replica.stage.backprop
        backprop.budget = 0 if passes.by_layer else backprop.memory.pass_nbytes(passes.samples, False)
        assert backprop.passes(4) == passes
    found = microbatch(cut, SECOND)
    assert wanted is not None and found is not None
    assert found[0] == pytest.approx(wanted[0], abs=1e-10)
    torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=1e-12)
    for one, other in zip(whole, cut, strict=True):
        torch.testing.assert_close(other.stage.grad, one.stage.grad, rtol=0, atol=1e-12)
    validated = cut[1].loss(*second(cut), 4, train=False).loss_sum
    assert validated == pytest.approx(whole[1].loss(*second(whole), 4, train=False).loss_sum, abs=1e-10)


def second(pipeline: list[TorchReplica]) -> tuple[WireTensor, WireTensor]:
    """What the last stage reads of one microbatch."""
    return pipeline[0].forward(THIRD, keep=False, tokens=THIRD)[0], THIRD


def test_other_errors_than_lack_of_memory_are_raised() -> None:
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(torch.OutOfMemoryError("full"))
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ..."))
    assert not is_out_of_memory(RuntimeError("shape")) and not is_out_of_memory(KeyboardInterrupt())

    def broken() -> None:
        raise RuntimeError("shape")

    with pytest.raises(RuntimeError, match="shape"):
        twice(broken, lambda: None, "here")


def slow_state(replica: TorchReplica) -> list[Tensor]:
    return [flat.clone() for flat in (replica.stage.theta, replica.outer.phi, replica.outer.momentum)]


@pytest.mark.parametrize(
    ("method", "codec"), [("average", "modular4"), ("noloco", "fp32"), ("sparseloco", "topk"), ("edit", "int8")]
)
def test_a_round_is_repeated_and_nothing_counts_twice(method: str, codec: str) -> None:
    """At every allocation of an outer step; if memory is short for good, the node says so and is not half stepped."""
    gossip = replace(manifest(SMALL).gossip, method=method, codec=codec)

    def met() -> tuple[TorchReplica, Packet]:
        run = replace(manifest(SMALL, stages=2), gossip=gossip)
        two = [TorchReplica(run, 0, sender=sender) for sender in ("a", "b")]
        for replica, tokens in zip(two, (FIRST, SECOND), strict=True):
            assert microbatch([replica, TorchReplica(run, 1)], tokens) is not None
            replica.step(100)
        packet = Packet(1.0, 4, two[1].message(0))
        two[0].message(0)
        return two[0], packet

    replica, packet = met()
    total = allocations(lambda: replica.apply(0, 1.0, [packet]))
    wanted = slow_state(replica)
    assert total > 4
    for k in range(total):
        replica, packet = met()
        before = slow_state(replica)
        if k % 3 == 0:
            with Scarce(range(k, 10**9)), pytest.raises(LocalFault, match="memory ran out in a round of stage 1"):
                replica.apply(0, 1.0, [packet])
            assert all(map(torch.equal, slow_state(replica), before))
        with Scarce(range(k, k + 1)):
            report = replica.apply(0, 1.0, [packet])
        assert report.members == 2 and replica.out_of_memory > 0
        assert all(map(torch.equal, slow_state(replica), wanted))


@pytest.mark.parametrize("codec", ["int8", "topk"])
def test_a_packet_is_drafted_again(codec: str) -> None:
    """Also when an earlier boundary was never applied, and what it did not send is taken back."""
    run = replace(manifest(SMALL, stages=2), gossip=replace(manifest(SMALL).gossip, method="edit", codec=codec))

    def ready() -> TorchReplica:
        replica = TorchReplica(run, 0)
        assert microbatch([replica, TorchReplica(run, 1)], FIRST) is not None
        replica.message(0)
        replica.step(100)
        return replica

    wanted = [bytes(tensor.data) for tensor in ready().message(1)]
    for k in range(allocations(lambda replica=ready(): replica.draft(1))):
        replica = ready()
        with Scarce(range(k, k + 1)):
            draft = replica.draft(1)
        assert [bytes(tensor.data) for tensor in draft.finish()] == wanted

"""Training through a few numbers a token is training: a pipeline that sends Z is one that sends nothing."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from swarmnode.app.machine.replica import TorchReplica
from swarmnode.base.errors import RemoteFault
from swarmnode.base.ports import Neighbour, Packet, State
from swarmnode.model.split import TABLE, is_writer
from swarmnode.model.stage import StageReplica, StageTape
from swarmnode.model.subspace import Subspace, basis
from swarmnode.run.manifest import GossipSpec, Manifest
from tests.support.tiny_model import (
    TINY,
    ascend,
    manifest,
    mean_loss,
    plain_model,
    seconds,
    stages_of,
    token_batch,
    token_wire,
    train_on,
)

pytestmark = pytest.mark.node  # some seconds

RANK = 6


def run_of(stages: int, rank: int = RANK, **inner: object) -> Manifest:
    """Clipping depends on the cut into stages: none."""
    whole = {"clip_norm": 1e6, "weight_decay": 0.1, "decay": "constant", "warmup_samples": 0, **inner}
    return manifest(stages=stages, boundary="subspace", rank=rank, **whole)  # type: ignore[arg-type]


def by_name(chain: list[StageReplica], buffer: str) -> dict[str, Tensor]:
    of = seconds if buffer == "exp_avg_sq" else lambda stage: stage.named(getattr(stage, buffer))
    return {name: value for stage in chain for name, value in of(stage).items()}


def outside(subspace: Subspace, named: dict[str, Tensor]) -> float:
    """The largest element of a writer's part outside the span."""
    parts = [weight - subspace.project(weight) for name, weight in named.items() if is_writer(name)]
    return max(float(part.abs().max()) for part in parts)


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_a_pipeline_of_few_numbers_trains_as_one_stage_does(stages: int) -> None:
    """In one stage nothing is sent: the same constraint, uncompressed."""
    chain, whole = (stages_of(run_of(count), torch.float64) for count in (stages, 1))
    for step in range(12):
        losses = [train_on(line, token_batch(seed=step % 3)) for line in (chain, whole)]
        assert abs(losses[0] - losses[1]) < 1e-10 * losses[0], step
        reports = [[stage.step(8 * step) for stage in line] for line in (chain, whole)]
        assert sum(r.gradient_norm**2 for r in reports[0]) == pytest.approx(reports[1][0].gradient_norm ** 2, rel=1e-9)
    for buffer in ("theta", "exp_avg", "exp_avg_sq"):
        found = by_name(chain, buffer)
        wanted = by_name(whole, buffer)
        for name, value in found.items():
            torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-10, msg=f"{buffer} {name}")
    first = train_on(stages_of(run_of(stages), torch.float64), token_batch(seed=2))
    assert losses[0] < 0.9 * first, "and it learns"


def test_it_is_an_ordinary_model() -> None:
    """What is exported needs no U: the loss of the plain model, and its gradient where that is free."""
    chain = stages_of(run_of(3), torch.float64)
    tokens = token_batch()
    net = plain_model(chain, torch.float64)
    loss = mean_loss(net, tokens)
    assert train_on(chain, tokens) == pytest.approx(loss.item() * 4 * TINY.context, abs=1e-9)
    (loss * 4).backward()
    subspace = chain[0].subspace
    assert subspace is not None
    for name, gradient in by_name(chain, "grad").items():
        wanted = net.get_parameter(name).grad
        assert wanted is not None
        if name == TABLE:
            assert not gradient.any()
            continue
        if is_writer(name):
            gradient = subspace.project(gradient)
            wanted = subspace.project(wanted)
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-10, msg=name)


def test_k_numbers_a_token_travel_each_way() -> None:
    chain = stages_of(run_of(3))
    tokens = token_batch()
    x, tapes = ascend(chain, tokens)
    assert (x.dtype, x.shape, x.nbytes) == ("bf16", (4, TINY.context, RANK), 2 * 4 * TINY.context * RANK)
    gradient = chain[2].loss(x, token_wire(tokens), 4, train=True).gradient
    assert gradient is not None and gradient.shape == x.shape and gradient.nbytes == x.nbytes
    back = chain[1].backward(tapes[1], gradient, 4)
    assert back is not None and back.shape == x.shape


def test_a_released_tape_is_recomputed_from_z_and_tokens() -> None:
    chain = stages_of(run_of(3), torch.float64)
    tokens = token_batch()
    x, tapes = ascend(chain, tokens)
    gradient = chain[2].loss(x, token_wire(tokens), 4, train=True).gradient
    assert gradient is not None
    wanted = chain[1].backward(tapes[1], gradient, 4)
    kept = chain[1].grad.clone()
    chain[1].discard()
    _, tapes = ascend(chain, tokens)
    tape = tapes[1]
    assert isinstance(tape, StageTape)
    chain[1].release(tape)
    assert tape.nbytes == 4 * TINY.context * (8 * RANK + 8), "Z in float64 and the ids"
    found = chain[1].backward(tape, gradient, 4)
    assert found == wanted and torch.equal(chain[1].grad, kept) and chain[1].recomputed == 1


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_training_keeps_writers_in_the_span_and_the_table(optimizer: str) -> None:
    run = run_of(3)
    chain = stages_of(replace(run, inner=replace(run.inner, optimizer=optimizer)))
    before = by_name(chain, "theta")[TABLE].clone()
    for step in range(20):
        train_on(chain, token_batch(seed=step))
        for stage in chain:
            stage.step(8 * step)
    theta = by_name(chain, "theta")
    squares = by_name(chain, "exp_avg_sq")
    assert TABLE not in squares
    subspace = chain[0].subspace
    assert subspace is not None and outside(subspace, theta) < 1e-6
    assert torch.equal(theta[TABLE], before) and torch.equal(theta[TABLE], subspace.table)
    shared = {name: square for name, square in squares.items() if is_writer(name)}
    wanted = {name for name in theta if is_writer(name)} if optimizer == "adamw" else set()
    assert shared.keys() == wanted, "Muon keeps none"
    assert all(square.shape == theta[name].shape[1:] and square.all() for name, square in shared.items())


# Written from outside


def pair(codec: str) -> list[TorchReplica]:
    """Two replicas of the first of two stages, apart from each other by an inner step each."""
    run = run_of(2)
    run = Manifest(
        seed=7, model=run.model, pipeline=run.pipeline, inner=run.inner, gossip=GossipSpec(method="noloco", codec=codec)
    )
    made = []
    for seed in range(2):
        first = TorchReplica(run, 0, sender=str(seed))
        last = StageReplica(run, 1)
        train_on([first.stage, last], token_batch(seed=seed))
        first.step(1000)
        made.append(first)
    return made


@pytest.mark.parametrize("codec", ["fp32", "int8", "modular4"])
def test_gossip_keeps_the_span_whatever_codecs_leave(codec: str) -> None:
    one, other = pair(codec)
    subspace = one.stage.subspace
    assert subspace is not None
    for round_index in range(1, 4):
        messages = [replica.message(round_index) for replica in (one, other)]
        one.apply(round_index, 0.5, [Packet(0.5, 8, messages[1])])
        other.apply(round_index, 0.5, [Packet(0.5, 8, messages[0])])
        for replica in (one, other):
            for flat in (replica.stage.theta, replica.outer.phi):
                named = replica.stage.named(flat)
                assert outside(subspace, named) < 1e-6 and torch.equal(named[TABLE], subspace.table)


def test_a_rebuilt_stage_lies_in_the_span() -> None:
    run = run_of(3)
    chain = [TorchReplica(run, stage) for stage in range(3)]
    for method in ("copy", "weighted"):
        given = [Neighbour(at, chain[at].snapshot().sections["phi"], 1.0 + at) for at in (1,)]
        first = TorchReplica(run, 0)
        first.rebuild(method, given, None)
        subspace = first.stage.subspace
        assert subspace is not None
        assert outside(subspace, first.stage.named(first.stage.theta)) < 1e-6
        assert torch.equal(first.stage.named(first.outer.phi)[TABLE], subspace.table)


def test_a_state_of_another_subspace_is_refused() -> None:
    run = run_of(2)
    replica = TorchReplica(run, 0)
    state = replica.snapshot()
    replica.load(state)
    before = replica.digest()
    plain = TorchReplica(manifest(stages=2), 0).snapshot()
    for name in state.sections.keys() - {"theta", "phi"}:
        plain.sections[name] = state.sections[name]
    with pytest.raises(RemoteFault, match="o_proj.weight is not in this run's subspace"):
        replica.load(plain)
    sections = dict(state.sections)
    flat = torch.frombuffer(bytearray(sections["theta"]), dtype=torch.float32)
    flat[: TINY.width] += 1.0
    sections["theta"] = flat.view(torch.uint8).numpy().data
    with pytest.raises(RemoteFault, match="embed_tokens.weight is not in this run's subspace"):
        replica.load(State(sections, 0, 0.0))
    assert replica.digest() == before


# U


@pytest.mark.parametrize("rank", [1, 6, 32])
def test_the_basis_is_orthonormal_and_its_seeds_own(rank: int) -> None:
    found = basis(32, rank, 5)
    assert torch.allclose(found.T @ found, torch.eye(rank, dtype=torch.float64), atol=1e-12)
    assert torch.equal(found, basis(32, rank, 5)) and not torch.equal(found, basis(32, rank, 6))


def test_digests_tell_subspaces_apart_but_not_roundings() -> None:
    found = basis(32, RANK, 5)
    table = torch.randn(50, 32, generator=torch.Generator().manual_seed(1))
    digest = Subspace(found, table).digest
    assert Subspace(found * (1 + 1e-15), table).digest == digest
    assert Subspace(-found, table).digest != digest and Subspace(basis(32, RANK, 6), table).digest != digest
    assert Subspace(found, table.neg()).digest != digest
    made = [replica.subspace for replica in stages_of(run_of(3))]
    assert len({one.digest for one in made if one is not None}) == 1 and None not in made

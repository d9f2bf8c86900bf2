"""A mean that is applied a step late, and weights that look ahead: the same as one process that does so in a loop."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from swarmnode.app.machine.replica import TorchReplica
from swarmnode.base.ports import Data, DraftedPieces
from swarmnode.run.manifest import Manifest
from swarmnode.run.manifest.cross_field import ACROSS
from tests.gossip.test_gradient import BATCH, manifest, train
from tests.gossip.test_gradient_pieces import given

STEPS = 6


def delayed(codec: str = "fp32", fragments: int = 1) -> Manifest:
    run = manifest(codec)
    return replace(run, gossip=replace(run.gossip, butterfly=True, delay=1, fragments=fragments))


def members(run: Manifest, count: int, dtype: torch.dtype = torch.float64) -> list[TorchReplica]:
    return [TorchReplica(run, 0, dtype=dtype, sender=f"member{number}") for number in range(count)]


def train_all(step: int, found: Sequence[TorchReplica]) -> None:
    for number, one in enumerate(found):
        train(one, 10 * step + number, 1 + number % 2)


def apply_all(step: int, drafts: list[DraftedPieces], found: Sequence[TorchReplica]) -> None:
    means: list[Data | None] = []
    for piece in range(len(drafts[0].pieces)):
        means.append(found[(piece + step) % len(found)].mean_piece(step, piece, given(drafts, piece)).data)
    for one in found:
        one.apply_pieces(step, means, [True] * len(means), [])


def in_a_loop(run: Manifest, count: int) -> torch.Tensor:
    """The weights after STEPS steps of one process: W <- W - (2 U[k] - U[k-1]), U[k] the inner optimizer's step by the
    gradient of two steps ago."""
    plain = TorchReplica(replace(run, gossip=replace(run.gossip, method="none", butterfly=False, delay=0)), 0)
    plain = TorchReplica(plain.stage.manifest, 0, dtype=torch.float64)
    stage = plain.stage
    weights = stage.theta.clone()
    slow = stage.theta.clone()
    before = torch.zeros_like(slow)
    waits: tuple[torch.Tensor, int] | None = None
    for step in range(1, STEPS + 2):
        stage.theta.data.copy_(weights)
        for number in range(count):
            train(plain, 10 * step + number, 1 + number % 2)
        now = stage.grad.clone(), stage.accumulated
        if waits is not None:
            stage.grad.copy_(waits[0])
            stage.accumulated = waits[1]
            stage.theta.data.copy_(slow)
            plain.step((step - 1) * BATCH)
            taken = slow - stage.theta.data
            slow -= taken
            weights -= 2.0 * taken - before
            before = taken
        stage.discard()
        waits = now
    return weights


@pytest.mark.parametrize("count", [1, 2, 3])
def test_members_learn_what_a_plain_loop_with_the_delay_learns(count: int) -> None:
    run = delayed()
    found = members(run, count)
    begun = found[0].stage.theta.clone()
    drafts: list[DraftedPieces] = []
    for step in range(1, STEPS + 2):
        train_all(step, found)
        if drafts:
            apply_all(step - 1, drafts, found)
        drafts = [one.draft_pieces(step) for one in found]
    expected = in_a_loop(run, count)
    for one in found:
        assert torch.equal(one.stage.theta, found[0].stage.theta) and one.inner_steps == STEPS
        assert not torch.equal(one.stage.theta, one.outer.phi)
    apart = float((found[0].stage.theta - expected).norm())
    assert apart < 1e-3 * float((expected - begun).norm()), "packets are float32"


@pytest.mark.parametrize(("codec", "fragments"), [("int8", 1), ("lloyd3", 3), ("whitened", 1)])
def test_a_member_with_anothers_slow_weights_and_moments_is_equal_after_a_step(codec: str, fragments: int) -> None:
    """What the fast weights look ahead by is no state of its own."""
    run = delayed(codec, fragments)
    found = members(run, 3, torch.float32)
    newcomer = TorchReplica(run, 0, sender="newcomer")
    drafts: list[DraftedPieces] = []
    for step in range(1, STEPS):
        train_all(step, found)
        if drafts:
            apply_all(step - 1, drafts, found)
        drafts = [one.draft_pieces(step) for one in found]
        if step == STEPS - 2:
            newcomer.load(found[0].snapshot())
            newcomer.stage.theta.data.copy_(newcomer.outer.phi)
            newcomer.draft_pieces(step)
            found.append(newcomer)
            drafts.append(drafts[0])
    assert torch.equal(newcomer.stage.theta, found[0].stage.theta)
    assert newcomer.mark() == found[0].mark() and newcomer.digest() == found[0].digest()


@pytest.mark.parametrize(
    ("table", "changed"),
    [
        ("inner", {"optimizer": "adamw"}),
        ("gossip", {"butterfly": False}),
        ("gossip", {"method": "average", "butterfly": False, "codec": "fp32"}),
    ],
)
def test_a_delay_is_refused_where_it_cannot_be(table: str, changed: dict[str, object]) -> None:
    run = delayed()
    run = replace(run, **{table: replace(getattr(run, table), **changed)})
    broken = [across for across in ACROSS if not across.holds(run)]
    assert any("gossip.delay" in across.names for across in broken)

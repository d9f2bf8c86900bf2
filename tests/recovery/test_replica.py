"""A whole replica: what it is can be copied, sent, loaded, and goes on to the bit; rounds move it as they should."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from swarmnode.app.machine.replica import TorchReplica
from swarmnode.base.errors import RemoteFault
from swarmnode.base.ids import RunId
from swarmnode.base.ports import Neighbour, Packet, State, WireTensor
from swarmnode.keep.transfer.snapshot import WHOLE, Snapshot, newcomer_part
from swarmnode.net.membership.progress import Progress
from swarmnode.run.manifest import GossipSpec, InnerSpec, Manifest, ModelSpec, PipelineSpec
from tests.support.method_tables import CODECS_OF, OWN_ALPHA
from tests.support.sections import SECTIONS

RUN = RunId("12" * 32)
SAMPLES = 2
MANIFEST = Manifest(
    model=ModelSpec(layers=2, width=16, heads=2, kv_heads=1, ffn=24, context=8, vocabulary=32),
    pipeline=PipelineSpec(stages=2),
    inner=InnerSpec(microbatch=SAMPLES, inner_batch=SAMPLES, warmup_samples=2),
    gossip=GossipSpec(method="noloco", codec="fp32"),
)
"""With an outer momentum, so that no section is missing."""


def tokens(seed: int) -> WireTensor:
    drawn = torch.randint(32, (SAMPLES, 9), generator=torch.Generator().manual_seed(seed)).to(torch.uint16)
    return WireTensor("u16", (SAMPLES, 9), bytes(drawn.view(torch.uint8).numpy().data))


def gradient(seed: int) -> WireTensor:
    drawn = torch.randn(SAMPLES, 8, 16, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return WireTensor("bf16", (SAMPLES, 8, 16), bytes(drawn.view(torch.uint8).numpy().data))


def train(replica: TorchReplica, seed: int, steps: int = 1) -> None:
    """Inner steps of a first stage on made-up gradients."""
    for i in range(steps):
        _, tape = replica.forward(tokens(seed + i), keep=True)
        assert tape is not None
        assert replica.backward(tape, gradient(seed + i), SAMPLES) is None
        if not replica.steps_in_rounds:
            assert replica.accumulated == SAMPLES
            replica.step(100 + i)


def a_round(replica: TorchReplica, round_index: int, *others: TorchReplica) -> None:
    replica.message(round_index)
    replica.apply(round_index, 1.0, [Packet(1.0, 0, other.message(round_index)) for other in others])


def lived(seed: int) -> TorchReplica:
    """A replica with a past: every section holds something of its own."""
    replica = TorchReplica(MANIFEST, 0)
    train(replica, seed, 2)
    a_round(replica, 1)
    train(replica, seed + 10)
    return replica


def contents(state: State) -> dict[str, bytes]:
    return {name: bytes(section) for name, section in state.sections.items()}


def test_a_newcomer_takes_what_rounds_move_and_begins_the_rest_itself() -> None:
    """A donor that gave other fast weights or moments beside honest slow weights led newcomers astray for good: the
    default codec is read near one's own weights."""
    original = lived(1)
    copy = lived(2)
    fresh = TorchReplica(MANIFEST, 0)
    given = Snapshot.of(original.snapshot(packed=True), 0, 1, Progress().to_wire())
    part = given.part(newcomer_part(MANIFEST.gossip, given.sizes))
    assert given.part(newcomer_part(MANIFEST.gossip, given.sizes)) is part, "hashed once"
    assert part.nbytes == 6 * original.stage.parameters < 0.6 * given.nbytes
    copy.load(part.state)
    assert copy.digest() == original.digest() and copy.inner_steps == original.inner_steps == 3
    there = contents(copy.snapshot())
    slow = contents(original.snapshot())["phi"]
    assert there["theta"] == there["phi"] == slow
    assert not any(there["exp_avg"]) and not any(there["exp_avg_sq"]) and any(there["momentum"])
    # The first step is that of a fresh optimizer: the moments' bias is corrected by their own age.
    fresh.load(replace(original.snapshot(), sections={**original.snapshot().sections, **copy.snapshot().sections}))
    fresh.stage.begin_anew(raised=False)
    for replica in (copy, fresh):
        train(replica, 30)
    assert torch.equal(copy.stage.theta, fresh.stage.theta) and copy.inner_steps == 4 and fresh.inner_steps == 1


@pytest.mark.parametrize(
    ("gossip", "part"),
    [
        (GossipSpec(method="average"), True),
        (GossipSpec(method="diloco"), True),
        (GossipSpec(method="average", fragments=5), False),
        (GossipSpec(method="streaming", codec="int8"), False),
        (GossipSpec(method="desloc", codec="int8"), False),
        (GossipSpec(method="none"), False),
    ],
    ids=lambda value: getattr(value, "method", ""),
)
def test_a_newcomer_takes_all_weights_where_a_round_replaces_fewer(gossip: GossipSpec, part: bool) -> None:
    sizes = TorchReplica(replace(MANIFEST, gossip=gossip), 0).sizes_of(0)
    assert (newcomer_part(gossip, sizes) != WHOLE) is part


def test_loading_voids_what_belongs_to_other_weights() -> None:
    original = lived(1)
    copy = TorchReplica(MANIFEST, 0)
    _, tape = copy.forward(tokens(3), keep=True)
    assert tape is not None
    copy.backward(tape, gradient(3), SAMPLES)
    _, stale = copy.forward(tokens(4), keep=True)
    copy.message(1)
    copy.load(original.snapshot())
    assert copy.accumulated == 0
    with pytest.raises(AssertionError, match="boundary"):
        copy.apply(1, 1.0, [])
    # A tape made before is recomputed with the weights of now.
    _, fresh = original.forward(tokens(4), keep=True)
    assert stale is not None and fresh is not None
    copy.backward(stale, gradient(4), SAMPLES)
    original.backward(fresh, gradient(4), SAMPLES)
    assert torch.equal(copy.stage.grad, original.stage.grad)


def test_a_replica_keeps_a_mean_of_its_own_weights_alone() -> None:
    share = MANIFEST.inner.average_share
    first = TorchReplica(MANIFEST, 0)
    second = TorchReplica(MANIFEST, 0)
    assert first.average is not None and first.average.value is None
    train(first, 1)
    before = first.stage.theta.clone()
    assert torch.equal(first.average.value, before)  # type: ignore[arg-type]
    _, tape = first.forward(tokens(2), keep=True)
    assert tape is not None
    first.backward(tape, gradient(2), SAMPLES)
    first.step(200)
    expected = torch.lerp(before, first.stage.theta, 1.0 - 0.5 ** (1.0 / share - 1.0))
    torch.testing.assert_close(first.average.value, expected)
    assert first.average.span == 100
    train(second, 5)
    second.load(first.snapshot())
    assert second.average is not None and second.average.value is None, "the mean was of other weights"
    train(second, 6)
    assert torch.equal(second.average.value, second.stage.theta) and second.average.span == 0  # type: ignore[arg-type]
    neighbour = TorchReplica(MANIFEST, 1).snapshot().sections["phi"]
    second.rebuild("copy", [Neighbour(1, neighbour, 1.0)], None)
    assert second.average.value is None
    none = TorchReplica(replace(MANIFEST, inner=replace(MANIFEST.inner, average_share=0.0)), 0)
    train(none, 1)
    assert none.average is None and torch.equal(none.stage.theta, before), "it takes no part in training"


def test_an_outer_step_leaves_tapes_as_they_were() -> None:
    replica = lived(1)
    partner = lived(2)
    before = TorchReplica(MANIFEST, 0)
    before.load(replica.snapshot())
    gradients = []
    for one in (before, replica):
        one.stage.discard()
        _, tape = one.forward(tokens(3), keep=True)
        assert tape is not None
        if one is replica:
            a_round(replica, 2, partner)
            assert not torch.equal(replica.stage.theta, before.stage.theta)
        after = one.stage.theta.clone()
        one.backward(tape, gradient(3), SAMPLES)
        gradients.append(one.stage.grad.clone())
        assert one.recomputed == 0 and torch.equal(one.stage.theta, after)
    assert torch.equal(*gradients)


def section(name: str, change: Callable[[torch.Tensor], object]) -> Callable[[State], None]:
    def spoil(state: State) -> None:
        form = torch.bfloat16 if state.packed and name != "phi" else torch.float32
        flat = torch.frombuffer(bytearray(state.sections[name]), dtype=form)
        change(flat)
        state.sections[name] = flat.view(torch.uint8).numpy().data

    return spoil


def lose(state: State) -> None:
    del state.sections["momentum"]


def add(state: State) -> None:
    state.sections["residual"] = state.sections["momentum"]


def widen(state: State) -> None:
    """As a run with AdamW has it."""
    state.sections["exp_avg_sq"] = memoryview(bytes(state.sections["exp_avg"].nbytes))


def shorten(state: State) -> None:
    state.sections["exp_avg"] = state.sections["exp_avg"][:-4]


def overflow(state: State) -> None:  # as sent, theta is its difference from phi
    state.sections = lived(2).snapshot(packed=True).sections
    state.packed = True
    for name in ("theta", "phi"):
        section(name, lambda flat: flat.fill_(3e38))(state)


def bad_norm(state: State) -> None:
    state.gradient_norm = float("nan")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (section("theta", lambda flat: flat[0].fill_(float("nan"))), "section theta"),
        (section("momentum", lambda flat: flat[-1].fill_(float("inf"))), "section momentum"),
        (section("exp_avg_sq", lambda flat: flat[7].fill_(-1e-9)), "negative second moment"),
        (lose, "without section momentum"),
        (add, "residual"),
        (shorten, "bytes of exp_avg"),
        (widen, "9856 bytes of exp_avg_sq; expected 2176"),
        (bad_norm, "gradient norm nan"),
        (overflow, "section theta"),
    ],
)
def test_a_bad_state_is_refused_and_changes_nothing(spoil: Callable[[State], None], words: str) -> None:
    replica = lived(1)
    state = lived(2).snapshot()
    before = contents(replica.snapshot())
    steps = replica.inner_steps
    spoil(state)
    with pytest.raises(RemoteFault, match=words):
        replica.load(state)
    assert contents(replica.snapshot()) == before and replica.inner_steps == steps


@pytest.mark.parametrize(("rank", "name"), [(0, "post_attention_layernorm"), (16, "self_attn.o_proj")])
def test_moments_are_taken_as_sent_unless_no_gradients_leave_them(rank: int, name: str) -> None:
    """Of one element with a huge first moment the newcomer's next step was tens of thousands of rates long."""
    pipeline = PipelineSpec(stages=2, boundary="subspace" if rank else "bf16", boundary_rank=rank)
    run = replace(MANIFEST, pipeline=pipeline, inner=replace(MANIFEST.inner, optimizer="adamw"))
    donor = TorchReplica(run, 0, optimizer_state="8bit")
    newcomer = TorchReplica(run, 0)
    for steps in (1, 1, 30):
        train(donor, steps, steps)
        newcomer.load(donor.snapshot(packed=True))
    state = newcomer.snapshot(packed=True)
    section("exp_avg", lambda flat: flat.mul_(1e-30))(state)
    section("exp_avg_sq", lambda flat: flat.zero_())(state)  # such squares underflow
    newcomer.load(state)
    name = f"model.layers.0.{name}.weight"
    section("exp_avg", lambda flat: donor.stage.named(flat)[name].view(-1)[-1].fill_(1.0))(state)
    with pytest.raises(RemoteFault, match=f"first moment of {name} over 4.66 roots"):
        newcomer.load(state)


def test_a_packed_state_is_the_original_to_half_a_unit() -> None:
    """The newcomer has the donor's slow weights to the bit, and the rest within half a unit in the last of bfloat16's
    eight bits."""
    original = lived(1)
    newcomer = TorchReplica(replace(MANIFEST, seed=9), 0)
    newcomer.load(original.snapshot(packed=True))
    assert newcomer.digest() == original.digest()
    there, here = (replica.snapshot().sections for replica in (newcomer, original))
    found, given = ({k: torch.frombuffer(v, dtype=torch.float32) for k, v in one.items()} for one in (there, here))
    given["theta"], found["theta"] = (one["theta"] - one["phi"] for one in (given, found))
    for name in SECTIONS:
        bound = 1.01 * 2.0**-8 * given[name].abs()
        if name == "theta":  # as what it is more than phi
            bound += 1e-7 * given["phi"].abs()
        assert bool((found[name] - given[name]).abs().le(bound).all()), name
        assert name == "phi" or not torch.equal(found[name], given[name])


@pytest.mark.parametrize("method", CODECS_OF)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_state_has_what_its_run_uses_and_nothing_else(method: str, optimizer: str) -> None:
    """A copy goes on to the bit although sections that the run never reads are missing."""
    gossip = GossipSpec(method=method, codec=CODECS_OF[method][0], group=0)
    run = replace(MANIFEST, inner=replace(MANIFEST.inner, optimizer=optimizer), gossip=gossip)
    original = TorchReplica(run, 0)
    copy = TorchReplica(replace(run, seed=5), 0)
    for round_index in (1, 2):
        train(original, 10 * round_index, 2)
        a_round(original, round_index)
    train(original, 30)
    state = original.snapshot()
    sizes = {name: section.nbytes // 4 for name, section in state.sections.items()}
    assert sizes == original.sizes_of(0) and all(any(section) for section in state.sections.values())
    assert ("momentum" in sizes) == (method in OWN_ALPHA)
    assert (sizes["exp_avg_sq"] < sizes["exp_avg"] / 2) == (optimizer == "muon")
    copy.load(original.snapshot(packed=True))
    copy.load(state)
    if original.steps_in_rounds:  # what it gathered for the next round is not in its state
        original.load(state)
    for replica in (original, copy):
        train(replica, 40, 2)
        a_round(replica, 3)
    for name, section in original.snapshot().sections.items():
        mine, theirs = (torch.frombuffer(one, dtype=torch.float32) for one in (section, copy.snapshot().sections[name]))
        # eager adds a step that it takes back, which rounds
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6 if method == "eager" else 0, msg=name)
        assert not torch.equal(mine, torch.frombuffer(state.sections[name], dtype=torch.float32)), name

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnode.base.errors import LocalFault, RemoteFault
from swarmnode.base.ports import WireTensor
from swarmnode.model.memory_budget import COPIES_MAX
from swarmnode.model.optimizer import corrected_ema, learning_rate
from swarmnode.model.stage import StageReplica, StageTape
from swarmnode.model.tensor import decode, encode
from swarmnode.run.manifest import DataSpec, Manifest, ModelSpec, PipelineSpec
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


def gradients_of(stages: list[StageReplica]) -> dict[str, Tensor]:
    return {name: value for stage in stages for name, value in stage.named(stage.grad).items()}


# Stages make up the whole


@pytest.mark.parametrize(("boundary", "relative"), [("fp32", 1e-5), ("bf16", 0.03)])
def test_float32_stages_come_close(boundary, relative):
    chain = stages_of(manifest(boundary=boundary))
    net = plain_model(chain, torch.float32)
    tokens = token_batch()
    train_on(chain, tokens)
    (mean_loss(net, tokens) * 4).backward()
    expected = torch.cat([parameter.grad.flatten() for _, parameter in sorted(net.named_parameters())])
    found = torch.cat([gradient.flatten() for _, gradient in sorted(gradients_of(chain).items())])
    assert (found - expected).norm() < relative * expected.norm()


@pytest.mark.node
@pytest.mark.parametrize("stages", [1, 3])
def test_one_replica_a_stage_is_single_process_adamw(stages):
    """20 steps against torch's AdamW over separate parameters, clipped for each stage to c / sqrt(S)."""
    run = manifest(
        stages=stages, optimizer="adamw", learning_rate=3e-3, warmup_samples=32, decay_samples=160, clip_norm=1.7
    )
    chain = stages_of(run, torch.float64)
    net = plain_model(chain, torch.float64)
    inner = run.inner
    parameters = dict(net.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters.values() if p.dim() > 1], "weight_decay": inner.weight_decay},
            {"params": [p for p in parameters.values() if p.dim() == 1], "weight_decay": 0.0},
        ],
        betas=(inner.beta1, inner.beta2),
        eps=inner.eps,
    )
    samples_total = 0
    clipped = 0
    for step in range(20):
        batches = [token_batch(seed=2 * step + half) for half in (0, 1)]
        ours = sum(train_on(chain, tokens) for tokens in batches) / (8 * run.model.context)
        theirs = mean_loss(net, torch.cat(batches))
        assert ours == pytest.approx(theirs.item(), abs=1e-5)
        theirs.backward()
        samples_total += 8
        reports = [stage.step(samples_total) for stage in chain]
        for stage, report in zip(chain, reports, strict=True):
            held = [parameters[name] for name in stage.shapes]
            norm = torch.nn.utils.clip_grad_norm_(held, inner.clip_norm / math.sqrt(stages))
            assert report.gradient_norm == pytest.approx(norm.item(), rel=1e-6)
            clipped += norm.item() > inner.clip_norm / math.sqrt(stages)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(inner, samples_total)
        optimizer.step()
        optimizer.zero_grad()
    assert 0 < clipped < 20 * stages, "some steps are to be clipped and some not"
    for stage in chain:
        for name, value in stage.named(stage.theta).items():
            torch.testing.assert_close(value, parameters[name].detach(), rtol=0, atol=1e-5, msg=name)
        for name, value in seconds(stage).items():
            torch.testing.assert_close(value, optimizer.state[parameters[name]]["exp_avg_sq"], rtol=0, atol=1e-5)


def test_autocast_trains_too():
    chain = stages_of(manifest(), autocast=True)
    exact = stages_of(manifest())
    tokens = token_batch()
    assert train_on(chain, tokens) == pytest.approx(train_on(exact, tokens), rel=0.01)
    for stage, other in zip(chain, exact, strict=True):
        assert F.cosine_similarity(stage.grad, other.grad, dim=0) > 0.99


# Flat buffers


def test_gradient_norm_is_a_bias_corrected_mean_before_clipping():
    expected = []
    value = 0.0
    raw = 0.0
    for count, norm in enumerate((4.0, 2.0, 8.0, 1.0), start=1):
        raw = 0.9 * raw + 0.1 * norm
        value = corrected_ema(value, norm, count)
        expected.append(raw / (1 - 0.9**count))
        assert value == pytest.approx(expected[-1])
    assert expected[0] == pytest.approx(4.0)
    chain = stages_of(manifest(clip_norm=1e-3))
    train_on(chain, token_batch())
    report = chain[0].step(8)
    assert chain[0].gradient_norm == pytest.approx(report.gradient_norm) and report.gradient_norm > 0.01


def test_a_step_that_is_averaged_has_a_higher_rate():
    """Four replicas: twice the rate. A batch twice as large as meant: again the root of it."""
    rates = []
    for batch, averaged in ((4.0, 1), (4.0, 4), (2.0, 4)):
        chain = stages_of(manifest())
        train_on(chain, token_batch())
        rates.append(chain[0].step(1000, batch, averaged).learning_rate)
    assert rates[1] == pytest.approx(2.0 * rates[0])
    assert rates[2] == pytest.approx(2.0 * math.sqrt(2.0) * rates[0])


# Tapes


def gradient_for(stage: StageReplica, samples: int = 4, seed: int = 3) -> WireTensor:
    model = stage.manifest.model
    generator = torch.Generator().manual_seed(seed)
    shape = (samples, model.context, model.width)
    return encode(torch.randn(shape, generator=generator, dtype=torch.float64).to(stage.theta.dtype))


def backward_today(stage: StageReplica, x: WireTensor, dy: WireTensor) -> tuple[Tensor, Tensor]:
    """(gradient of theta, of the input) by a fresh forward and backward; what was accumulated is put back."""
    kept = stage.grad.clone()
    stage.grad.zero_()
    _, tape = stage.forward(x, keep=True)
    assert tape is not None
    dx = stage.backward(tape, dy, 4)
    assert dx is not None
    result = stage.grad.clone(), decode(dx).clone()
    stage.grad.copy_(kept)
    stage.accumulated -= 4
    return result


def moved_by_step(stage: StageReplica, x: WireTensor) -> None:
    _, tape = stage.forward(x, keep=True)
    assert tape is not None
    stage.backward(tape, gradient_for(stage, seed=8), 4)
    stage.step(1000)


def moved_from_outside(stage: StageReplica, x: WireTensor) -> None:
    stage.theta.mul_(1.1)
    stage.touched()


def released(stage: StageReplica, x: WireTensor) -> None:
    pass


@pytest.mark.parametrize(
    ("between", "release"), [(moved_from_outside, True), (moved_from_outside, False), (released, True)]
)
def test_backward_runs_what_it_has_to_again_with_the_weights_of_today(between, release):
    stage = stages_of(manifest(), torch.float64)[1]
    x = encode(torch.randn(4, TINY.context, TINY.width, dtype=torch.float64))
    dy = gradient_for(stage)
    first = backward_today(stage, x, dy)
    _, tape = stage.forward(x, keep=True)
    assert tape is not None
    full = tape.nbytes
    if release:
        stage.release(tape)
        assert tape.nbytes == x.nbytes < full
    between(stage, x)
    expected = backward_today(stage, x, dy)
    assert torch.equal(first[0], expected[0]) == (between is released)
    stage.grad.zero_()
    dx = stage.backward(tape, dy, 4)
    assert dx is not None and stage.recomputed == 1
    torch.testing.assert_close(stage.grad, expected[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(decode(dx), expected[1], rtol=0, atol=1e-12)
    assert tape.nbytes == x.nbytes  # a spent tape holds no graph


@pytest.mark.parametrize("release", [False, True])
def test_steps_since_its_forward_do_not_change_a_gradient(release):
    stage = stages_of(manifest(), torch.float64)[1]
    x = encode(torch.randn(4, TINY.context, TINY.width, dtype=torch.float64))
    dy = gradient_for(stage)
    before = backward_today(stage, x, dy)
    _, tape = stage.forward(x, keep=True)
    assert tape is not None and stage.stash.nbytes == 0
    if release:
        stage.release(tape)
    moved_by_step(stage, x)
    moved_by_step(stage, x)
    today = backward_today(stage, x, dy)
    theta = stage.theta.clone()
    assert stage.stash.nbytes == theta.nbytes  # of the one tape alone
    stage.grad.zero_()
    dx = stage.backward(tape, dy, 4)
    assert dx is not None and stage.recomputed == release
    torch.testing.assert_close(stage.grad, before[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(decode(dx), before[1], rtol=0, atol=1e-12)
    assert (stage.grad - today[0]).norm() > 1e-3 * today[0].norm()
    assert torch.equal(stage.theta, theta) and stage.stash.nbytes == 0


def test_few_copies_of_older_weights_are_kept():
    """The gradient of a tape that is older still lies between that of its time and today's."""
    stage = stages_of(manifest(), torch.float64)[1]
    x = encode(torch.randn(4, TINY.context, TINY.width, dtype=torch.float64))
    dy = gradient_for(stage)
    tapes = []
    before = backward_today(stage, x, dy)
    for _ in range(COPIES_MAX + 1):
        tapes.append(stage.forward(x, keep=True)[1])
        moved_by_step(stage, x)
        assert stage.stash.nbytes == min(len(tapes), COPIES_MAX) * stage.theta.nbytes
    today = backward_today(stage, x, dy)
    stage.grad.zero_()
    assert tapes[0] is not None and stage.backward(tapes[0], dy, 4) is not None and stage.recomputed == 0
    assert 0.0 < (stage.grad - today[0]).norm() < (before[0] - today[0]).norm()
    del tapes
    assert stage.stash.nbytes == 0  # whose microbatches were lost


def test_copies_are_no_wider_than_what_is_multiplied():
    stage = stages_of(manifest(), autocast=True)[1]
    x = encode(torch.randn(4, TINY.context, TINY.width))
    dy = gradient_for(stage)
    before = backward_today(stage, x, dy)[0]
    _, tape = stage.forward(x, keep=True)
    assert tape is not None
    stage.release(tape)
    moved_by_step(stage, x)
    assert stage.stash.nbytes == 2 * stage.parameters
    today = backward_today(stage, x, dy)[0]
    stage.grad.zero_()
    stage.backward(tape, dy, 4)
    assert (stage.grad - before).norm() < 0.1 * (today - before).norm()  # norms' weights are rounded, too


def test_tapes_are_independent_and_may_be_spent_in_any_order():
    chain = stages_of(manifest(), torch.float64)
    x = [encode(torch.randn(4, TINY.context, TINY.width, dtype=torch.float64)) for _ in range(3)]
    stage = chain[1]
    expected = [backward_today(stage, one, gradient_for(stage))[1] for one in x]
    tapes = [stage.forward(one, keep=True)[1] for one in x]
    for index in (1, 2, 0):
        dx = stage.backward(tapes[index], gradient_for(stage), 4)  # type: ignore[arg-type]
        assert torch.equal(decode(dx), expected[index])  # type: ignore[arg-type]
    assert stage.accumulated == 12


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(
    "model",
    [ModelSpec(), ModelSpec(kv_heads=4), ModelSpec(width=64, ffn=512, layers=3, context=64, heads=8, kv_heads=1)],
)
@pytest.mark.parametrize("documents", ["joined", "masked"])
def test_a_tape_says_what_memory_it_holds(model, stage, autocast, documents):
    check_tape(run_of(model, documents), stage, autocast)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "family",
    [
        {"head_width": 64, "qkv_bias": True, "output_bias": True, "qk_norm": "head"},
        {"qk_norm": "whole", "norm_placement": "post", "tied": True, "unrotated_layers": (0, 3)},
        {"sliding_window": 100, "context": 600},
        {"experts": 8, "experts_active": 2, "expert_ffn": 96, "shared_expert_ffn": 64, "router_balance": 0.1},
        {"experts": 4, "experts_active": 2, "expert_ffn": 176, "dense_layers": (2,), "router_normalised": True},
    ],
)
def test_a_tape_of_another_architecture_says_it_too(family, autocast):
    check_tape(run_of(replace(ModelSpec(), **family), "joined"), 1, autocast)


def run_of(model: ModelSpec, documents: str) -> Manifest:
    return Manifest(model=model, pipeline=PipelineSpec(stages=3), data=DataSpec(documents=documents))


def check_tape(run: Manifest, stage: int, autocast: bool, rel: float = 0.1) -> None:
    replica = StageReplica(run, stage, autocast=autocast)
    model = run.model
    shape = (8, model.context, model.width)
    ids = token_batch(model, 8)
    tokens = token_wire(torch.where(token_batch(model, 8, seed=1) % 20 == 0, 0, ids))
    dtype = torch.bfloat16 if run.pipeline.boundary == "bf16" else torch.float32
    x = tokens if stage == 0 else encode(torch.randn(shape, dtype=dtype))
    owned = {tensor.untyped_storage().data_ptr() for tensor in (replica.theta, *replica.module.buffers())}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _, tape = replica.forward(x, keep=True, tokens=tokens)
    assert isinstance(tape, StageTape) and tape.output is not None
    held = sum(saved.values()) + tape.output.nbytes + tape.kept.nbytes
    assert tape.nbytes == pytest.approx(held, rel=rel)


# Bad input


def poisoned(shape: tuple[int, ...], value: float) -> WireTensor:
    tensor = torch.zeros(shape)
    tensor.view(-1)[-1] = value
    return encode(tensor)


SHAPE = (4, TINY.context, TINY.width)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
def test_nonfinite_input_is_refused_and_changes_nothing(value):
    chain = stages_of(manifest())
    with pytest.raises(RemoteFault, match="input of stage 2: not finite"):
        chain[1].forward(poisoned(SHAPE, value), keep=True)
    with pytest.raises(RemoteFault, match="input of stage 3: not finite"):
        chain[2].loss(poisoned(SHAPE, value), token_wire(token_batch()), 4, train=True)
    _, tapes = ascend(chain, token_batch())
    with pytest.raises(RemoteFault, match="gradient for stage 2: not finite"):
        chain[1].backward(tapes[1], poisoned(SHAPE, value), 4)
    assert all(stage.accumulated == 0 and not stage.grad.any() for stage in chain)
    assert chain[1].backward(tapes[1], gradient_for(chain[1]), 4) is not None  # the tape is still good


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (encode(torch.zeros(4, TINY.context, TINY.width + 1)), r"shape \[4, 16, 33\]; expected \[any, 16, 32\]"),
        (encode(torch.zeros(4, TINY.context - 1, TINY.width)), r"shape \[4, 15, 32\]"),
        (encode(torch.zeros(0, TINY.context, TINY.width)), r"shape \[0, 16, 32\]"),
        (encode(torch.zeros(TINY.context, TINY.width)), r"shape \[16, 32\]"),
        (encode(torch.zeros(SHAPE, dtype=torch.float64)), "dtype 'f64'; expected f32"),
        (token_wire(token_batch()), "dtype 'u16'; expected f32"),
        (WireTensor("f32", SHAPE, b"short"), "has 5 bytes; expected 8192"),
    ],
)
def test_inputs_of_the_wrong_kind_are_refused(x, reason):
    with pytest.raises(RemoteFault, match=reason):
        StageReplica(manifest(), 1).forward(x, keep=True)


def test_tokens_and_samples_are_checked():
    chain = stages_of(manifest())
    tokens = token_batch()
    x, tapes = ascend(chain, tokens)
    tokens[1, 2] = TINY.vocabulary
    with pytest.raises(RemoteFault, match="input of stage 1: token id 50 in a vocabulary of 50"):
        chain[0].forward(token_wire(tokens), keep=True)
    with pytest.raises(RemoteFault, match="tokens of stage 3: token id 50"):
        chain[2].loss(x, token_wire(tokens), 4, train=True)
    with pytest.raises(RemoteFault, match="3 samples announced, 4 sent"):
        chain[2].loss(x, token_wire(token_batch()), 3, train=True)
    with pytest.raises(RemoteFault, match="4 samples announced, 3 sent"):
        chain[2].loss(x, token_wire(token_batch(samples=3)), 4, train=True)
    with pytest.raises(RemoteFault, match="5 samples announced, 4 sent"):
        chain[1].backward(tapes[1], gradient_for(chain[1], 5), 5)
    assert all(stage.accumulated == 0 for stage in chain)


def test_theta_that_has_diverged_is_our_own_fault():
    chain = stages_of(manifest())
    x, _ = ascend(chain, token_batch())
    chain[2].theta.fill_(math.nan)
    chain[2].touched()
    with pytest.raises(LocalFault, match="theta has diverged"):
        chain[2].loss(x, token_wire(token_batch()), 4, train=True)
    train_on(stages_of(manifest()), token_batch())
    stage = chain[1]
    stage.grad.fill_(math.inf)
    stage.accumulated = 4
    before = stage.theta.clone()
    with pytest.raises(LocalFault, match="gradient norm inf in inner step 1"):
        stage.step(8)
    assert torch.equal(stage.theta, before) and not stage.grad.any() and stage.accumulated == 0

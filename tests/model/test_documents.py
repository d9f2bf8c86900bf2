"""Documents read apart equal documents alone, and losses are means over the tokens that count."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from swarmnode.base.errors import RemoteFault
from swarmnode.data.sample import IGNORED, UNCOUNTED, SampleBatch
from swarmnode.model.boundary_code import encode_boundary
from swarmnode.model.decoder import Decoder
from swarmnode.model.documents import Documents
from swarmnode.model.split import split
from swarmnode.model.stage import StageReplica, StageTape
from swarmnode.model.tensor import decode
from swarmnode.model.text_generation import loss_of, whole_model
from swarmnode.run.manifest import Manifest
from swarmnode.trust.recompute import hop_again
from tests.support.tiny_model import TINY, ascend, manifest, stages_of, token_batch, token_wire, train_on

END = 0
LONG = replace(TINY, context=96)
WINDOWS = {
    "several": [[5, 9, END, 3, 3, 8, 2, END, 7]],
    "one": [[5, 9, 8, 3, 3, 8, 2, 1, 7]],
    "ends at the end": [[5, 9, 8, 3, 3, 8, 2, 1, END]],
    "ends before the last target": [[5, 9, 8, 3, 3, 8, 2, END, 7]],
    "begins with an end": [[END, 9, 8, END, END, 8, 2, 1, 7]],
    "nothing but ends": [[END] * 9],
    "of different kinds": [[5, 9, END, 3, 3, 8, 2, END, 7], [1] * 9, [END] * 9, [4, END, 4, 4, 4, 4, 4, 4, 4]],
}


def apart(run: Manifest) -> Manifest:
    """`run` with documents read apart. Its tokenizer is `bytes`, of which 0 ends documents."""
    return replace(run, data=replace(run.data, documents="masked"))


def whole(stages: list[StageReplica]) -> Decoder:
    """The model in one piece, which knows nothing of documents, with the stages' weights."""
    model = stages[0].manifest.model
    net = Decoder(model, split(model, 1)[0]).to(stages[0].theta.dtype)
    net.load_state_dict({name: value for stage in stages for name, value in stage.named(stage.theta).items()})
    return net


def alone(tokens: list[int]) -> list[list[int]]:
    """The documents of a window of T + 1 tokens, one by one."""
    found: list[list[int]] = [[]]
    for token in tokens:
        found[-1].append(token)
        if token == END:
            found.append([])
    return [document for document in found if document]


def loss_alone(net: Decoder, windows: list[list[int]]) -> tuple[Tensor, int]:
    """Summed loss of each document run by itself, and how many targets they have."""
    total = torch.zeros((), dtype=net.lm_head.weight.dtype)
    count = 0
    for window in windows:
        for document in alone(window):
            ids = torch.tensor([document])
            if len(document) > 1:
                total = total + F.cross_entropy(net(ids[:, :-1])[0], ids[0, 1:], reduction="sum")
                count += len(document) - 1
    return total, count


def check_equal(run: Manifest, windows: list[list[int]], dtype: torch.dtype, tolerance: float) -> None:
    """Loss, count, and every parameter's gradient of a pipeline on `windows` are those of the documents alone."""
    chain = stages_of(run, dtype)
    net = whole(chain)
    tokens = torch.tensor(windows)
    loss_sum = train_on(chain, tokens)
    expected, count = loss_alone(net, windows)
    assert loss_sum == pytest.approx(expected.item(), rel=tolerance, abs=tolerance)
    last = chain[-1].loss(ascend(chain, tokens)[0], token_wire(tokens), len(windows), train=False)
    assert (last.loss_sum, last.tokens) == (pytest.approx(loss_sum, rel=1e-6), count)
    if count:
        (expected / run.model.context).backward()
    theirs = dict(net.named_parameters())
    for stage in chain:
        for name, found in stage.named(stage.grad).items():
            gradient = theirs[name].grad
            wanted = torch.zeros_like(found) if gradient is None else gradient
            torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS.keys())
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_each_document_is_as_alone(windows: list[list[int]], dtype: torch.dtype, tolerance: float) -> None:
    check_equal(apart(manifest(replace(TINY, context=8), stages=3)), windows, dtype, tolerance)


@pytest.mark.parametrize(("stages", "every"), [(1, 5), (2, 40), (5, 2)])
def test_longer_windows_in_other_pipelines(stages: int, every: int) -> None:
    """Groups of several lengths; documents end once in `every` tokens."""
    tokens = token_batch(LONG, samples=2, seed=every)
    ends = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(every)) < 1 / every
    windows = torch.where(ends, END, tokens.clamp(min=1)).tolist()
    check_equal(apart(manifest(LONG, stages=stages)), windows, torch.float64, 1e-12)


def test_in_a_subspace_too() -> None:
    """The stream between stages is rebuilt by tokens: documents are known there as well."""
    run = apart(manifest(replace(TINY, context=8), stages=3, boundary="subspace", rank=8))
    chain = stages_of(run, torch.float64)
    windows = WINDOWS["of different kinds"]
    expected, _ = loss_alone(whole(chain), windows)
    assert train_on(chain, torch.tensor(windows)) == pytest.approx(expected.item(), rel=1e-9)


@given(
    ids=st.integers(1, 12).flatmap(
        lambda length: st.lists(st.lists(st.integers(0, 3), min_size=length, max_size=length), min_size=1, max_size=4)
    )
)
def test_every_token_lies_once_in_a_group(ids: list[list[int]]) -> None:
    found = Documents.of(torch.tensor(ids), END)
    documents = [document for row in ids for document in alone(row)]
    if len(documents) == len(ids):
        assert found is None
        return
    assert found is not None
    assert found.positions.flatten().tolist() == [at for document in documents for at in range(len(document))]
    assert found.rows[found.back].tolist() == list(range(found.back.numel()))
    assert len(set(found.back.tolist())) == found.back.numel()
    assert sum(count for count, _ in found.groups) == len(documents)
    assert sum(count * most for count, most in found.groups) == found.rows.numel() < 3 * found.back.numel()


# Counted tokens


def masked_batch(seed: int, share: float) -> SampleBatch:
    """A batch of which about `share` of the tokens count."""
    chance = np.random.default_rng(seed)
    tokens = chance.integers(0, TINY.vocabulary, (4, TINY.context + 1)).astype("<u2")
    return SampleBatch(tokens, chance.random(tokens.shape) < share)


def plain_gradient(net: Decoder, batches: list[SampleBatch]) -> dict[str, Tensor]:
    """Of PyTorch's mean cross entropy over all targets that count in `batches` together."""
    ids = torch.from_numpy(np.concatenate([batch.tokens[:, :-1] for batch in batches]).astype(np.int64))
    targets = torch.from_numpy(np.concatenate([batch.targets() for batch in batches]))
    net.zero_grad()
    F.cross_entropy(net(ids).flatten(0, 1), targets.flatten(), ignore_index=IGNORED).backward()
    return {name: parameter.grad for name, parameter in net.named_parameters() if parameter.grad is not None}


def check_step(chain: list[StageReplica], wanted: dict[str, Tensor], samples: int) -> None:
    """The next step of each stage is on the gradient `wanted`."""
    for stage in chain:
        expected = torch.cat([wanted[name].flatten() for name in stage.shapes])
        torch.testing.assert_close(stage.grad / stage._weight, expected, rtol=0, atol=1e-12)
        report = stage.step(0)
        assert report.samples == samples
        assert report.gradient_norm == pytest.approx(float(torch.linalg.vector_norm(expected)), rel=1e-9)


def test_microbatches_weigh_by_their_counted_tokens() -> None:
    """One counts nearly everything, one little, one nothing: the step is the mean over counted tokens of all three, not
    the mean of their means."""
    chain = stages_of(manifest(), torch.float64)
    batches = [masked_batch(1, 0.9), masked_batch(2, 0.1), masked_batch(3, 0.0)]
    wanted = plain_gradient(whole(chain), batches)
    found = [train_on(chain, batch.to_wire()) for batch in batches]
    assert found[2] == 0.0
    check_step(chain, wanted, 12)


def test_across_two_replicas_of_a_stage() -> None:
    """Two microbatches go through different replicas of the last stage and come back to one of the stages before, which
    steps on the mean over the counted tokens of both; what the two last ones add up to is that mean too."""
    chain = stages_of(manifest(), torch.float64)
    other = StageReplica(chain[0].manifest, 2, dtype=torch.float64)
    batches = [masked_batch(4, 0.8), masked_batch(5, 0.2)]
    wanted = plain_gradient(whole(chain), batches)
    train_on(chain, batches[0].to_wire())
    train_on([*chain[:2], other], batches[1].to_wire())
    weight = chain[2]._weight + other._weight
    assert weight == pytest.approx(sum((batch.targets() != IGNORED).sum() for batch in batches) / TINY.context)
    together = chain[2].named((chain[2].grad + other.grad) / weight)
    for name, found in together.items():
        torch.testing.assert_close(found, wanted[name], rtol=0, atol=1e-12)
    check_step(chain[:2], wanted, 8)


def test_gradients_for_what_does_not_count_are_nothing_whatever_a_peer_says() -> None:
    chain = stages_of(manifest(), torch.float32)
    _, tapes = ascend(chain, masked_batch(7, 0.0).to_wire())
    tape = tapes[1]
    assert isinstance(tape, StageTape) and tape.output is not None
    lie = encode_boundary(torch.full_like(tape.output, 100.0), chain[1].codes[1])
    given = chain[1].backward(tape, lie, 4)
    assert given is not None and not decode(given).any() and not chain[1].grad.any()
    assert chain[1].incoming.clips == 1


def test_documents_and_a_mask_together_and_evaluation_counts_alike() -> None:
    run = apart(manifest())
    chain = stages_of(run)
    tokens = token_batch(samples=4, seed=9).clamp(max=6).numpy().astype("<u2")
    batch = SampleBatch(tokens, np.random.default_rng(1).random(tokens.shape) < 0.6)
    x, _ = ascend(chain, batch.to_wire())
    found = chain[-1].loss(x, batch.to_wire(), 4, train=False)
    weights = {name: view for stage in chain for name, view in stage.named(stage.theta).items()}
    loss, count = loss_of(whole_model(TINY, weights), batch, run.data.document_end)
    assert (found.loss_sum, found.tokens) == (pytest.approx(loss, rel=1e-5), count)
    assert count == (batch.targets(END) != IGNORED).sum() < batch.loss_mask[:, 1:].sum()  # type: ignore[index]
    assert loss_of(whole_model(TINY, weights), batch)[1] > count


# Done again by others


@pytest.mark.parametrize("stage", [1, 2])
def test_a_hop_done_again_is_the_same_to_the_bit(stage: int) -> None:
    """Another replica with the same weights, given the tensors of a hop, answers alike; with another mask it does not,
    and the fingerprint of the tokens, which servers sign, tells the two apart."""
    run = apart(manifest())
    chain = stages_of(run)
    ids = token_batch(samples=4, seed=3).clamp(max=6).numpy().astype("<u2")
    batch = SampleBatch(ids, masked_batch(1, 0.7).loss_mask)
    tokens = batch.to_wire()
    x, tapes = ascend(chain[: stage + 1], tokens)
    other = StageReplica(run, stage)
    flipped = SampleBatch(batch.tokens, ~batch.loss_mask).to_wire()  # type: ignore[operator]
    assert bytes(flipped.data) != bytes(tokens.data)
    if stage == 2:
        answered = chain[2].loss(x, tokens, 4, train=True)
        loss_sum, (gradient,) = hop_again(other, x, tokens, 4, None)  # type: ignore[arg-type]
        assert loss_sum == answered.loss_sum and answered.gradient is not None
        assert bytes(gradient.data) == bytes(answered.gradient.data)
        assert hop_again(other, x, flipped, 4, None)[0] != loss_sum  # type: ignore[arg-type]
        return
    y, tape = chain[1].forward(x, keep=True, tokens=tokens)
    assert tape is not None and tapes
    gradient = encode_boundary(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)), chain[1].codes[1])
    given = chain[1].backward(tape, gradient, 4)
    _, (sent, again) = hop_again(other, x, tokens, 4, gradient)  # type: ignore[arg-type]
    assert given is not None
    assert bytes(sent.data) == bytes(y.data) and bytes(again.data) == bytes(given.data)
    joined = SampleBatch(np.where(batch.tokens == END, 1, batch.tokens).astype("<u2"), batch.loss_mask).to_wire()
    assert bytes(hop_again(other, x, joined, 4, gradient)[1][0].data) != bytes(y.data)  # type: ignore[arg-type]


# Bad input


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_marks_do_not_hide_ids_that_are_out_of_range(stage: int) -> None:
    chain = stages_of(apart(manifest()))
    good = masked_batch(1, 0.5)
    x, _ = ascend(chain[: stage + 1], good.to_wire())
    raw = np.frombuffer(good.to_wire().data, "<u4").reshape(4, 17).copy()
    raw[1, 2] = UNCOUNTED | TINY.vocabulary
    bad = replace(good.to_wire(), data=raw.tobytes())
    with pytest.raises(RemoteFault, match=f"stage {stage + 1}: token id 50 in a vocabulary of 50"):
        if stage == 2:
            chain[2].loss(x, bad, 4, train=True)
        else:
            chain[stage].forward(bad if stage == 0 else x, keep=True, tokens=bad)
    few = SampleBatch(good.tokens[:3], good.loss_mask[:3]).to_wire()  # type: ignore[index]
    if stage == 1:
        with pytest.raises(RemoteFault, match="stage 2: 4 samples announced, 3 sent"):
            chain[1].forward(x, keep=True, tokens=few)
        with pytest.raises(AssertionError, match="need their tokens"):
            chain[1].forward(x, keep=True)

"""Gradients averaged in pieces: each member averages some for all, all step alike, and a false mean is told."""

import itertools
from dataclasses import replace

import pytest
import torch

from swarmnode.app.machine.replica import TorchReplica
from swarmnode.base.errors import RemoteFault
from swarmnode.base.ports import Data, DraftedPieces, GivenPiece
from swarmnode.train.gossip.butterfly.word import packet_length
from swarmnode_methods.gradient import Gradient
from swarmnode_methods.piece_coder import PieceCoder
from tests.gossip.test_gradient import BATCH, manifest, members, train


def coder_of(replica: TorchReplica, round_index: int = 1) -> PieceCoder:
    assert isinstance(replica.outer, Gradient)
    return replica.outer.in_pieces.coder(round_index)


def given(drafts: list[DraftedPieces], piece: int, without: tuple[int, ...] = ()) -> list[GivenPiece]:
    return [
        GivenPiece(
            packet_length(one.lengths),
            one.targets,
            None if number in without else one.pieces[piece],
        )
        for number, one in enumerate(drafts)
    ]


def meet(step: int, found: list[TorchReplica], *, lost: tuple[int, ...] = (), without: tuple[int, ...] = ()) -> None:
    """A round of all `found`: pieces `lost` have no mean, and members `without` send no piece."""
    drafts = [one.draft_pieces(step) for one in found]
    means: list[Data | None] = []
    for piece in range(len(drafts[0].pieces)):
        owner = found[(piece + step) % len(found)]
        for draft in drafts:
            owner.check_piece(step, piece, draft.pieces[piece], draft.lengths[piece])
        mean = owner.mean_piece(step, piece, given(drafts, piece, without)).data
        means.append(None if piece in lost else mean)
    for number, one in enumerate(found):
        one.apply_pieces(step, means, [number not in without] * len(means), [])


@pytest.mark.parametrize("codec", ["fp32", "int8", "e3m0", "huffman", "whitened"])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_members_step_alike_as_one_process_does(codec: str, count: int) -> None:
    run = manifest(codec)
    plain = TorchReplica(replace(run, gossip=replace(run.gossip, method="none", codec="fp32")), 0)
    found = members(run, count)
    for step in range(1, 5):
        for number, one in enumerate(found):
            train(one, 10 * step + number, 1 + number % 2)
            train(plain, 10 * step + number, 1 + number % 2)
        meet(step, found)
        plain.step(step * BATCH)
        for one in found:
            assert torch.equal(one.stage.theta, found[0].stage.theta) and one.inner_steps == step
    apart = float((found[0].stage.theta - plain.stage.theta).norm())
    moved = float((plain.stage.theta - TorchReplica(run, 0).stage.theta).norm())
    assert apart < {"fp32": 0.01, "int8": 0.2, "e3m0": 0.9, "huffman": 0.9, "whitened": 0.9}[codec] * moved


def test_gradients_without_a_mean_and_unsent_ones_are_in_the_next_packet() -> None:
    found = members(manifest())
    for number, one in enumerate(found):
        train(one, number, 2)
    gathered = [one.stage.grad.clone() for one in found]
    meet(1, found, lost=(0, 1), without=(2,))
    coder = coder_of(found[0])
    _, last = coder.span(1)
    for number, one in enumerate(found):
        left = one.stage.grad
        torch.testing.assert_close(left[:last], gathered[number][:last])
        rest = gathered[number][last:] if number == 2 else torch.zeros_like(left[last:])
        torch.testing.assert_close(left[last:], rest, rtol=0, atol=1e-5)
        assert torch.equal(one.stage.theta, found[0].stage.theta)
    assert found[2].stage.gathered.targets and not found[0].stage.gathered.targets


def test_pieces_are_checked_before_they_count() -> None:
    (one,) = members(manifest("int8"), 1)
    train(one, 1, 2)
    draft = one.draft_pieces(1)
    one.check_piece(1, 3, draft.pieces[3], draft.lengths[3])
    short = draft.pieces[3][:-1]
    broken = b"\xff" * len(draft.pieces[3])
    for piece, data, length in ((3, short, None), (3, broken, None), (64, draft.pieces[3], None), (3, b"", None)):
        with pytest.raises(RemoteFault):
            one.check_piece(1, piece, data, length)
    with pytest.raises(RemoteFault, match="said is"):
        one.check_piece(1, 3, draft.pieces[3], draft.lengths[3] * 1.01)


@pytest.mark.parametrize("codec", ["fp32", "int8", "e3m0", "huffman", "whitened"])
def test_a_false_mean_is_told_from_a_right_one(codec: str) -> None:
    found = members(manifest(codec))
    for number, one in enumerate(found):
        train(one, number, 2)
    drafts = [one.draft_pieces(1) for one in found]
    for piece in range(0, len(drafts[0].pieces), 7):
        said = bytes(found[0].mean_piece(1, piece, given(drafts, piece)).data)
        assert not found[1].is_false_mean(1, piece, given(drafts, piece), said)
        coder = coder_of(found[0])
        first, last = coder.span(piece)
        healed = coder.fragment(piece, 1, found[0].outer.phi)
        zero = coder.code(piece, 1, torch.zeros(last - first), healed, 0)
        moved = said[:-2] + (b"\x00\x40" if said[-2:] != b"\x00\x40" else b"\x00\x41")
        without_one = found[0].mean_piece(1, piece, given(drafts, piece, without=(1,))).data
        for lie in (without_one, drafts[0].pieces[piece], zero, moved):
            assert found[1].is_false_mean(1, piece, given(drafts, piece), lie)


def test_pieces_cover_the_vector_once_and_are_alike_in_size() -> None:
    for parameters in (1, 63, 64, 255, 256, 700, 16_383, 16_385, 1_000_001):
        flat = torch.zeros(parameters)
        outer = Gradient(flat, members(manifest(), 1)[0].outer.codec)
        coder = outer.in_pieces.coder(1)
        spans = [coder.span(piece) for piece in range(coder.pieces)]
        assert spans[0][0] == 0 and spans[-1][1] == parameters
        assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(spans))
        sizes = [last - first for first, last in spans]
        assert min(sizes) > 0 and max(sizes) - min(sizes) <= 128

"""Bytes by formula against the bytes of messages that the methods make."""

import pytest
import torch

from swarmnode.base.errors import ManifestError
from swarmnode.run.manifest import GossipSpec
from swarmnode.train.gossip.outer import outer
from swarmnode.train.gossip.outer.traffic import ROUNDS, SETTLED, message_nbytes, messages
from swarmnode_methods.desloc import DesLoc
from swarmnode_methods.gradient import Gradient, GradientOf
from tests.support.method_tables import CODECS_OF

SIZE = 3 * 4096 + 100
SECONDS = 700
APART = {"modular6": 0.01, "modular4": 0.01, "modular3": 0.01, "huffman": 0.08, "whitened": 0.08}
"""Codecs whose bytes follow the numbers. Of an entropy code gradients take 1.65 bits, normal ones, as here,
1.74 and the table of the code."""


class Normal(GradientOf):
    """A gradient of normal numbers."""

    def __init__(self, gathered: torch.Tensor) -> None:
        self._gathered = gathered

    def take(self, out: torch.Tensor) -> None:
        out.copy_(self._gathered)


@pytest.mark.parametrize(
    ("method", "coding"), [(method, coding) for method, codings in CODECS_OF.items() for coding in codings]
)
def test_the_formula_is_what_is_sent(method: str, coding: str) -> None:
    spec = GossipSpec(method=method, codec=coding, acceptance="all")
    theta = torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
    one = outer(spec, theta, "r0")
    if isinstance(one, DesLoc):
        one.attend(torch.zeros(SIZE), torch.zeros(SECONDS))
    sent = 0
    for number in range(ROUNDS):
        moved = torch.randn(SIZE, generator=torch.Generator().manual_seed(number))
        theta.add_(moved, alpha=1e-2)
        if isinstance(one, Gradient):
            one.gather(Normal(moved))
        sent += sum(tensor.nbytes for tensor in one.message(SETTLED + number))
        one.apply(SETTLED + number, 1.0, [])
    assert message_nbytes(spec, SIZE, SECONDS) == pytest.approx(sent / ROUNDS, rel=APART.get(coding, 0))


def test_two_buffers_where_gamma_is_not_beta_and_what_does_not_go_together() -> None:
    assert message_nbytes(GossipSpec(method="noloco", codec="fp32", gamma=0.3), SIZE, SECONDS) == 8 * SIZE
    with pytest.raises(ManifestError, match="topk64"):
        message_nbytes(GossipSpec(method="noloco", codec="topk64"), SIZE, SECONDS)


def test_every_member_of_a_group_sends_to_every_other() -> None:
    pairs, fours, whole = (GossipSpec(method="average", group=size) for size in (2, 4, 0))
    assert [messages(pairs, count) for count in (0, 1, 2, 3, 8)] == [0, 0, 2, 2, 8]
    assert [messages(fours, count) for count in (1, 3, 4, 6, 9)] == [0, 6, 12, 14, 24]
    assert [messages(whole, count) for count in (1, 2, 8)] == [0, 2, 56]
    assert messages(GossipSpec(method="none"), 8) == 0

"""Codecs on another device: nothing is mixed up, and packets are the very bytes that the CPU makes."""

import pytest
import torch

from swarmnode.gossip.compression import codec
from swarmnode.gossip.compression.codec import TILE
from tests.support.fake_device import Elsewhere, elsewhere
from tests.support.method_tables import CODECS

PARAMETERS = TILE + 5_000  # a tile, and a part of one whose last block is not whole


@pytest.mark.parametrize("name", sorted(CODECS))
def test_packets_and_what_is_decoded_are_the_same_elsewhere(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    theta = torch.randn(PARAMETERS, generator=generator)
    phi, ours = (theta + 0.01 * torch.randn(PARAMETERS, generator=generator) for _ in range(2))
    here, there, reader_here, reader_there = (codec(name) for _ in range(4))
    relative = here.relative
    for seed in (3, 4):  # the second packet has what was left of the first, or escapes
        expected = here.encode(theta, reference=phi if relative else None, seed=seed)
        decoded = torch.empty(PARAMETERS)
        reader_here.decode(expected, decoded, ours if relative else None)
        with elsewhere(monkeypatch) as device:
            reference, own = (phi.to(device), ours.to(device)) if relative else (None, None)
            found = there.encode(theta.to(device), reference=reference, seed=seed)
            out = torch.empty(PARAMETERS, device=device)
            reader_there.decode(found, out, own)
        assert [bytes(tensor.data) for tensor in found] == [bytes(tensor.data) for tensor in expected]
        assert isinstance(out, Elsewhere) and torch.equal(out.inner, decoded)

"""Packets are sent while they are written: what is below the watermark is final, for every codec and every method."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from swarmnode.run.manifest import GossipSpec
from swarmnode.train.gossip.compression import codec
from swarmnode.train.gossip.compression.codec import TILE, Bytes, Codec
from swarmnode.train.gossip.outer import outer
from tests.support.method_tables import CODECS, CODECS_OF, METHODS, NONE, without_c

PARAMETERS = 2 * TILE + 4096 + 777


def weights(seed: int, parameters: int = PARAMETERS) -> torch.Tensor:
    return torch.randn(parameters, generator=torch.Generator().manual_seed(seed))


def flats(coder: Codec) -> tuple[torch.Tensor, torch.Tensor]:
    """(what is coded, the slow weights)."""
    phi = weights(1)
    delta = 0.01 * weights(2)
    return (delta if coder.of_delta else phi + delta), phi


@pytest.mark.parametrize("extension", [True, False])
@pytest.mark.parametrize("name", CODECS)
def test_bytes_below_the_watermark_never_change(name: str, extension: bool) -> None:
    with contextlib.nullcontext() if extension else without_c(name):
        coder = codec(name)
        twin = codec(name)
    flat, phi = flats(coder)
    for seed in (3, 4):  # with a residual, or what else is kept
        told: list[tuple[int, bytes]] = []
        wire = np.full(coder.begin(flat), 0xEE, np.uint8)
        at = 0

        def done(nbytes: int, wire: Bytes = wire, told: list[tuple[int, bytes]] = told) -> None:
            nonlocal at
            told.append((at, bytes(wire[at:nbytes])))
            at = nbytes

        with torch.no_grad():
            coder.write(wire, flat, phi, seed, done)
        assert all(bytes(wire[begin : begin + len(said)]) == said for begin, said in told)
        assert bytes(wire) == bytes(twin.encode(flat, reference=phi, seed=seed)[0].data)
        if coder.at_once:
            assert len(told) == 1
        else:
            assert len(told) >= 2 and len(told[0][1]) <= coder.nbytes(PARAMETERS) * 0.6, [len(said) for _, said in told]


@pytest.mark.parametrize("method", [name for name in METHODS if name != NONE])
def test_a_draft_is_not_moved_by_what_is_learnt_before_it_is_written(method: str) -> None:
    """The boundary is marked at once: inner steps may come between it and the writing."""
    wanted = {"partial_average": "topk64", "noloco": "modular4", "average": "bf16", "desloc": "fp32"}.get(
        method, "e3m0"
    )
    coding = wanted if wanted in CODECS_OF[method] else CODECS_OF[method][0]
    spec = GossipSpec(method=method, codec=coding)
    if method not in ("noloco", "average"):
        spec = replace(spec, group=0)
    one, other = (outer(spec, weights(1, 10_000), "somebody") for _ in range(2))
    for learner in (one, other):
        learner.theta.add_(weights(2, 10_000), alpha=0.01)
    draft = one.draft(1)
    one.theta.add_(1.0)
    drafted = draft.finish()
    assert draft.complete
    assert [bytes(t.data) for t in drafted] == [bytes(t.data) for t in other.message(1)]


def test_a_zero_is_sent_as_zero() -> None:
    for name in ("e3m0", "ternary"):
        coder = codec(name)
        flat = weights(1, 1000)
        out = torch.empty(1000)
        flat[::3] = 0.0
        coder.decode(coder.encode(flat, seed=1), out)
        assert not out[::3].any(), name

"""An accuser chooses what it shows: an input made for the weights of the accused convicts nobody."""

from dataclasses import replace

import torch

from swarmnode.app.machine.replica import TorchReplica
from swarmnode.base.ports import WireTensor
from swarmnode.model.tensor import decode, encode
from swarmnode.trust.accusation import NORMS_LEAST, UsualNorm
from swarmnode.trust.recompute import hop_again
from swarmnode.trust.verdict import LATER
from tests.support.tiny_model import TINY, ascend, manifest, token_batch, token_wire, train_on

WIDE = replace(TINY, layers=4, width=32, heads=4, kv_heads=2, ffn=88, context=32)


def made_for(replica: TorchReplica, x: WireTensor, tokens: WireTensor) -> WireTensor:
    """`x` moved up the loss of `replica` until its gradient vanishes."""
    v = decode(x).float().clone()
    mean = torch.zeros_like(v)
    square = torch.zeros_like(v)
    steps = 150
    for number in range(steps):
        result = replica.loss(encode(v.to(torch.bfloat16)), tokens, 4, train=True, accumulate=False)
        assert result.gradient is not None
        slope = decode(result.gradient).float()
        mean = 0.9 * mean + 0.1 * slope
        square = 0.99 * square + 0.01 * slope.square()
        root = (square / (1 - 0.99 ** (number + 1))).sqrt() + 1e-12
        v += 0.1 * (1 - number / steps) * mean / (1 - 0.9 ** (number + 1)) / root
    return encode(v.to(torch.bfloat16))


def test_an_input_whose_gradient_vanishes_is_told_from_ordinary_ones() -> None:
    run = manifest(WIDE, 2, "bf16")
    chain = [TorchReplica(run, stage, sender="a") for stage in range(2)]
    stages = [replica.stage for replica in chain]

    def step(seed: int) -> None:
        for number in range(2):
            train_on(stages, token_batch(WIDE, seed=2 * seed + number))
        for stage in stages:
            stage.step(1000)

    for seed in range(20):
        step(seed)
    accused = chain[1]
    tokens = token_wire(token_batch(WIDE, seed=500))
    ordinary, _ = ascend(stages, token_batch(WIDE, seed=500))
    made = made_for(accused, ordinary, tokens)
    signed = hop_again(accused, made, tokens, 4, None)[1][0]
    for seed in range(20, 24):
        step(seed)
    usual = UsualNorm(accused)
    assert usual.vanishes(signed, 4), "nothing is known yet"
    for seed in range(NORMS_LEAST):
        batch = token_batch(WIDE, seed=600 + seed)
        usual.record(hop_again(accused, ascend(stages, batch)[0], token_wire(batch), 4, None)[1][0], 4)
    again = hop_again(accused, made, tokens, 4, None)[1][0]
    assert accused.cosine(signed, again, 4) < LATER[-1][1], "an honest answer looks false four steps later"
    assert usual.vanishes(again, 4)
    assert not usual.vanishes(hop_again(accused, ordinary, tokens, 4, None)[1][0], 4)

"""Activations of a feeder whose weights are some dozens of steps older, near a run's start, are no lie."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from swarmnode.ids import PeerId
from swarmnode.machine.replica import TorchReplica
from swarmnode.pipeline.audit import ALIKE
from swarmnode.pipeline.auditor import Auditor
from swarmnode.pipeline.input_check import FeederInput, InputAuditor
from swarmnode.ports import Answer, Call, WireTensor
from swarmnode.wire import call_pb2 as wire
from tests.support.village import Numbers, manifest

USUAL = manifest(stages=2)
RUN = replace(USUAL, inner=replace(USUAL.inner, muon_learning_rate=0.01))
FEEDER, OTHER, THIRD = (PeerId(letter * 52) for letter in "abc")
STEPS = 48


class Asking:
    """As much of an Auditor as checks of feeders use. All that are asked read `tokens` and make `y` of them."""

    manifest = RUN
    boundary_digest = b""

    def __init__(self, replica: TorchReplica, tokens: WireTensor, y: WireTensor) -> None:
        self._replica = replica
        self._made = tokens, y
        self.outcomes = list[str]()

    def others(self, stage: int, *but: PeerId) -> Sequence[PeerId]:
        return [OTHER, THIRD]

    def other_feeders(self, *but: PeerId) -> Sequence[PeerId]:
        return [OTHER, THIRD]

    async def ask(self, peer: PeerId, call: Call, *, about: PeerId, timeout_s: float, most: int) -> Answer:
        tensors = self._made[1:] if call.tensors else self._made
        return Answer(wire.Reply(recompute=wire.Recomputed()), tensors)

    async def cosine(self, one: WireTensor, other: WireTensor, samples: int) -> float:
        return self._replica.cosine(one, other, samples)

    def record_right(self, *_: object) -> None:
        self.outcomes.append("right")

    def record_false(self, *_: object) -> None:
        self.outcomes.append("wrong")

    def tell(self, peer: PeerId, stage: int, outcome: str, reason: str) -> None:
        self.outcomes.append(outcome)


async def unused(*_: object) -> WireTensor:
    raise AssertionError("two others have agreed")


async def test_old_activations_are_no_lie_and_noise_is() -> None:
    first, last, text, each = TorchReplica(RUN, 0), TorchReplica(RUN, 1), Numbers(RUN), RUN.inner.microbatch
    asked = text.train(range(5000, 5000 + each))
    old, _ = first.forward(asked, keep=True, tokens=asked)
    for step in range(STEPS):
        tokens = text.train(range(step * each, (step + 1) * each))
        x, tape = first.forward(tokens, keep=True, tokens=tokens)
        gradient = last.loss(x, tokens, each, train=True).gradient
        assert tape is not None and gradient is not None
        first.backward(tape, gradient, each)
        for replica in (first, last):
            replica.step(step * each)
    new, _ = first.forward(asked, keep=True, tokens=asked)
    assert first.cosine(old, new, each) < ALIKE
    found = np.frombuffer(new.data, np.float32)
    drawn = np.random.default_rng(1).standard_normal(found.size, np.float32)
    noise = replace(new, data=(drawn * found.std()).tobytes())

    async def outcomes(x: WireTensor, tokens: WireTensor = asked) -> list[str]:
        asking = Asking(first, asked, new)
        fed = FeederInput(FEEDER, b"m" * 16, 5000, each, tokens, x)
        parts = cast(Auditor, asking), unused, unused
        await InputAuditor(*parts).check(fed)
        return asking.outcomes

    assert await outcomes(new) == ["right"]
    assert await outcomes(old) == ["undecided"]
    assert await outcomes(noise) == ["wrong"]
    swapped = replace(asked, data=bytes(memoryview(asked.data))[::-1])
    assert await outcomes(old, swapped) == ["wrong"], "other text is a lie at any age"

"""Training by forward passes alone (training.kind = "one_byte"): two losses of a microbatch become one byte."""

from __future__ import annotations

from dataclasses import dataclass

from swarmnode.gossip.outer.one_byte import OneByte
from swarmnode.model.stage import StageReplica
from swarmnode.ports import LossResult, StepReport, WireTensor


@dataclass(slots=True)
class ForwardTrainer:
    """Measures slopes for `shared` with the model `stage`. `waiting`: samples measured since the last inner step, which
    moves no weight here: steps are taken in rounds."""

    stage: StageReplica
    shared: OneByte
    waiting: int = 0
    slope: float = 0.0  # the newest, in nats a token

    def loss(self, x: WireTensor, tokens: WireTensor, samples: int, *, accumulate: bool) -> LossResult:
        """The mean of the losses on both sides along one direction; with `accumulate` the slope becomes a step. Theta
        is restored, also where a pass fails."""
        found = []
        for sign in (1.0, -1.0):
            with self.shared.perturbed(sign):
                found.append(self.stage.loss(x, tokens, samples, train=False))
        plus, minus = found
        if accumulate and plus.tokens:
            self.slope = self.shared.projected(plus.loss_sum / plus.tokens, minus.loss_sum / minus.tokens)
            self.shared.measure_step(self.slope)
        self.waiting += samples if accumulate else 0
        return LossResult((plus.loss_sum + minus.loss_sum) / 2.0, plus.tokens, None)

    def step(self) -> StepReport:
        """The end of the replica's share of a batch: reports, and changes nothing."""
        samples, self.waiting = self.waiting, 0
        rate = self.shared.rate(self.shared.done + 1)
        return StepReport(self.stage.inner_steps, abs(self.slope), rate, samples)

    def applied(self) -> None:
        """Weights moved in a round: the number of inner steps is that of the round."""
        self.stage.stepped_in_round(self.shared.done, abs(self.slope))

    def loaded(self) -> None:
        """Weights came from elsewhere."""
        self.waiting = 0
        self.shared.begin(self.stage.inner_steps)

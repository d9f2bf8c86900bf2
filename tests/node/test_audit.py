"""Replicas that answer false gradients are found out by the others, whole nodes against whole nodes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.attack.lying_replica import Steering
from swarmnode.base.errors import RemoteFault
from swarmnode.base.ports import Call, LossResult, Tape, WireTensor
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.run.manifest import Manifest
from swarmnode.train.pipeline.next_hop import onward
from swarmnode.trust.auditor import Auditor
from swarmnode.trust.stage_judge import StageJudge
from swarmnode.trust.statement import HopAnswer, HopClaim
from tests.support.village import Recording, SendsNoise, Village, Villager, excluded, told, village
from tests.support.village import manifest as usual


def auditor_of(person: Villager) -> Auditor:
    judge = person.served.parts.judge
    assert isinstance(judge, StageJudge)
    return judge.auditor


def manifest(stages: int) -> Manifest:
    """With many checks: the text is known by heart after a thousand samples."""
    run = usual(stages=stages)
    return replace(run, pipeline=replace(run.pipeline, audit_share=0.2))


def slow(stages: int) -> Manifest:
    """Its text is never known by heart: once it is, nothing is told from the noise that gradients are then."""
    run = manifest(stages)
    return replace(run, inner=replace(run.inner, learning_rate=1e-4, muon_learning_rate=1e-4))


def rare(run: Manifest) -> Manifest:
    """With steps as rare as on machines: weights that come within one are those that answered."""
    return replace(run, inner=replace(run.inner, inner_batch=128))


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Villagers answer a hundred times as fast as machines do."""
    monkeypatch.setattr("swarmnode.trust.audit.APART_S", 0.0)
    monkeypatch.setattr("swarmnode.trust.audit.EXAMINED_S", 0.1)
    monkeypatch.setattr("swarmnode.trust.recompute.PER_MINUTE_MAX", 1000)


class Liar(Recording):
    """A replica that answers something else than it computed, in one of `every` microbatches."""

    every = 1
    _served = 0

    def twisted(self, tensor: WireTensor) -> WireTensor:
        raise NotImplementedError

    def _lied(self, tensor: WireTensor | None) -> WireTensor | None:
        self._served += 1
        return tensor if tensor is None or self._served % self.every else self.twisted(tensor)

    def backward(self, tape: Tape, gradient: WireTensor, samples: int, *, accumulate: bool = True) -> WireTensor | None:
        return self._lied(super().backward(tape, gradient, samples, accumulate=accumulate))

    def loss(
        self, x: WireTensor, tokens: WireTensor, samples: int, *, train: bool, accumulate: bool = True
    ) -> LossResult:
        found = super().loss(x, tokens, samples, train=train, accumulate=accumulate)
        return replace(found, gradient=self._lied(found.gradient))


def scaled(tensor: WireTensor, factor: float) -> WireTensor:
    return replace(tensor, data=(np.frombuffer(tensor.data, np.float32) * np.float32(factor)).tobytes())


def turned(tensor: WireTensor, seed: int) -> WireTensor:
    """A tensor of about the same length, whose cosine to `tensor` is about 0.4."""
    found = np.frombuffer(tensor.data, np.float32)
    drawn = np.random.default_rng(seed).standard_normal(found.size, np.float32)
    noise = 0.92 * drawn * np.linalg.norm(found) / np.linalg.norm(drawn)
    return replace(tensor, data=(0.4 * found + noise).astype(np.float32).tobytes())


class Flips(Liar):
    def twisted(self, tensor: WireTensor) -> WireTensor:
        return scaled(tensor, -1.0)


class FlipsFar(Liar):
    def twisted(self, tensor: WireTensor) -> WireTensor:
        return scaled(tensor, -1e4)


class Noise(Liar):
    def twisted(self, tensor: WireTensor) -> WireTensor:
        found = np.frombuffer(tensor.data, np.float32)
        drawn = np.random.default_rng(self._served).standard_normal(found.size, np.float32)
        return replace(tensor, data=(drawn * found.std()).tobytes())


class Nothing(Liar):
    def twisted(self, tensor: WireTensor) -> WireTensor:
        return scaled(tensor, 0.0)


class Mixed(Liar):
    """As far from the truth as an honest replica's answers that stood still may be."""

    def twisted(self, tensor: WireTensor) -> WireTensor:
        return turned(tensor, self._served)


class FlipsAtTimes(Flips):
    every = 3


class Steers(Recording):
    """Each of its answers looks honest, audits' too; their mean points against the mean gradient (issue S1)."""

    how = "steer toward=mean cosine=.72 length=1.8"
    _steering: Steering | None = None

    def loss(
        self, x: WireTensor, tokens: WireTensor, samples: int, *, train: bool, accumulate: bool = True
    ) -> LossResult:
        found = super().loss(x, tokens, samples, train=train, accumulate=accumulate)
        if found.gradient is None:
            return found
        self._steering = self._steering or Steering.of(self.how)
        return replace(found, gradient=self._steering.answer(found.gradient, tokens, "fp32"))


class SteersFinely(Steers):
    how = "steer toward=mean cosine=.98 length=1.3"


class SteersActivations(Recording):
    """What it sends on has a cosine of .9 to the truth, and always leans one way."""

    truth = 0.9
    lean = 0.43

    def forward(
        self, x: WireTensor, *, keep: bool, graph: bool = True, tokens: WireTensor | None = None, late: bool = False
    ) -> tuple[WireTensor, Tape | None]:
        y, tape = super().forward(x, keep=keep, graph=graph, tokens=tokens, late=late)
        true = np.frombuffer(y.data, np.float32).reshape(y.shape)
        way = np.broadcast_to(np.random.default_rng(1).standard_normal(y.shape[-1]), y.shape)
        given = self.truth * true + self.lean * way * (np.linalg.norm(true) / np.linalg.norm(way))
        return replace(y, data=given.astype(np.float32).tobytes()), tape


class SteersActivationsFar(SteersActivations):
    """A cosine of .6."""

    truth = 0.6
    lean = 0.8


class Misstates(Flips):
    """States that its weights took other numbers of inner steps than those it gives."""

    more = 10**6

    @property
    def inner_steps(self) -> int:
        return super().inner_steps + self.more


class MisstatesLittle(Misstates):
    """By so few that a busy replica could have taken them since."""

    more = 200


async def found_out(v: Village, liar: Villager) -> None:
    """Wait until a feeder has excluded `liar`; nobody else may have been."""
    await v.until(lambda: any(liar.node.me in excluded(person) for person in v.people), "the liar is found out", 240.0)
    assert not any(excluded(person) - {liar.node.me} for person in v.people), "nobody honest is"


@pytest.mark.parametrize(
    ("kind", "replicas"), [(Flips, 2), (Flips, 3), (FlipsFar, 2), (Noise, 3), (Nothing, 2), (FlipsAtTimes, 3)]
)
async def test_a_replica_that_answers_false_gradients_is_excluded(kind: type[Liar], replicas: int) -> None:
    async with village(manifest(stages=2)) as v:
        liar = v.add(1, kind)
        for _ in range(replicas - 1):
            v.add(1)
        v.add(0)
        await found_out(v, liar)
        others = [person.served.hop for person in v.people if person.node.stage == 1 and person is not liar]
        theirs = sum(hop.samples for hop in others)
        its = liar.served.hop.samples
        done = v.total()
        await v.until(lambda: v.total() > done + 64, "the others go on without it")
        assert sum(hop.samples for hop in others) > theirs
        assert liar.served.hop.samples <= its + 4 * 8, "it gets no more work"


@pytest.mark.parametrize(
    ("kind", "replicas", "feeders"),
    [
        (Steers, 2, 1),
        (Steers, 3, 2),
        pytest.param(SteersFinely, 2, 1, marks=pytest.mark.nightly),
        pytest.param(SteersFinely, 3, 2, marks=pytest.mark.nightly),
    ],
)
async def test_a_replica_that_steers_by_answers_that_look_honest_is_excluded(
    kind: type[Steers], replicas: int, feeders: int
) -> None:
    """By every caller; who suspects it uses none of its answers meanwhile."""
    async with village(rare(slow(stages=2))) as v:
        liar = v.add(1, kind)
        for _ in range(replicas - 1):
            v.add(1)
        callers = [v.add(0) for _ in range(feeders)]
        await v.until(lambda: all(liar.node.me in excluded(one) for one in callers), "all exclude it", 240.0)
        assert not any(excluded(person) - {liar.node.me} for person in v.people), "nobody honest is"


async def test_an_answer_that_its_weights_clear_is_used_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The liar's answers no longer speak against it, however long the liar's own examination takes."""
    monkeypatch.setattr("swarmnode.trust.audit.EXAMINED_S", 3.0)
    monkeypatch.setattr("swarmnode.trust.audit.APART_S", 7.5)
    async with village(slow(stages=2)) as v:
        liar = v.add(1, Steers)
        honest = v.add(1)
        callers = [v.add(0), v.add(0)]
        await v.until(lambda: v.total() > 1024, "training")
        lies = liar.served.hop.samples
        answers = honest.served.hop.samples
        assert 4 * lies < answers, f"{lies} samples of the liar, {answers} of the other one"
        assert not any(honest.node.me in excluded(one) for one in callers)


@pytest.mark.parametrize("old", ["caller", "server"])
async def test_a_server_without_marks_is_checked_as_well(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that does not ask gets a statement without one, which verifies; and so does one that gets none."""

    def asked(process: wire.Process) -> wire.Process:
        request = onward(process)
        request.mark_position = 0 if old == "caller" else 99
        return request

    monkeypatch.setattr("swarmnode.train.pipeline.hop.onward", asked)
    async with village(manifest(stages=2), stages=(0, 1, 1)) as v:
        rights = lambda: v.people[0].quiet.total("swarmnode_audits_total", outcome="right")  # noqa: E731
        await v.until(lambda: rights() >= 4, "answers are checked")
        assert not any(excluded(person) for person in v.people)


@pytest.mark.parametrize(
    ("kind", "run", "lies", "others"),
    [
        # The weights it gives never seem to be those that answered; the other replica's answer fits its own.
        pytest.param(Misstates, slow(2), 1, (1, 0), id="misstates its steps, in a stage of two"),
        pytest.param(MisstatesLittle, slow(2), 1, (1, 0), id="misstates them little"),
        # Neither the last stage, which works with what it sends, nor another replica of its own stage is blamed.
        pytest.param(Flips, manifest(3), 1, (1, 1, 2, 2, 0), id="the middle one of three stages"),
        pytest.param(SendsNoise, manifest(3), 1, (1, 1, 2, 2, 0), id="the middle one sends noise"),
        pytest.param(Flips, manifest(3), 2, (2, 2, 1, 1, 0), id="the last of three stages"),
        pytest.param(Mixed, slow(2), 1, (1, 1, 0), id="partly right, judged by own weights"),
    ],
)
async def test_blame_falls_on_the_one_that_lied(
    kind: type[Recording], run: Manifest, lies: int, others: tuple[int, ...]
) -> None:
    async with village(run) as v:
        liar = v.add(lies, kind)
        for stage in others:
            v.add(stage)
        await found_out(v, liar)


@pytest.mark.parametrize("stages", [2, 3])
async def test_the_others_of_its_stage_exclude_it_too(stages: int) -> None:
    """They see none of its answers. A caller shows them two that are false, and no round counts it any more."""
    async with village(manifest(stages)) as v:
        liar = v.add(1, Flips)
        mates = [v.add(1), v.add(1)]
        for stage in (0, 0, *range(2, stages)):
            v.add(stage)
        await v.until(lambda: all(excluded(mate) for mate in mates), "both mates exclude the liar")
        assert all(excluded(mate) == {liar.node.me} for mate in mates)
        await v.trains(256, "rounds go on")
        for mate in mates:
            rounds = [f for event, f in mate.quiet.events if event in ("exchange.paired", "exchange.lone")]
            assert rounds[-1]["peer"] != liar.node.me, "it meets nobody"


async def test_a_lie_as_near_as_honest_answers_convinces_who_is_shown_the_weights_that_made_it() -> None:
    """It is no farther from other answers than usual; the very weights that answered give another one."""
    run = manifest(stages=2)
    still = replace(run.gossip, round_samples=2**16), replace(run.inner, inner_batch=2**16)  # no step is taken
    async with village(replace(run, gossip=still[0], inner=still[1])) as v:
        liar, _, *callers = (v.add(1, SteersFinely), v.add(1), v.add(0), v.add(0))
        await v.until(lambda: all(caller.node.served is not None for caller in callers), "they feed")
        auditors = [auditor_of(caller) for caller in callers]
        claims = list[HopClaim]()
        for auditor in auditors:
            auditor.observe_answer = claims.append  # type: ignore[assignment, method-assign]
        await v.until(lambda: v.total() > 256, "both callers know the usual length of answers")
        shower, judge = auditors
        lies = [claim for claim in claims if (claim.server, claim.statement.client) == (liar.node.me, shower.me)]
        for claim in lies[-2:]:
            can = lambda: judge.audits.weighable(liar.node.me, asyncio.get_running_loop().time())  # noqa: E731
            await v.until(can, "the weights may be fetched again")
            await shower._accuse(claim, None, HopAnswer(claim.gradient, None, 0.0))
            await v.until(lambda: not can(), "they were fetched")  # noqa: B023
        await v.until(lambda: excluded(callers[1]) == {liar.node.me}, "the other caller excludes it")


@pytest.mark.parametrize("stages", [2, 3])
async def test_an_honest_answer_cannot_be_made_to_look_false(stages: int) -> None:
    """Neither with the tensors it was given for, nor with others."""
    async with village(manifest(stages)) as v:
        served = [v.add(1), v.add(1)]
        for stage in (0, *range(2, stages)):
            v.add(stage)
        await v.until(lambda: v.total() > 0, "training")
        feeder = next(person for person in v.people if person.node.stage == 0)
        auditor = auditor_of(feeder)
        claims = list[HopClaim]()
        auditor.observe_answer = claims.append  # type: ignore[assignment, method-assign]
        await v.until(lambda: len(claims) >= 4, "some answers")
        told = lambda: sum(event == "audit.done" for p in served for event, _ in p.quiet.events)  # noqa: E731
        for claim in claims[-2:]:
            shown = await auditor.witnesses.opened(claim) if stages == 3 else None
            before = told()
            await auditor._accuse(claim, shown, HopAnswer(claim.gradient, shown and shown.sent, 0.0))  # type: ignore[arg-type]
            await v.until(lambda before=before: told() > before, "the other replica looked into it")  # type: ignore[misc]
            mate = next(p.node.me for p in served if p.node.me != claim.server)
            false = replace(claim, gradient=scaled(claim.gradient, -1.0))
            said = wire.Accusation(statement=claim.statement, samples=claim.samples)
            said.boundary_digest = auditor.witnesses.boundary_digest
            if shown:
                said.next.CopyFrom(shown.next)
            tensors = (false.x, false.tokens, false.gradient, *((shown.sent, shown.got) if shown else ()))
            call = Call(wire.Request(run_id=auditor.run_id, accusation=said), tensors)
            with pytest.raises(RemoteFault, match="do not match its statement"):
                await auditor.witnesses.transport.call(mate, call, timeout_s=30.0, reply_bytes_max=4096)
        assert not any(excluded(person) for person in v.people)


async def test_an_honest_answer_far_from_others_is_not_called_false() -> None:
    """Its server may have stood still, or the check comes late: near a run's start the others have learned a nat since.
    Its own weights decide, as far as they can."""
    async with village(manifest(stages=2), stages=(1, 1, 1, 0)) as v:
        feeder = v.people[-1]
        await v.until(lambda: feeder.node.served is not None, "the feeder serves its stage")
        auditor = auditor_of(feeder)
        claims = list[HopClaim]()
        auditor.observe_answer = claims.append  # type: ignore[assignment, method-assign]
        await v.until(lambda: len(claims) >= 4 and v.total() >= 288, "they learn")
        for early in (*claims[:4], claims[-1]):
            claim = replace(early, came_s=asyncio.get_running_loop().time())
            await auditor._by_own_weights(claim, None, [(claim.server, claim.answer(None))])
        outcomes = {str(one["outcome"]) for one in told(feeder, "audit.done")}
        assert outcomes <= {"right", "undecided"}, outcomes
        assert not any(excluded(person) for person in v.people)


@pytest.mark.parametrize("boundary", ["bf16", "int4", "int4_int2"])
async def test_honest_replicas_confirm_each_other(boundary: str) -> None:
    run = manifest(stages=2)
    run = replace(run, pipeline=replace(run.pipeline, boundary=boundary))
    async with village(run, stages=(0, 0, 1, 1, 1)) as v:

        def found(outcome: str) -> float:
            return sum(person.quiet.total("swarmnode_audits_total", outcome=outcome) for person in v.people)

        await v.until(lambda: found("right") >= 20, "answers are checked")
        assert not any(excluded(person) for person in v.people) and found("wrong") == 0


def misread(tokens: WireTensor) -> WireTensor:
    """Other tokens of the same shape."""
    found = np.frombuffer(tokens.data, "<u2").reshape(tokens.shape)
    return replace(tokens, data=np.ascontiguousarray(found[:, ::-1]).tobytes())


@pytest.mark.parametrize(
    ("lie", "feeders"),
    [("labels", 2), pytest.param("text", 3, marks=pytest.mark.nightly), ("activations", 2), ("text", 2)],
)
async def test_a_feeder_whose_samples_are_not_the_text_is_excluded(lie: str, feeders: int) -> None:
    async with village(manifest(stages=2)) as v:
        liar = v.add(0, SendsNoise if lie == "activations" else None)
        for stage in (*[0] * (feeders - 1), 1, 1):
            v.add(stage)
        await v.until(lambda: liar.node.served is not None and liar.served.parts.feeder is not None, "the liar feeds")
        send = liar.served.hop.run_microbatch

        async def lying(process, x, tokens, *rest):  # type: ignore[no-untyped-def]
            return await send(process, misread(x) if lie == "text" else x, misread(tokens), *rest)

        if lie != "activations":
            liar.served.hop.run_microbatch = lying  # type: ignore[method-assign]
        servers = [person for person in v.people if person.node.stage == 1]
        await v.until(lambda: all(liar.node.me in excluded(person) for person in servers), "it is found out")
        assert not any(excluded(person) - {liar.node.me} for person in v.people if person is not liar)
        fed = liar.node.presence.progress.feeders.get(liar.node.me, 0)
        await v.trains(64, "the others go on")
        assert liar.node.presence.progress.feeders.get(liar.node.me, 0) <= fed + 8 * 8


async def test_activations_of_a_feeder_that_lean_one_way_are_not_trained_on() -> None:
    """Each looks honest. Forwards with predicted weights state no mark, so its weights seldom convict it."""
    async with village(slow(stages=2)) as v:
        liar = v.add(0, SteersActivations)
        for stage in (0, 0, 1, 1):
            v.add(stage)
        servers = [person for person in v.people if person.node.stage == 1]
        await v.until(lambda: all(person.node.served is not None for person in servers), "they serve")
        audits = [auditor_of(person).audits for person in servers]
        out = lambda: all(one.means(0).aside(liar.node.me) or one.convicted(liar.node.me) for one in audits)  # noqa: E731
        await v.until(out, "it stands aside")
        assert not any(excluded(person) - {liar.node.me} for person in v.people)
        fed = liar.node.presence.progress.feeders.get(liar.node.me, 0)
        await v.trains(64, "the others go on")
        assert liar.node.presence.progress.feeders.get(liar.node.me, 0) <= fed + 8 * 8


async def test_a_feeder_that_stands_aside_is_examined_by_what_it_sends_and_excluded() -> None:
    """Its microbatches are refused meanwhile. Two of them convicted it once it had come back, if it ever did."""
    async with village(rare(slow(stages=2))) as v:
        liar = v.add(0, SteersActivationsFar)
        for stage in (0, 0, 1, 1):
            v.add(stage)
        servers = [person for person in v.people if person.node.stage == 1]
        await v.until(lambda: all(liar.node.me in excluded(one) for one in servers), "all exclude it", 240.0)
        assert not any(excluded(person) - {liar.node.me} for person in v.people), "nobody honest is"
        assert liar.node.presence.progress.feeders.get(liar.node.me, 0) <= 200 * 8

"""Whole nodes that average gradients before each step: one leaves, the batch grows, all step together."""

import asyncio
import dataclasses

import pytest
import torch

from swarmnode.base.ids import PeerId
from swarmnode.run.manifest import Manifest
from swarmnode.train.node.notice import NoticeKind
from tests.support.village import Amending, Village, Villager, manifest, told, village

BATCH = 8


def run_of() -> Manifest:
    run = manifest(1, "gradient", codec="int8", group=0, round_samples=BATCH)
    # No validation: while all three do it, nobody has trained anything for the step.
    pipeline = dataclasses.replace(run.pipeline, validation_every_samples=1 << 20)
    inner = dataclasses.replace(run.inner, inner_batch=BATCH, microbatch=4, decay="constant")
    model = dataclasses.replace(run.model, vocabulary=256)
    return dataclasses.replace(run, pipeline=pipeline, inner=inner, model=model)


def steps(person: Villager) -> int:
    return person.served.gossip.done if person.node.served is not None else 0


async def all_step(here: Village, by: int) -> None:
    begun = [steps(person) for person in here.people]
    await here.until(
        lambda: all(steps(p) >= before + by for p, before in zip(here.people, begun, strict=True)), f"{by} rounds"
    )


@pytest.mark.parametrize(("codec", "fragments"), [("int8", 1), ("lloyd4", 3)])
async def test_a_node_that_leaves_hands_its_gradient_over_and_the_others_go_on(codec: str, fragments: int) -> None:
    """Also where rows take turns: the final delta is of all rows."""
    run = run_of()
    run = dataclasses.replace(run, gossip=dataclasses.replace(run.gossip, codec=codec, fragments=fragments))
    async with village(run, stages=(0, 0, 0)) as here:
        await all_step(here, 8)
        leaves = here.people.pop(1)
        leaves.notices.leave("told to", NoticeKind.STOP)
        assert leaves.task is not None
        report = await leaves.task
        assert report.held == report.finished and not report.cut
        await all_step(here, 8)
        one, other = (person.replica.stage.theta for person in here.people)
        assert float((one - other).norm()) < 0.05 * float(one.norm()), "a step or two apart, which heals"


@pytest.mark.nightly
async def test_pieces_of_rows_in_turn_keep_members_equal() -> None:
    run = run_of()
    run = dataclasses.replace(run, gossip=dataclasses.replace(run.gossip, codec="lloyd3", fragments=3, butterfly=True))
    async with village(run, stages=(0, 0, 0)) as here:
        await all_step(here, 4)
        done = [steps(person) for person in here.people]
        thetas = [person.replica.stage.theta for person in here.people]
        same = [theta for theta, at in zip(thetas, done, strict=True) if at == done[0]]
        assert all(float((theta - thetas[0]).norm()) < 0.01 * float(theta.norm()) for theta in same)


async def test_all_that_begin_a_run_at_once_take_its_first_step_together() -> None:
    async with village(run_of(), stages=(0,) * 5) as here:
        await all_step(here, 4)
        for person in here.people:
            groups = told(person, "exchange.group")
            assert groups[0]["round"] == 1 and len(groups[0]["peers"]) == 4  # type: ignore[arg-type]


async def test_a_feeder_that_is_through_gets_no_room_within_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A live swarm of three stood still: a speed that somebody announced gave both of the others a larger share while
    their feeders were through with theirs, so the feeders waited for the round and the round for the feeders."""
    async with village(run_of(), stages=(0, 0, 0)) as here:
        await all_step(here, 2)
        gossip = here.people[0].served.gossip
        speed = [1e3]
        monkeypatch.setattr(gossip, "_own_share", lambda share: share.of("me", {"me": speed[0], "other": 1e3}))
        step = gossip.done
        room = gossip.room()
        speed[0] = 4e3
        assert gossip.room() == room and gossip.done == step
        await all_step(here, 2)


async def test_the_batch_of_a_run_under_way_doubles() -> None:
    async with village(run_of()) as here:
        owner = Amending(here)
        for _ in range(3):
            here.add(0)
        await all_step(here, 8)
        owner.sign(max(map(steps, here.people)) + 4, {"inner.inner_batch": 2 * BATCH})
        await all_step(here, 12)
        assert all(steps(person) % 2 == 0 for person in here.people), "a step is two rounds of samples now"
        before = [(steps(person), person.served.hop.inner_steps) for person in here.people]
        await all_step(here, 8)
        for person, (rounds, taken) in zip(here.people, before, strict=True):
            assert person.served.hop.inner_steps - taken == (steps(person) - rounds) // 2
        assert torch.isfinite(here.people[0].replica.stage.theta).all()


def on_lines(v: Village, nbytes_per_s: float) -> None:
    """Lines from now on: each machine's carries so much up, one thing after another."""
    free_s: dict[PeerId, float] = {}

    async def carried(sender: PeerId, receiver: PeerId, nbytes: int) -> None:
        now_s = asyncio.get_running_loop().time()
        free_s[sender] = max(now_s, free_s.get(sender, 0.0)) + nbytes / nbytes_per_s
        await asyncio.sleep(free_s[sender] - now_s)

    v.network.link = carried


async def test_a_joiner_over_a_thin_line_takes_the_state_once_and_steps_with_the_others() -> None:
    """A state takes some steps to come over a home line. The joiner took it for sleep, and took the state again and
    again, while the others waited for it."""
    async with village(run_of()) as here:
        here.sample_s = 0.02
        for _ in range(2):
            here.add(0)
        await all_step(here, 4)
        packet = int(str(told(here.people[0], "exchange.paired")[-1]["sent_bytes"]))
        on_lines(here, packet / 0.15)
        await all_step(here, 4)
        joiner = here.add(0)
        await here.until(lambda: len(told(joiner, "exchange.group")) >= 8, "it steps with both")
        assert len(told(joiner, "recovery.done")) == 1 and not told(joiner, "state.behind")
        waits = [float(str(one["seconds"])) for p in here.people[:2] for one in told(p, "exchange.paired")]
        assert max(waits) < 12 * 0.15, "the state is eight packets on the same line, and nobody waits in vain"

"""Receipts say what machines gave: over the machines of a stage it is what the run trained, whatever the
method, the mask and the number of stages, and however they come and go."""

import asyncio
import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from swarmnode.app.machine.receipt_store import Receipts, given
from swarmnode.base.errors import Unavailable
from swarmnode.base.ids import PeerId
from swarmnode.base.metrics import name
from swarmnode.base.ports import Answer, Call, WireTensor
from swarmnode.base.work import Work
from swarmnode.run.manifest import Manifest
from swarmnode.train.node.report import FAREWELL_S, ReceiptExchange
from tests.support.village import RUN, LoopClock, Numbers, Village, Villager, manifest, village

WITHIN = 0.02


class Masked(Numbers):
    """Of each sample a fifth of the targets count, of every fourth none."""

    def train(self, indices: Sequence[int]) -> WireTensor:
        ids = self.tokens(indices).astype(np.uint32)
        keep = np.arange(ids.shape[1])[None, :] % 5 == 1
        keep = keep & (np.asarray(indices)[:, None] % 4 != 0)
        packed = np.where(keep, ids, ids | (1 << 31)).astype("<u4")
        return WireTensor("u32", packed.shape, packed.tobytes())


class Books:
    """The receipts of everybody in a village, as each process of a node collects them."""

    def __init__(self, v: Village, folder: Path) -> None:
        self._v = v
        self._folder = folder
        self.exchanges: dict[str, ReceiptExchange] = {}

    def attend(self, person: Villager) -> None:
        """Let `person` sign and collect."""
        home = self._folder / person.node.me
        home.mkdir(exist_ok=True)
        model = self._v.run.model
        self.exchanges[person.node.me] = one = ReceiptExchange(
            RUN,
            person.identity,
            person.node.transport.work,
            LoopClock(),
            person.quiet,
            Receipts(home).keep,
            alone=self._v.run.pipeline.stages == 1,
            context=model.context,
        )
        one.serve(person.transport)

    async def leave(self, person: Villager) -> None:
        """`person` leaves as a process does: it finishes what it holds, then says farewell."""
        person.notices.leave("the test is over")
        assert person.task is not None
        await person.task
        await self.exchanges[person.node.me].farewell(person.transport)

    def gave(self, person: Villager) -> Work:
        return given(self._folder / person.node.me, RUN)


def run_of(stages: int, method: str) -> Manifest:
    if method == "gradient":
        run = manifest(stages, method, codec="int8", group=0, round_samples=8)
    else:
        run = manifest(stages, method)
    pipeline = dataclasses.replace(run.pipeline, validation_every_samples=1 << 20)
    return dataclasses.replace(run, pipeline=pipeline)


def check_law(v: Village, books: Books, staffed: Sequence[Sequence[Villager]], *, masked: bool) -> None:
    """Over each stage's machines the receipts add up to what was fed."""
    context = v.run.model.context
    fed = v.total()
    assert fed > 300
    for stage, people in enumerate(staffed):
        total = sum((books.gave(person) for person in people), Work())
        assert total.samples == pytest.approx(fed, rel=WITHIN), f"stage {stage}"
        assert total.tokens == total.samples * context
        share = 0.75 * 4 / 16 if masked else 1.0
        assert total.targets == pytest.approx(share * total.tokens, rel=0.05 if masked else 0.0), f"stage {stage}"


@pytest.mark.parametrize(
    "masked", [pytest.param(False, marks=pytest.mark.nightly, id="plain"), pytest.param(True, id="masked")]
)
@pytest.mark.parametrize(
    ("method", "stages"), [("average", 1), ("gradient", 1), ("noloco", 1), ("average", 2), ("noloco", 2), ("noloco", 3)]
)
async def test_over_a_stages_machines_it_is_what_the_run_trained(
    tmp_path: Path, method: str, stages: int, masked: bool
) -> None:
    async with village(run_of(stages, method), Masked if masked else Numbers) as v:
        people = [v.add(number % stages) for number in range(2 * stages)]
        books = Books(v, tmp_path)
        for person in people:
            books.attend(person)
        await v.fed(400)
        for person in sorted(people, key=lambda person: person.node.stage or 0):
            await books.leave(person)
        check_law(v, books, [people[stage::stages] for stage in range(stages)], masked=masked)


def lose_answers(person: Villager, every: int) -> None:
    """One in `every` answers to the microbatches of `person` is lost on its way back."""
    send = person.transport.call
    count = itertools.count(1)

    async def lossy(peer: PeerId, call: Call, *, timeout_s: float, reply_bytes_max: int) -> Answer:
        answer = await send(peer, call, timeout_s=timeout_s, reply_bytes_max=reply_bytes_max)
        if call.header.HasField("process") and next(count) % every == 0:
            raise Unavailable("lost on its way back")
        return answer

    person.transport.call = lossy  # type: ignore[method-assign]


async def test_neither_audits_nor_lost_answers_count_twice(tmp_path: Path) -> None:
    """A fifth of the answers is made again elsewhere, and some are lost on their way back."""
    run = run_of(2, "noloco")
    run = dataclasses.replace(run, pipeline=dataclasses.replace(run.pipeline, audit_share=0.2))
    async with village(run, Masked) as v:
        people = [v.add(number % 2) for number in range(6)]
        books = Books(v, tmp_path)
        for person in people:
            books.attend(person)
        lose_answers(people[0], 20)
        await v.fed(900)
        assert sum(len(person.quiet.all("audit.done")) for person in people) > 10
        assert people[0].quiet.total(name.MICROBATCHES, outcome="retried") > 3
        for person in sorted(people, key=lambda person: person.node.stage or 0):
            await books.leave(person)
        check_law(v, books, [people[0::2], people[1::2]], masked=True)


async def test_receipts_follow_the_work_and_outlive_a_client(tmp_path: Path) -> None:
    """While the run goes on, what a server shows is nearly all that it did; a client that is killed takes little."""
    async with village(run_of(2, "noloco")) as v:
        people = [v.add(0), v.add(1), v.add(0)]
        books = Books(v, tmp_path)
        tasks = []
        loop = asyncio.get_running_loop()
        for person in people:
            books.attend(person)
            tasks.append(loop.create_task(books.exchanges[person.node.me].collect(person.transport)))
        await v.fed(1500)
        server = people[1]

        def signed_nearly_all() -> bool:
            return books.gave(server).samples >= 0.9 * server.served.hop.samples

        await v.until(signed_nearly_all, "receipts as new as the work")
        await people[2].die()
        await books.leave(people[0])
        await books.leave(server)
        assert books.gave(server).samples == pytest.approx(v.total(), rel=0.1)
        for task in tasks:
            task.cancel()


def test_a_farewell_has_a_bound() -> None:
    assert 0.0 < FAREWELL_S <= 5.0, "a spot machine has two minutes, a laptop's lid none"

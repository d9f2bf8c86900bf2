"""Whole nodes that average gradients in pieces: all hold equal weights to the bit, whoever comes, dies or lies."""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from swarmnode.base.errors import PeerTimeout, RemoteFault
from swarmnode.base.ids import PeerId
from swarmnode.base.ports import Answer, Call, Data, GivenPiece, MeanPiece, OuterReport, Packet
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.net.membership.liveness import PING_TIMEOUT_S
from swarmnode.run.manifest import Manifest
from swarmnode.train.gossip.butterfly.word import say
from swarmnode.train.gossip.exchange_driver import PARTNER_PATIENCE_S
from tests.node.test_gradient import all_step, run_of, steps
from tests.support.village import RUN, Recording, Village, Villager, excluded, told, village


def in_pieces(batch: int = 8) -> Manifest:
    run = run_of()
    gossip = dataclasses.replace(run.gossip, butterfly=True, round_samples=batch)
    return dataclasses.replace(run, gossip=gossip, inner=dataclasses.replace(run.inner, inner_batch=batch))


def weights(person: Villager) -> torch.Tensor:
    assert person.replica is not None
    return person.replica.stage.theta


class Noting(Recording):
    """Notes the digest of its weights after each round in pieces."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.after: dict[int, bytes] = {}

    def apply_pieces(
        self, round_index: int, means: Sequence[Data | None], taken: Sequence[bool], final_deltas: Sequence[Packet]
    ) -> OuterReport:
        report = super().apply_pieces(round_index, means, taken, final_deltas)
        self.after[round_index] = self.digest()
        return report


def check_alike(people: Sequence[Villager], least: int) -> None:
    """AssertionError unless the weights of all were equal to the bit after each round that they have in common, and
    these are `least` or more."""
    noted = [person.replica.after for person in people if isinstance(person.replica, Noting)]
    assert len(noted) == len(people)
    common = set.intersection(*[set(after) for after in noted])
    assert len(common) >= least, sorted(common)
    assert all(len({after[k] for after in noted}) == 1 for k in common), "unequal weights"


def add(here: Village, count: int, stage: int = 0) -> list[Villager]:
    return [here.add(stage, Noting) for _ in range(count)]


async def test_three_nodes_step_alike_to_the_bit() -> None:
    async with village(in_pieces()) as here:
        add(here, 3)
        await all_step(here, 10)
        check_alike(here.people, 3)
        for person in here.people:
            await here.until(lambda: len(told(person, "exchange.group")) >= 10, "each of ten steps is told")  # noqa: B023
            assert not told(person, "exchange.lone")
            assert not excluded(person)


def slow(person: Villager) -> list[float]:
    """Seconds of its rounds that waited for somebody: a loaded machine takes a second or two without."""
    return [
        float(str(fields["seconds"]))
        for fields in told(person, "exchange.paired")
        if float(str(fields["seconds"])) > 0.8 * PARTNER_PATIENCE_S
    ]


def kind_of(call: Call) -> str:
    """The kind of a call of a round in pieces."""
    body = call.header.butterfly
    kind = body.WhichOneof("body") or ""
    return wire.RoundWord.FromString(body.word.word).WhichOneof("body") or "" if kind == "word" else kind


def dies_at(person: Villager, kind: str, round_index: int, after: int = 0) -> None:
    """`person` dies in a round, when it is to send the first call of `kind` after so many."""
    inner = person.transport.call
    sent = [0]

    async def call(peer: PeerId, call: Call, *, timeout_s: float, reply_bytes_max: int) -> Answer:
        if call.header.HasField("butterfly") and kind_of(call) == kind and steps(person) >= round_index:
            sent[0] += 1
            if sent[0] > after:
                dying.append(asyncio.ensure_future(person.die()))
                raise RemoteFault("it is dead")
        return await inner(peer, call, timeout_s=timeout_s, reply_bytes_max=reply_bytes_max)

    dying = list[asyncio.Future[None]]()
    person.transport.call = call  # type: ignore[method-assign]


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("kind", ["commit", "roster", "pieces", "means", "close"])
async def test_a_node_dies_in_the_middle_of_each_phase(kind: str, after: int) -> None:
    async with village(in_pieces()) as here:
        add(here, 4)
        await all_step(here, 4)
        victim = here.people[1]
        dies_at(victim, kind, 5, after)
        await here.until(lambda: victim.task is not None and victim.task.done(), "it dies")
        here.people.remove(victim)
        await all_step(here, 6)
        check_alike(here.people, 3)
        for person in here.people:
            assert len(slow(person)) <= 2 and max(slow(person), default=0.0) < 6.0 * PING_TIMEOUT_S, (
                "a ping, and it goes on"
            )
            assert not excluded(person)


async def test_an_odd_number_steps_alike_and_a_newcomer_takes_part() -> None:
    """A newcomer's moments come in bfloat16: it is as near as that."""
    async with village(in_pieces()) as here:
        add(here, 5)
        await all_step(here, 3)
        first = [*here.people]
        newcomer = here.add(0)
        await here.until(lambda: newcomer.node.served is not None, "it serves")
        await all_step(here, 4)
        check_alike(first, 4)
        apart = float((weights(newcomer) - weights(first[0])).norm())
        assert apart < 0.1 * float(weights(first[0]).norm()), "a step apart at most"
        met = told(first[0], "exchange.group")[-1]["peers"]
        assert isinstance(met, list) and newcomer.node.me in met


def counts_bulk(person: Villager) -> list[int]:
    """Fills with the bytes of each piece or mean that `person` sends or shows."""
    inner = person.transport.call
    butterfly = person.served.gossip.butterfly
    sent = list[int]()
    served = butterfly._serve_wanted

    async def call(peer: PeerId, call: Call, *, timeout_s: float, reply_bytes_max: int) -> Answer:
        if call.header.HasField("butterfly"):
            sent.extend(tensor.nbytes for tensor in call.tensors)
        return await inner(peer, call, timeout_s=timeout_s, reply_bytes_max=reply_bytes_max)

    def serve(body: wire.PieceRequest) -> Answer:
        answer = served(body)
        sent.extend(tensor.nbytes for tensor in answer.tensors)
        return answer

    person.transport.call = call  # type: ignore[method-assign]
    butterfly._serve_wanted = serve  # type: ignore[method-assign]
    return sent


@pytest.mark.nightly
async def test_sixteen_step_alike_and_send_two_packets_each() -> None:
    """All to all, each would send fifteen. An eighth more is for checks."""
    async with village(in_pieces(16)) as here:
        add(here, 16)
        await all_step(here, 2)
        sent = {person.node.me: counts_bulk(person) for person in here.people}
        begun = {person.node.me: steps(person) for person in here.people}
        await all_step(here, 3)
        check_alike(here.people, 3)
        packets = list[float]()
        for person in here.people:
            assert person.replica is not None
            rounds = steps(person) - begun[person.node.me]
            packets.append(sum(sent[person.node.me]) / rounds / person.replica.outer.message_nbytes)
        mean = sum(packets) / len(packets)
        assert 1.5 < mean < 2.5 and max(packets) < 4.0, packets


async def test_three_replicas_of_each_of_two_stages_step_alike() -> None:
    run = in_pieces()
    run = dataclasses.replace(run, pipeline=dataclasses.replace(run.pipeline, stages=2))
    async with village(run) as here:
        add(here, 3)
        add(here, 3, stage=1)
        await all_step(here, 6)
        for stage in range(2):
            here_now = [person for person in here.people if person.node.stage == stage]
            check_alike(here_now, 4)


class ThinLines:
    """Every node's line up carries `bytes_per_s`; small messages go first."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free = dict[str, float]()

    async def __call__(self, sender: PeerId, receiver: PeerId, nbytes: int) -> None:
        now = asyncio.get_running_loop().time()
        begins = now if nbytes <= 1500 else max(now, self._free.get(sender, 0.0))
        ends = begins + nbytes / self._bytes_per_s
        if nbytes > 1500:
            self._free[sender] = ends
        await asyncio.sleep(ends + 0.03 - now)


@pytest.mark.nightly
async def test_a_step_over_thin_lines_takes_less_than_with_whole_packets() -> None:
    step_s = dict[bool, float]()
    for butterfly in (False, True):
        run = in_pieces(6)
        run = dataclasses.replace(run, gossip=dataclasses.replace(run.gossip, butterfly=butterfly))
        async with village(run) as here:
            add(here, 6)
            here.network.link = ThinLines(1e5)
            await here.until(lambda: all(person.node.served is not None for person in here.people), "all serve")
            await all_step(here, 4)
            begun = asyncio.get_running_loop().time()
            done = min(map(steps, here.people))
            await all_step(here, 8)
            step_s[butterfly] = (asyncio.get_running_loop().time() - begun) / (min(map(steps, here.people)) - done)
    assert step_s[True] < 0.75 * step_s[False], step_s


# ---- members that lie

LIES_FROM = 4


class FalseOwner(Noting):
    """It says the mean of a piece, turned round."""

    def mean_piece(self, round_index: int, piece: int, given: Sequence[GivenPiece]) -> MeanPiece:
        mean = super().mean_piece(round_index, piece, given)
        if round_index < LIES_FROM:
            return mean
        coder = self.outer.in_pieces.coder(round_index)  # type: ignore[attr-defined]
        values = -coder.read(piece, round_index, mean.data)
        healed = bytes(memoryview(mean.data)[len(mean.data) - coder._fragment_nbytes(piece, round_index) :])
        return replace(mean, data=coder.code(piece, round_index, values, healed, 0))


Change = Callable[[PeerId, str, Call], Call | None]


def changes_calls(person: Villager, change: Change) -> None:
    """From round LIES_FROM on `person` sends what `change` makes of its calls: another one, or none."""
    inner = person.transport.call

    async def call(peer: PeerId, call: Call, *, timeout_s: float, reply_bytes_max: int) -> Answer:
        if call.header.HasField("butterfly") and steps(person) + 1 >= LIES_FROM:
            changed = change(peer, kind_of(call), call)
            if changed is None:
                await asyncio.sleep(timeout_s)
                raise PeerTimeout("not sent")
            call = changed
        return await inner(peer, call, timeout_s=timeout_s, reply_bytes_max=reply_bytes_max)

    person.transport.call = call  # type: ignore[method-assign]


def signed_anew(person: Villager, signed: wire.SignedWord, change: Callable[[wire.RoundWord], None]) -> wire.SignedWord:
    word = wire.RoundWord.FromString(signed.word)
    change(word)
    return say(person.identity, RUN, word).signed


def two_faces(here: Village, liar: Villager, kind: str) -> Change:
    """To one of the others the liar says another word of `kind` than to the rest."""
    victim = max(p.node.me for p in here.people if p is not liar)

    def other(word: wire.RoundWord) -> None:
        if kind == "commit":
            word.commit.samples += 1
        else:
            word.means.agreements = bytes(len(word.means.agreements))

    def change(peer: PeerId, found: str, call: Call) -> Call:
        if peer != victim or found != kind:
            return call
        header = wire.Request.FromString(call.header.SerializeToString())
        body = header.butterfly
        if kind == "commit":
            body.word.CopyFrom(signed_anew(liar, body.word, other))
        else:
            body.means.word.CopyFrom(signed_anew(liar, body.means.word, other))
        return Call(header, call.tensors)

    return change


def found_at(here: Village, liar: Villager) -> dict[str, int]:
    """Fills with the step at which each other node excluded the liar."""
    found: dict[str, int] = {}
    for person in here.people:
        if person is not liar:
            butterfly = person.served.gossip.butterfly
            inner = butterfly.exclude

            def exclude(peer: PeerId, reason: str, person: Villager = person, inner: Any = inner) -> None:
                found.setdefault(person.node.me, steps(person))
                inner(peer, reason)

            butterfly.exclude = exclude
    return found


async def is_found(here: Village, liar: Villager, honest: list[Villager], found: dict[str, int]) -> None:
    """The liar is excluded by all within three steps, nobody else is, and the others go on alike."""
    await here.until(lambda: all(liar.node.me in excluded(p) for p in honest), "all exclude the liar")
    assert max(found.values()) <= LIES_FROM + 3, found
    here.people = honest
    await all_step(here, 4)
    check_alike(honest, 4)
    for person in honest:
        assert excluded(person) == {liar.node.me}
        assert torch.isfinite(weights(person)).all()


@pytest.mark.parametrize("count", [3, 4])
async def test_an_owner_that_averages_falsely_is_excluded_by_all(count: int) -> None:
    async with village(in_pieces()) as here:
        add(here, count - 1)
        liar = here.add(0, FalseOwner)
        honest = here.people[:-1]
        await here.until(lambda: all(p.node.served is not None for p in here.people), "all serve")
        await is_found(here, liar, honest, found_at(here, liar))


@pytest.mark.parametrize("kind", ["commit", "means"])
async def test_a_member_with_two_faces_is_excluded_by_all(kind: str) -> None:
    async with village(in_pieces()) as here:
        add(here, 4)
        await all_step(here, 1)
        liar = here.people[1]
        honest = [person for person in here.people if person is not liar]
        found = found_at(here, liar)
        changes_calls(liar, two_faces(here, liar, kind))
        await is_found(here, liar, honest, found)


def other_pieces(peer: PeerId, kind: str, call: Call) -> Call:
    """The last answerer: other pieces than those committed to, made once the others' are known."""
    if kind != "pieces":
        return call
    turned = [replace(one, data=bytes(memoryview(one.data)[::-1])) for one in call.tensors]
    return Call(call.header, turned)


def no_pieces(peer: PeerId, kind: str, call: Call) -> Call | None:
    """It commits, and sends nothing."""
    return None if kind == "pieces" else call


def no_means(peer: PeerId, kind: str, call: Call) -> Call | None:
    return None if kind == "means" else call


def no_roster(peer: PeerId, kind: str, call: Call) -> Call | None:
    return None if kind == "roster" else call


def no_close(peer: PeerId, kind: str, call: Call) -> Call | None:
    return None if kind == "close" else call


@pytest.mark.parametrize("change", [other_pieces, no_pieces, no_means, no_roster, no_close])
async def test_a_member_that_does_not_do_its_part_keeps_nobody_from_going_on(change: Change) -> None:
    async with village(in_pieces()) as here:
        add(here, 4)
        await all_step(here, 2)
        idler = here.people[1]
        honest = [person for person in here.people if person is not idler]
        changes_calls(idler, change)
        here.people = honest
        await all_step(here, 14)
        check_alike(honest, 4)
        for person in honest:
            assert len(slow(person)) <= 10, "waited for in rounds 1, 2, 4, 8, ... apart"
            assert not excluded(person)
        if change in (other_pieces, no_pieces):  # it takes the means of the rounds that it is left out of
            check_alike([*honest, idler], 6)
        here.people = [*honest, idler]

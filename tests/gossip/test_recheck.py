"""Means averaged again, with real replicas: a false one is found and shown, a right one not; no proof is made up."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from swarmnode.base.errors import RemoteFault
from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.ports import Answer, Data, WireTensor
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.train.gossip.butterfly.recheck import Falsehood, Recheck, roster_pieces
from swarmnode.train.gossip.butterfly.roster import RoundOf, write_roster
from swarmnode.train.gossip.butterfly.round_state import MeanSet, OwnPacket, RoundState
from swarmnode.train.gossip.butterfly.word import (
    DIGEST_NBYTES,
    Said,
    commit_digest,
    digests_of,
    pack_bits,
    pack_floats,
    packet_length,
    say,
    short_digest,
)
from tests.gossip.test_gradient import manifest, members, train
from tests.support.fake_telemetry import Quiet
from tests.support.stage_context import stage_context

RUN = RunId("ab" * 32)
OF = RoundOf(RUN, 0, 1)
COUNT = 4


class Members:
    """A round of four replicas, one of whose means may be false, as the first of them sees it once it is closed."""

    def __init__(self, *, lies: bool) -> None:
        run = manifest("int8")
        self.who = sorted((Identity.of_seed(bytes([n]) * 32) for n in range(1, 1 + COUNT)), key=lambda one: one.peer_id)
        self.replicas = members(run, COUNT)
        for number, replica in enumerate(self.replicas):
            train(replica, number, 2)
        drafts = [replica.draft_pieces(1) for replica in self.replicas]
        self.own = [OwnPacket(one, digests_of(one.pieces), pack_floats(one.lengths)) for one in drafts]
        commits = {one.peer_id: self._commit(one, own) for one, own in zip(self.who, self.own, strict=True)}
        roster = say(self.who[1], RUN, write_roster(OF, commits, [*commits], [], 0))
        self.me = self.who[0].peer_id
        self.state = RoundState(OF, self.me, commits[self.me], self.own[0], [one.peer_id for one in self.who[1:]])
        self.state.hear_roster(roster)
        self.liar = self.who[2].peer_id
        words = [self._mean(number, lies and one.peer_id == self.liar) for number, one in enumerate(self.who)]
        close = wire.RoundClose(roster=roster.digest, means=b"".join(words))
        self.state.hear_close(say(self.who[1], RUN, wire.RoundWord(round=1, close=close)))
        assert not self.state.lacking
        self.found = list[Falsehood]()
        compute = SimpleNamespace(run=self._run)
        here = stage_context(
            run, 0, RUN, replica=self.replicas[0], compute=compute, telemetry=Quiet(), identity=self.who[0]
        )
        self.recheck = Recheck(here, self._ask, self.found.append)

    @staticmethod
    async def _run(priority: object, samples: int, work: object) -> object:
        return work()  # type: ignore[operator]

    async def _ask(self, peer: PeerId, round_index: int, pieces: Sequence[int]) -> Answer:
        own = next(own for one, own in zip(self.who, self.own, strict=True) if one.peer_id == peer)
        data = [bytes(own.drafted.pieces[piece]) for piece in pieces]
        answer = wire.ButterflyAnswer(digests=own.digests, lengths=own.lengths)
        return Answer(wire.Reply(butterfly=answer), [WireTensor("u8", (len(one),), one) for one in data])

    @staticmethod
    def _commit(who: Identity, own: OwnPacket) -> Said:
        body = wire.PacketCommit(
            pieces=commit_digest(own.digests, own.lengths),
            length=packet_length(own.drafted.lengths),
            targets=own.drafted.targets,
        )
        return say(who, RUN, wire.RoundWord(round=1, commit=body))

    def _mean(self, number: int, lies: bool) -> bytes:
        """The digest of the word of one owner's means, which the state hears."""
        roster = self.state.roster
        who = self.who[number]
        assert roster is not None
        given: dict[PeerId, dict[int, Data]] = {
            one.peer_id: dict(enumerate(own.drafted.pieces)) for one, own in zip(self.who, self.own, strict=True)
        }
        data = list[Data]()
        for piece in roster.pieces_of(who.peer_id, self.state.pieces):
            mean = self.replicas[number].mean_piece(1, piece, roster_pieces(roster, piece, given))
            data.append(self.own[number].drafted.pieces[piece] if lies else mean.data)
        digests = digests_of(data)
        body = wire.PieceMeans(
            roster=roster.said.digest,
            means=short_digest(digests),
            taken=pack_bits([True] * COUNT),
            agreements=pack_floats([0.0] * COUNT),
        )
        said = say(who, RUN, wire.RoundWord(round=1, means=body))
        self.state.hear_means(MeanSet(said, digests, data))
        return said.digest

    async def check(self, seeds: Sequence[bytes]) -> None:
        """Average again what a member draws by `seeds`."""
        for number, seed in enumerate(seeds):
            self.recheck._begun.clear()
            async with asyncio.TaskGroup() as tasks:
                self.recheck.begin(tasks, self.state, seed)
            assert number < len(seeds)


SEEDS = [bytes([n]) for n in range(12)]


async def test_right_means_are_shown_to_nobody() -> None:
    here = Members(lies=False)
    await here.check(SEEDS)
    assert not here.found


async def test_a_false_mean_is_shown_and_each_member_sees_it() -> None:
    here = Members(lies=True)
    await here.check(SEEDS)
    assert here.found and {one.owner for one in here.found} == {here.liar}
    first = here.found[0]
    assert await here.recheck.see(first.proof, first.data) == (here.liar, 1)


async def test_no_proof_can_be_made_up() -> None:
    here = Members(lies=True)
    honest = Members(lies=False)
    await here.check(SEEDS)
    proof = here.found[0].proof
    data = here.found[0].data
    size = proof.sizes[0]
    for change in ("mean", "piece", "list", "size", "number", "roster", "digests", "words", "honest"):
        bad = wire.FalseMean.FromString(proof.SerializeToString())
        shown = data
        match change:
            case "mean":
                shown = bytes(size) + data[size:]
            case "piece":
                shown = data[:size] + bytes(proof.sizes[1]) + data[size + proof.sizes[1] :]
            case "list":
                bad.lists[0] = bad.lists[1]
            case "size":
                bad.sizes[0] += 1
            case "number":
                bad.piece = (proof.piece + 1) % 64
            case "roster":
                bad.roster.word += b"\x08\x01"
            case "digests":
                bad.digests = bytes(DIGEST_NBYTES) + proof.digests[DIGEST_NBYTES:]
            case "words":
                del bad.lists[1:]
            case _:  # all that an honest owner's mean is made of
                roster = honest.state.roster
                owner = here.liar
                assert roster is not None
                piece = roster.pieces_of(owner, honest.state.pieces)[0]
                means = honest.state.means[owner]
                parts = [means.data[0], *[own.drafted.pieces[piece] for own in honest.own]]
                bad = wire.FalseMean(
                    roster=roster.said.signed,
                    means=means.said.signed,
                    digests=means.digests,
                    piece=piece,
                    sizes=[memoryview(part).nbytes for part in parts],
                    lists=[own.digests + own.lengths for own in honest.own],
                )
                shown = b"".join(map(bytes, parts))
        with pytest.raises(RemoteFault):
            await here.recheck.see(bad, shown)

"""Rounds in pieces as values: words and what they prove, rosters, and what a member takes from whom."""

import contextlib
import dataclasses
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.base.errors import RemoteFault, Unavailable
from swarmnode.base.identity import Identity
from swarmnode.base.ids import RunId
from swarmnode.base.ports import DraftedPieces
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.train.gossip.butterfly import round_state
from swarmnode.train.gossip.butterfly.recheck import drawn
from swarmnode.train.gossip.butterfly.roster import RosterView, RoundOf, choose_owners, open_roster, write_roster
from swarmnode.train.gossip.butterfly.round_state import MeanSet, OwnPacket, RoundState
from swarmnode.train.gossip.butterfly.word import (
    Said,
    commit_digest,
    contradict,
    digests_of,
    hear,
    pack_bits,
    pack_floats,
    packet_length,
    say,
    short_digest,
)

RUN = RunId("ab" * 32)
OF = RoundOf(RUN, 0, 7)
WHO = [Identity.of_seed(bytes([n]) * 32) for n in range(1, 12)]
PIECES = 8


def packet(number: int) -> OwnPacket:
    pieces = [bytes([number, piece]) * 40 for piece in range(PIECES)]
    lengths = [float(number + piece) for piece in range(PIECES)]
    return OwnPacket(DraftedPieces(pieces, lengths, 10 * number), digests_of(pieces), pack_floats(lengths))


def commit(number: int, *, newcomer: bool = False, incarnation: int = 1, round_index: int = 7) -> Said:
    own = packet(number)
    body = wire.PacketCommit(
        pieces=commit_digest(own.digests, own.lengths),
        length=packet_length(own.drafted.lengths),
        targets=own.drafted.targets,
        newcomer=newcomer,
    )
    word = wire.RoundWord(round=round_index, stage=0, commit=body, incarnation=incarnation)
    return say(WHO[number], RUN, word)


def roster(writer: int, members: Sequence[int], *, attempt: int = 0, elsewhere: Sequence[int] = ()) -> Said:
    commits = {WHO[n].peer_id: commit(n) for n in members}
    owners = [*commits]
    return say(WHO[writer], RUN, write_roster(OF, commits, owners, [WHO[n].peer_id for n in elsewhere], attempt))


def state(number: int, awaited: Sequence[int]) -> RoundState:
    return RoundState(OF, WHO[number].peer_id, commit(number), packet(number), [WHO[n].peer_id for n in awaited])


def means_of(owner: int, view: RosterView, salt: bytes = b"") -> tuple[Said, bytes, list[bytes]]:
    data = [b"mean" + salt + bytes([piece]) for piece in view.pieces_of(WHO[owner].peer_id, PIECES)]
    digests = digests_of(data)
    body = wire.PieceMeans(
        roster=view.said.digest,
        means=short_digest(digests),
        taken=pack_bits([True] * len(view.members)),
        agreements=pack_floats([0.0] * len(view.members)),
    )
    return say(WHO[owner], RUN, wire.RoundWord(round=7, stage=0, means=body)), digests, data


def test_a_word_is_its_members_and_of_this_run_and_stage() -> None:
    said = commit(1)
    assert hear(said.signed, RUN, 0, "commit").digest == said.digest
    for signed, run, stage, kind in (
        (said.signed, RunId("cd" * 32), 0, ""),
        (said.signed, RUN, 1, ""),
        (said.signed, RUN, 0, "roster"),
        (wire.SignedWord(word=said.signed.word + b"\x08\x09", signature=said.signed.signature), RUN, 0, ""),
        (wire.SignedWord(word=b"\xff\xff", signature=bytes(64)), RUN, 0, ""),
        (wire.SignedWord(word=said.signed.word), RUN, 0, ""),
    ):
        with pytest.raises(RemoteFault):
            hear(signed, run, stage, kind)


def test_two_words_of_one_process_on_one_subject_contradict_each_other() -> None:
    one = commit(1)
    other = commit(1, newcomer=True)
    assert contradict(one, other) and not contradict(one, one)
    assert not contradict(one, commit(2)) and not contradict(one, commit(1, newcomer=True, round_index=8))
    assert not contradict(one, commit(1, newcomer=True, incarnation=2)), "a process that was started anew"
    assert contradict(roster(1, [1, 2]), roster(1, [1, 2, 3]))
    assert not contradict(roster(1, [1, 2]), roster(1, [1, 2, 3], attempt=1))


@given(st.sets(st.integers(0, 10), min_size=1), st.integers(1, 64))
@settings(deadline=None, max_examples=40)
def test_every_piece_has_one_owner_and_owners_have_as_many(members: set[int], pieces: int) -> None:
    view = open_roster(OF, roster(min(members), sorted(members)), {})
    dealt = [view.pieces_of(peer, pieces) for peer in view.members]
    assert sorted(piece for mine in dealt for piece in mine) == [*range(pieces)]
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    assert view.members == tuple(sorted(WHO[n].peer_id for n in members))


def test_owners_change_from_round_to_round() -> None:
    peers = [one.peer_id for one in WHO]
    assert len({tuple(dataclasses.replace(OF, round_index=k).deal(peers)) for k in range(20)}) == 20
    assert len({dataclasses.replace(OF, round_index=k).order(peers)[0] for k in range(60)}) > 8


def test_keys_that_were_never_met_average_nothing_beside_those_that_were() -> None:
    commits = {WHO[n].peer_id: commit(n, newcomer=n == 3) for n in (1, 2, 3)}
    known = {WHO[1].peer_id}
    assert choose_owners(WHO[2].peer_id, commits, known.__contains__) == {WHO[1].peer_id, WHO[2].peer_id}
    assert choose_owners(WHO[3].peer_id, commits, known.__contains__) == known, "a newcomer averages nothing"
    assert choose_owners(WHO[1].peer_id, commits, lambda peer: False) == {WHO[1].peer_id, WHO[2].peer_id}


def test_a_roster_is_checked() -> None:
    good = roster(1, [1, 2, 3])
    body = wire.Roster.FromString(good.word.roster.SerializeToString())
    for change in ("order", "twice", "nobody", "round", "garbage", "bits"):
        bad = wire.RoundWord(round=7, stage=0, roster=body)
        commits = bad.roster.commits
        match change:
            case "order":
                commits.reverse()
            case "twice":
                commits[1] = commits[0]
            case "nobody":
                bad.roster.owners = bytes(1)
            case "round":
                commits[0] = commit(1, round_index=8).signed.SerializeToString()
            case "garbage":
                commits[0] = b"\xff\xff"
            case _:
                bad.roster.owners = b"\x07\x00"
        with pytest.raises(RemoteFault):
            open_roster(OF, say(WHO[1], RUN, bad), {})


def test_all_members_follow_the_same_of_two_rosters() -> None:
    rosters = [roster(1, [1, 2, 3, 4]), roster(2, [1, 2, 3, 4]), roster(3, [1, 2, 3, 4], attempt=1)]
    followed = set()
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        mine = state(4, [1, 2, 3])
        for place in order:
            mine.hear_roster(rosters[place])
        assert mine.roster is not None and not mine.contradictions
        followed.add(mine.roster.said.digest)
    assert followed == {rosters[2].digest}


def test_a_writer_whose_roster_most_refuse_goes_by_another() -> None:
    mine = state(4, [1, 2, 3])
    mine.hear_roster(roster(4, [1, 2, 3, 4], attempt=1))
    assert not mine.hear_roster(roster(1, [1, 2, 3])) and not mine.hear_roster(roster(2, [1, 2, 3]))
    mine.refused = {WHO[1].peer_id, WHO[2].peer_id}
    assert not mine.is_refused
    mine.refused.add(WHO[3].peer_id)
    assert mine.is_refused
    mine.give_up_own()
    assert mine.roster is not None and mine.roster.writer == min((WHO[1].peer_id, WHO[2].peer_id), key=OF.rank)
    assert mine.writer([one.peer_id for one in WHO[1:5]]) != mine.me


def test_a_roster_that_leaves_out_most_is_not_followed() -> None:
    mine = state(4, [1, 2, 3, 5])
    with pytest.raises(Unavailable, match="leaves out"):
        mine.hear_roster(roster(1, [1, 6, 7, 8]))
    with pytest.raises(Unavailable, match="leaves out"):
        mine.hear_roster(roster(1, [1, 2, 3, 4, 5], elsewhere=[2, 3, 4]))
    mine.gone = {WHO[n].peer_id for n in (3, 5)}
    assert mine.hear_roster(roster(1, [1, 2, 6]))


def test_a_two_faced_writer_and_a_two_faced_member_are_found() -> None:
    mine = state(4, [1, 2])
    mine.hear_commit(commit(2, newcomer=True))
    mine.hear_roster(roster(1, [1, 2, 4]))
    mine.hear_roster(roster(1, [1, 2, 3, 4]))
    assert {one.member for one, _ in mine.contradictions} == {WHO[1].peer_id, WHO[2].peer_id}
    assert all(contradict(one, other) for one, other in mine.contradictions)


def test_pieces_must_be_those_committed_to() -> None:
    mine = state(4, [1, 2])
    mine.hear_roster(roster(1, [1, 2, 4]))
    assert mine.roster is not None
    giver = WHO[2].peer_id
    own = packet(2)
    digest = mine.roster.said.digest
    due = [own.drafted.pieces[piece] for piece in mine.mine]
    assert mine.check_given(giver, digest, own.digests, own.lengths, due).data == dict(zip(mine.mine, due, strict=True))
    other = packet(3)
    longer = pack_floats([2.0 * value for value in own.drafted.lengths])
    for digests, lengths, data in (
        (own.digests, own.lengths, due[:-1]),
        (own.digests, own.lengths, [*due[:-1], b"else"]),
        (other.digests, other.lengths, [other.drafted.pieces[piece] for piece in mine.mine]),
        (own.digests, longer, due),
        (own.digests[:-16], own.lengths, due),
    ):
        with pytest.raises(RemoteFault):
            mine.check_given(giver, digest, digests, lengths, data)


def test_all_apply_the_means_that_the_close_names() -> None:
    mine = state(4, [1, 2])
    said = roster(1, [1, 2, 4])
    mine.hear_roster(said)
    view = mine.roster
    assert view is not None
    told = {n: means_of(n, view) for n in (1, 2, 4)}
    for n in (1, 4):
        mine.hear_means(mine.check_means(*told[n]))
    mine.hear_means(mine.check_means(*means_of(2, view, b"false")))  # another face than the writer saw
    body = wire.RoundClose(roster=said.digest, means=b"".join(told[WHO.index(_who(p))][0].digest for p in view.members))
    close = say(WHO[1], RUN, wire.RoundWord(round=7, stage=0, close=body))
    with pytest.raises(RemoteFault):
        mine.hear_close(say(WHO[2], RUN, wire.RoundWord(round=7, stage=0, close=body)))
    mine.hear_close(close)
    assert mine.lacking == [WHO[2].peer_id]
    mine.hear_means(mine.check_means(*told[2]))
    assert not mine.lacking and [one.member for one, _ in mine.contradictions] == [WHO[2].peer_id]
    means, ours = mine.result()
    assert all(ours) and [bytes(mean) for mean in means if mean] == [b"mean" + bytes([p]) for p in range(PIECES)]
    assert [*mine.counted()] == [*view.givers]


def _who(peer: str) -> Identity:
    return next(one for one in WHO if one.peer_id == peer)


def test_a_means_word_must_be_of_the_pieces_that_came_with_it() -> None:
    mine = state(4, [1, 2])
    mine.hear_roster(roster(1, [1, 2, 4]))
    assert mine.roster is not None
    said, digests, data = means_of(2, mine.roster)
    assert isinstance(mine.check_means(said, digests, data), MeanSet)
    for bad_digests, bad_data in ((digests, data[:-1]), (digests, [b"x", *data[1:]]), (digests_of([b"x"]), [b"x"])):
        with pytest.raises(RemoteFault):
            mine.check_means(said, bad_digests, bad_data)


def test_a_quarter_of_the_pieces_is_checked_by_one_member_each() -> None:
    peers = [one.peer_id for one in WHO]
    for seed in (b"a", b"b"):
        found = sorted(piece for peer in peers for piece in drawn(seed, 64, peers, peer))
        assert len(found) == len({*found}) == 16
    assert drawn(b"a", 64, peers[:1], peers[0]) != drawn(b"b", 64, peers[:1], peers[0])


# ---- one close, whatever the order of words


class Orders:
    """Four or five members of a round of which one, the writer of the first roster, shows its close to whom and when it
    likes; the others write rosters in turn. All words come in a drawn order, or never."""

    def __init__(self, count: int, chance: random.Random) -> None:
        self.chance = chance
        self.numbers = sorted(range(1, count + 1), key=lambda n: OF.rank(WHO[n].peer_id))
        self.liar = self.numbers[0]
        self.honest = self.numbers[1:]
        self.states = {n: state(n, [m for m in self.numbers if m != n]) for n in self.honest}
        self.rosters = [roster(self.liar, self.numbers)]
        self.told = dict[bytes, dict[str, tuple[Said, bytes, list[bytes]]]]()  # the means of each roster
        self.closes: list[Said] = [self.close_of(self.rosters[0])]
        self.holds = list[Said]()

    def means(self, said: Said) -> dict[str, tuple[Said, bytes, list[bytes]]]:
        view = open_roster(OF, said, {})
        return {p: means_of(WHO.index(_who(p)), view, said.digest) for p in view.members if view.pieces_of(p, PIECES)}

    def close_of(self, said: Said) -> Said:
        told = self.told[said.digest] = self.means(said)
        members = open_roster(OF, said, {}).members
        digests = b"".join(told[p][0].digest if p in told else bytes(16) for p in members)
        word = wire.RoundWord(round=7, stage=0, close=wire.RoundClose(roster=said.digest, means=digests))
        return say(_who(said.member), RUN, word)

    def step(self) -> None:
        """One event: what is refused is refused."""
        number = self.chance.choice(self.honest)
        mine = self.states[number]
        event = self.chance.choice(
            [self.roster, self.write, self.means_come, self.write_close, self.close, self.hold, self.held]
        )
        with contextlib.suppress(Unavailable):
            event(number, mine)

    def roster(self, number: int, mine: RoundState) -> None:
        mine.hear_roster(self.chance.choice(self.rosters))

    def write(self, number: int, mine: RoundState) -> None:
        """It gave the writers before up: it begins again without the first one."""
        if mine.hold is None and mine.close is None and len(self.rosters) < 4:
            attempt = 1 + max(said.word.roster.attempt for said in self.rosters)
            said = roster(number, self.honest, attempt=attempt)
            mine.hear_roster(said)
            self.rosters.append(said)
            self.told[said.digest] = self.means(said)

    def write_close(self, number: int, mine: RoundState) -> None:
        """A writer closes its roster while it follows it, and holds that close."""
        if mine.roster is not None and mine.roster.writer == mine.me and mine.proposed is None:
            self.means_come(number, mine)
            close = self.close_of(mine.roster.said)
            self.closes.append(close)
            mine.hear_close(close)
            self.hold(number, mine)

    def means_come(self, number: int, mine: RoundState) -> None:
        if mine.roster is not None:
            for one in self.told[mine.roster.said.digest].values():
                mine.hear_means(mine.check_means(*one))

    def close(self, number: int, mine: RoundState) -> None:
        mine.hear_close(self.chance.choice(self.closes))

    def hold(self, number: int, mine: RoundState) -> None:
        if mine.may_hold:
            assert mine.proposed is not None
            body = wire.RoundHold(close=mine.proposed.digest)
            mine.hold = say(WHO[number], RUN, wire.RoundWord(round=7, stage=0, hold=body))
            self.holds.append(mine.hold)
            mine.hear_hold(mine.hold)

    def held(self, number: int, mine: RoundState) -> None:
        """A hold comes, or what another member knows."""
        if self.holds and self.chance.random() < 0.5:
            mine.hear_hold(self.chance.choice(self.holds))
            return
        other = self.states[self.chance.choice(self.honest)]
        if other is not mine and mine.close is None and other.hold is not None:
            assert other.roster is not None and other.proposed is not None
            if mine.hear_over(other.me, other.roster.said, other.proposed, [*other.holds.values()]):
                mine.take_over()

    def in_force(self) -> set[bytes]:
        return {mine.close.digest for mine in self.states.values() if mine.close is not None}


def closed(count: int, seed: int) -> set[bytes]:
    """The closes by which honest members go after some events."""
    orders = Orders(count, random.Random(seed))
    for _ in range(40 * count):
        orders.step()
    return orders.in_force()


@pytest.mark.parametrize("count", [3, 4, 5])
def test_no_order_of_words_brings_two_closes_into_force(count: int) -> None:
    found = [len(closed(count, seed)) for seed in range(60)]
    assert max(found) == 1
    assert sum(found) > 10, "some orders end in one"


def test_where_a_close_counts_on_its_writers_word_alone_members_go_by_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_state, "is_held", lambda roster, holders: True)
    assert max(len(closed(4, seed)) for seed in range(60)) > 1


def test_a_member_that_holds_two_closes_is_found() -> None:
    mine = state(4, [1, 2])
    mine.hear_hold(say(WHO[2], RUN, wire.RoundWord(round=7, stage=0, hold=wire.RoundHold(close=b"c" * 16))))
    assert not mine.holds, "a key that committed to nothing"
    mine.hear_commit(commit(1))
    for close in (b"a" * 16, b"b" * 16):
        mine.hear_hold(say(WHO[1], RUN, wire.RoundWord(round=7, stage=0, hold=wire.RoundHold(close=close))))
    assert [one.member for one, _ in mine.contradictions] == [WHO[1].peer_id]


def test_a_later_rounds_close_counts_once_most_members_hold_it() -> None:
    mine = state(4, [1, 2, 3])
    later = dataclasses.replace(OF, round_index=8)
    commits = {WHO[n].peer_id: commit(n, round_index=8) for n in (1, 2, 3)}
    said = say(WHO[1], RUN, write_roster(later, commits, [*commits], [], 0))
    body = wire.RoundClose(roster=said.digest, means=b"m" * 16 * 3)
    close = say(WHO[1], RUN, wire.RoundWord(round=8, stage=0, close=body))
    assert not mine.hear_over(WHO[1].peer_id, said, close, []) and not mine.behind, "its writer's word alone"
    hold = say(WHO[2], RUN, wire.RoundWord(round=8, stage=0, hold=wire.RoundHold(close=close.digest)))
    assert mine.hear_over(WHO[1].peer_id, said, close, [hold]) and mine.behind


def test_a_latecomer_that_takes_a_close_over_can_show_others_who_holds_it() -> None:
    mine = state(4, [1, 2, 3])
    commits = {WHO[n].peer_id: commit(n) for n in (1, 2, 3)}
    said = say(WHO[1], RUN, write_roster(OF, commits, [*commits], [], 0))
    body = wire.RoundClose(roster=said.digest, means=b"m" * 16 * 3)
    close = say(WHO[1], RUN, wire.RoundWord(round=7, stage=0, close=body))
    holds = [
        say(WHO[n], RUN, wire.RoundWord(round=7, stage=0, hold=wire.RoundHold(close=close.digest))) for n in (2, 3)
    ]
    assert mine.hear_over(WHO[2].peer_id, said, close, holds)
    assert mine.take_over() == WHO[2].peer_id
    assert mine.holders(close) == {WHO[2].peer_id, WHO[3].peer_id}

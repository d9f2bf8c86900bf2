"""One member's knowledge of a round in pieces: words, pieces and means as they come, checked. No I/O and no clock."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from statistics import median_low

from swarmnode.base.errors import RemoteFault, Unavailable
from swarmnode.base.ids import PeerId, short
from swarmnode.base.ports import Data, DraftedPieces
from swarmnode.train.gossip.butterfly.roster import RosterView, RoundOf, leaves_out_too_many, open_roster
from swarmnode.train.gossip.butterfly.word import (
    DIGEST_NBYTES,
    Digest,
    Said,
    commit_digest,
    contradict,
    digest_at,
    digests_of,
    packet_length,
    short_digest,
    unpack_bits,
    unpack_floats,
)

_NONE = bytes(DIGEST_NBYTES)


@dataclass(frozen=True, slots=True)
class OwnPacket:
    """Our packet in a round: its pieces, and what its commit says of them."""

    drafted: DraftedPieces
    digests: bytes
    lengths: bytes  # float32, little endian


@dataclass(frozen=True, slots=True)
class PieceSet:
    """The pieces of one member's packet that came here: their bytes and lengths by number."""

    data: dict[int, Data]
    lengths: Sequence[float]  # of all of its pieces, as it committed to them


@dataclass(frozen=True, slots=True)
class MeanSet:
    """The means of one owner, in the order of its pieces."""

    said: Said
    digests: bytes
    data: Sequence[Data]


def check_list(commit: Said, digests: bytes, lengths: bytes, pieces: int) -> list[float]:
    """The lengths of all pieces of a packet. Raises RemoteFault unless these and the `digests` were committed to."""
    body = commit.word.commit
    who = short(commit.member)
    if len(digests) != pieces * DIGEST_NBYTES or commit_digest(digests, lengths) != body.pieces:
        raise RemoteFault(f"the pieces of {who} are not those that it committed to")
    values = unpack_floats(lengths, pieces, "lengths of pieces")
    if min(values) < 0.0 or not math.isclose(packet_length(values), body.length, rel_tol=1e-6, abs_tol=1e-30):
        raise RemoteFault(f"the pieces of {who} are not as long as the packet that it committed to")
    return values


def members_taken(roster: RosterView, said: Said) -> dict[PeerId, bool]:
    """The members whose pieces are in an owner's means. Raises RemoteFault where they cannot be."""
    bits = unpack_bits(said.word.means.taken, len(roster.members), "members taken")
    found = dict(zip(roster.members, bits, strict=True))
    if any(bit and peer not in roster.givers for peer, bit in found.items()):
        raise RemoteFault("means of pieces that nobody gave")
    return found


def is_held(roster: RosterView, holders: Collection[PeerId]) -> bool:
    """Whether most members of `roster` hold its close: those in `holders` and its writer. A member holds one close of a
    round, so no other close of these members can be held by most of them."""
    return 2 * len({roster.writer, *holders} & roster.commits.keys()) > len(roster.members)


class RoundState:
    """One member's side of a round."""

    def __init__(
        self,
        of: RoundOf,
        me: PeerId,
        commit: Said,
        own: OwnPacket,
        awaited: Collection[PeerId],
        digest: Digest = short_digest,
    ) -> None:
        """`awaited`: the other members that a roster is to have."""
        self.of = of
        self._awaited = frozenset(awaited)
        self.me = me
        self.pieces = len(own.drafted.pieces)
        self._digest = digest
        self.own = own
        self.commits: dict[PeerId, Said] = {me: commit}
        self.roster: RosterView | None = None
        self.given: dict[PeerId, PieceSet] = {}  # of the pieces that this member averages
        self.means: dict[PeerId, MeanSet] = {}  # of the roster
        self.proposed: Said | None = None  # a close of the roster; all apply it once most members hold it
        self.hold: Said | None = None  # this member's word that it holds the close that was proposed
        self.holds: dict[PeerId, Said] = {}  # by member, of any close
        self.close: Said | None = None  # the one that most members hold
        self.refused: set[PeerId] = set()  # members that do not follow the roster that this member wrote
        self._others: list[RosterView] = []  # heard, and not followed
        self._wrote: set[PeerId] = set()  # writers of rosters that were heard
        self.given_up: set[PeerId] = set()  # writers of rosters that were waited for in vain
        self.gone: set[PeerId] = set()  # members that cannot be reached, or refuse
        self.contradictions: list[tuple[Said, Said]] = []
        self.over: RosterView | None = None  # a roster that was closed without this member,
        self.over_by: tuple[PeerId, Said, Sequence[Said]] | None = None  # who says so, the close, and who holds it
        self.behind = False  # a member is in a later round

    # ---- commits

    def hear_commit(self, said: Said) -> None:
        """A member's commit. The first one counts until a roster says otherwise."""
        known = self.commits.setdefault(said.member, said)
        self._compare(known, said)

    def _compare(self, known: Said, said: Said) -> None:
        if contradict(known, said):
            self.contradictions.append((known, said))

    def writer(self, able: Collection[PeerId]) -> PeerId | None:
        """The one of `able` that is to write the roster now; None: nobody is left."""
        left = [peer for peer in able if peer not in self.given_up and peer not in self.gone]
        return min(left, key=self.of.rank, default=None)

    # ---- rosters

    @property
    def silent(self) -> set[PeerId]:
        """The members whose roster was followed in vain: they may have a close that they keep to themselves."""
        return self.given_up & self._wrote

    def hear_roster(self, said: Said) -> bool:
        """A roster; returns whether it is to be followed from now on: not where this member holds the close of another.
        Raises RemoteFault for one that is malformed, and Unavailable for one that leaves out too many or comes too
        late."""
        roster = open_roster(self.of, said, self.commits)
        for commit in roster.commits.values():
            if (known := self.commits.get(commit.member)) is not None:
                self._compare(known, commit)
        if self.roster is not None and roster.writer == self.roster.writer:
            self._compare(self.roster.said, said)
        if self.close is not None:
            raise Unavailable(f"round {self.of.round_index} is closed here")
        self._check_members(roster)
        self._wrote.add(roster.writer)
        if self.hold is not None or (self.roster is not None and roster.priority <= self.roster.priority):
            self._others.append(roster)
            return False
        self._follow(roster)
        return True

    def _follow(self, roster: RosterView | None) -> None:
        self.roster = roster
        self.refused = set()
        self.given = {}
        self.means = {}
        self.proposed = None
        if roster is not None:
            self.commits |= roster.commits

    @property
    def is_refused(self) -> bool:
        """Whether most members refused the roster that this member wrote."""
        return self.roster is not None and 2 * len(self.refused) > len(self.roster.members)

    def give_up_own(self) -> None:
        """Go by another roster than our own, which most refused: the best that was heard, if any."""
        self.given_up.add(self.me)
        left = [one for one in self._others if one.writer not in self.given_up]
        self._follow(max(left, key=lambda one: one.priority, default=None))

    def _check_members(self, roster: RosterView) -> None:
        if leaves_out_too_many(roster, {self.me, *self._awaited} - self.gone):
            raise Unavailable("the roster leaves out more than half of the members that are known here")

    def hear_over(self, peer: PeerId, roster: Said, close: Said, holds: Sequence[Said]) -> bool:
        """`peer` knows a close of this round, or of a later one, and these members hold it. Returns whether it is in
        force, so that `peer` is through with the round. Raises RemoteFault or Unavailable as `hear_roster`."""
        view = open_roster(replace(self.of, round_index=close.word.round), roster, self.commits)
        self._check_members(view)
        if close.word.close.roster != view.said.digest:
            raise RemoteFault("a close of another roster")
        self._check_close(view, close)
        holders = {said.member for said in holds if said.word.hold.close == close.digest}
        in_force = is_held(view, holders)
        if close.word.round > self.of.round_index:
            self.behind |= in_force
        elif self.close is None and in_force:
            self.over = view
            self.over_by = (peer, close, holds)
        elif self.close is None and self.proposed is None and peer in holders:
            self._follow(view)
            self.proposed = close
        for said in holds:
            self.hear_hold(said)
        return in_force

    def take_over(self) -> PeerId:
        """Go by the close that `hear_over` heard; returns who has its means."""
        assert self.over is not None and self.over_by is not None
        peer, close, holds = self.over_by
        self._follow(self.over)
        self.over = None
        self.proposed = close
        self.close = close
        for said in holds:
            self.hear_hold(said)
        return peer

    def follows(self, roster: bytes) -> bool:
        """Whether the roster of this digest is the one that is followed here."""
        return self.roster is not None and self.roster.said.digest == roster

    @property
    def is_in(self) -> bool:
        """Whether the roster has this member."""
        return self.roster is not None and self.me in self.roster.commits

    @property
    def mine(self) -> list[int]:
        """The pieces that this member averages."""
        assert self.roster is not None
        return self.roster.pieces_of(self.me, self.pieces)

    # ---- pieces

    def check_given(
        self, giver: PeerId, roster: bytes, digests: bytes, lengths: bytes, data: Sequence[Data]
    ) -> PieceSet:
        """The pieces of `giver` for this member, which follows the `roster` of this digest. Raises RemoteFault unless
        they are those committed to, Unavailable where it gives nothing. Hashes each byte: not for the event loop."""
        assert self.follows(roster)
        assert self.roster is not None
        if giver not in self.roster.givers:
            raise Unavailable(f"{short(giver)} gives nothing in this round")
        values = check_list(self.roster.commits[giver], digests, lengths, self.pieces)
        mine = self.mine
        if len(data) != len(mine):
            raise RemoteFault(f"{len(data)} pieces; {len(mine)} are due")
        for piece, found in zip(mine, data, strict=True):
            if self._digest(found) != digest_at(digests, piece):
                raise RemoteFault(f"piece {piece} is not the one committed to")
        return PieceSet(dict(zip(mine, data, strict=True)), values)

    def hear_given(self, giver: PeerId, roster: bytes, pieces: PieceSet) -> None:
        """Checked pieces of `giver`, if the roster is still that one."""
        if self.follows(roster):
            self.given.setdefault(giver, pieces)

    # ---- means

    def check_means(self, said: Said, digests: bytes, data: Sequence[Data]) -> MeanSet:
        """The means of an owner, of the roster that is followed here. Raises RemoteFault unless they are those that it
        signed. Hashes each byte: not for the event loop."""
        body = said.word.means
        assert self.follows(body.roster)
        assert self.roster is not None
        due = self.roster.pieces_of(said.member, self.pieces)
        if (
            not due
            or len(data) != len(due)
            or digests != digests_of(data, self._digest)
            or short_digest(digests) != body.means
        ):
            raise RemoteFault(f"the means of {short(said.member)} are not those that it signed")
        self.taken(said)
        unpack_floats(body.agreements, len(self.roster.members), "agreements")
        return MeanSet(said, digests, data)

    def hear_means(self, means: MeanSet) -> None:
        """Checked means, if the roster is still theirs. Of two sets the one that the close names counts."""
        if not self.follows(means.said.word.means.roster):
            return
        known = self.means.get(means.said.member)
        if known is not None:
            self._compare(known.said, means.said)
        if known is None or means.said.digest == self.named(means.said.member):
            self.means[means.said.member] = means

    def taken(self, said: Said) -> dict[PeerId, bool]:
        """The members whose pieces are in an owner's means. Raises RemoteFault where they cannot be."""
        assert self.roster is not None
        return members_taken(self.roster, said)

    # ---- the close

    def hear_close(self, said: Said) -> None:
        """The close of the roster that is followed here. Raises RemoteFault for one that its writer did not write."""
        if self.roster is None or not self.follows(said.word.close.roster):
            raise Unavailable("another roster is followed here")
        self._check_close(self.roster, said)
        if self.proposed is None:
            self.proposed = said
            self._count_holds()
        else:
            self._compare(self.proposed, said)

    def _check_close(self, roster: RosterView, said: Said) -> None:
        """Raises RemoteFault for a close that is not of `roster`, Unavailable for one that lacks most means."""
        if said.member != roster.writer or said.word.round != roster.of.round_index:
            raise RemoteFault(f"a close by {short(said.member)}; the roster is by {short(roster.writer)}")
        if len(said.word.close.means) != DIGEST_NBYTES * len(roster.members):
            raise RemoteFault("a close of another number of members")
        if self.lacks_most(roster, said.word.close.means):
            raise Unavailable("the close lacks the means of most owners: its writer would step by a few")

    def hear_hold(self, said: Said) -> None:
        """A member's word that it has the means that a close names, and goes by no other one. A key that committed to
        nothing holds nothing."""
        if said.word.round == self.of.round_index and said.member in self.commits:
            known = self.holds.setdefault(said.member, said)
            self._compare(known, said)
            self._count_holds()

    def _count_holds(self) -> None:
        if self.close is not None or self.proposed is None or self.roster is None:
            return
        if is_held(self.roster, self.holders(self.proposed)):
            self.close = self.proposed

    def holders(self, close: Said) -> set[PeerId]:
        """The members that are known to hold `close`."""
        return {peer for peer, said in self.holds.items() if said.word.hold.close == close.digest}

    def drop_proposal(self) -> None:
        """Go by no roster, as the means of the close that was proposed do not come."""
        self._follow(None)

    @property
    def may_hold(self) -> bool:
        """Whether this member is to say that it holds the close that was proposed."""
        return self.proposed is not None and self.hold is None and self.is_in and not self.lacking

    def lacks_most(self, roster: RosterView, means: bytes) -> bool:
        """Whether a close with these digests of `means` lacks those of more than half of the owners."""
        if not roster.givers:
            return False
        owners = [owner for owner in roster.owners if roster.pieces_of(owner, self.pieces)]
        came = [owner for owner in owners if digest_at(means, roster.members.index(owner)) not in (b"", _NONE)]
        return 2 * len(came) < len(owners)

    def compare_close(self, said: Said) -> None:
        """A close that another member went by."""
        if self.close is not None:
            self._compare(self.close, said)

    def named(self, owner: PeerId) -> bytes:
        """The digest of the means of `owner` that the close names; empty: none, or there is no close."""
        if self.proposed is None or self.roster is None or owner not in self.roster.commits:
            return b""
        digest = digest_at(self.proposed.word.close.means, self.roster.members.index(owner))
        return b"" if digest == _NONE else digest

    def closing(self) -> bytes:
        """The digests of the means that came, as a close by this member names them."""
        assert self.roster is not None
        here = {owner: means.said.digest for owner, means in self.means.items()}
        return b"".join(here.get(member, _NONE) for member in self.roster.members)

    @property
    def lacking(self) -> list[PeerId]:
        """The owners whose means the close names, and which are not here."""
        assert self.roster is not None
        named = [(owner, self.named(owner)) for owner in self.roster.owners]
        return [
            owner
            for owner, digest in named
            if digest and ((here := self.means.get(owner)) is None or here.said.digest != digest)
        ]

    def result(self) -> tuple[list[Data | None], list[bool]]:
        """After the close: (the mean of each piece, None where there is none; whether ours is in it)."""
        assert self.roster is not None
        means: list[Data | None] = [None] * self.pieces
        ours = [False] * self.pieces
        for owner in self.roster.owners:
            here = self.means.get(owner)
            if here is None or here.said.digest != self.named(owner):
                continue
            took = self.taken(here.said).get(self.me, False)
            for piece, data in zip(self.roster.pieces_of(owner, self.pieces), here.data, strict=True):
                means[piece] = data
                ours[piece] = took
        return means, ours

    def went_on(self, dropped: bytes) -> frozenset[PeerId]:
        """After the close: the members that went by another close before than this one did, if they are most of those
        that say, or if that was the `dropped` one, which this member held in a round that it gave up."""
        assert self.roster is not None
        said = {peer: self.commits[peer].word.commit.before for peer in self.roster.members if peer != self.me}
        mine = self.commits[self.me].word.commit.before
        if not mine:
            return frozenset()
        if dropped and dropped in said.values():
            return frozenset([peer for peer, before in said.items() if before == dropped])
        common, times = Counter([before for before in said.values() if before] or [mine]).most_common(1)[0]
        if common == mine or 2 * times <= 1 + sum(1 for before in said.values() if before):
            return frozenset()
        return frozenset([peer for peer, before in said.items() if before == common])

    def counted(self) -> list[PeerId]:
        """After the close: the givers whose pieces most owners took."""
        assert self.roster is not None
        votes = [self.taken(self.means[o].said) for o in self.roster.owners if self.named(o) and o in self.means]
        return [peer for peer in self.roster.givers if 2 * sum(vote[peer] for vote in votes) > len(votes)]

    def agreements(self) -> dict[str, float]:
        """After the close: what the packet of each giver has in common with the others', by the middle one of what the
        owners say: a few that lie about it change nothing."""
        assert self.roster is not None
        said = [self.means[owner].said for owner in self.roster.owners if self.named(owner) and owner in self.means]
        lists = [unpack_floats(one.word.means.agreements, len(self.roster.members), "agreements") for one in said]
        found = dict[str, float]()
        for place, peer in enumerate(self.roster.members):
            values = [
                values[place] for one, values in zip(said, lists, strict=True) if self.taken(one).get(peer, False)
            ]
            if values:
                found[peer] = median_low(values)
        return found

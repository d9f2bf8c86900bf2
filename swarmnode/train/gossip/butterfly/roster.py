"""The roster of a round: the packets that it averages, the owners of their pieces, and the member that says so.

Views of members differ, and a round needs one. So the member that comes first in an order by hash, another in each
round, writes down whose commits it has, and all others go by its roster. Where it stays silent the next one does. Of
two rosters that of the later attempt counts, of the same attempt that of the member which comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from swarmnode.base.bounds import parse
from swarmnode.base.bounds.table import MEMBERS_MAX
from swarmnode.base.errors import RemoteFault
from swarmnode.base.ids import PeerId, RunId, digest64
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.train.gossip.butterfly.word import Said, hear, pack_bits, short_digest, unpack_bits


@dataclass(frozen=True, slots=True)
class RoundOf:
    """A round of a stage of a run."""

    run_id: RunId
    stage: int
    round_index: int

    def rank(self, peer: PeerId) -> int:
        """The place of `peer` among those who may write the roster."""
        return digest64("roster", self.run_id, self.stage, self.round_index, peer)

    def order(self, peers: Iterable[PeerId]) -> list[PeerId]:
        """`peers`, the one first that is to write the roster."""
        return sorted(peers, key=self.rank)

    def deal(self, peers: Iterable[PeerId]) -> list[PeerId]:
        """`peers` in the order in which pieces are dealt to them."""
        return sorted(peers, key=lambda peer: digest64("owner", self.run_id, self.stage, self.round_index, peer))


@dataclass(frozen=True)
class RosterView:
    """A roster, opened: the members by name, with their commits, and those who average pieces."""

    of: RoundOf
    said: Said
    commits: Mapping[PeerId, Said]
    owners: Sequence[PeerId]  # in the order of dealing
    elsewhere: frozenset[PeerId]  # members whose packets led elsewhere than most: they do not count

    @property
    def writer(self) -> PeerId:
        return self.said.member

    @cached_property
    def members(self) -> tuple[PeerId, ...]:
        return tuple(self.commits)

    @cached_property
    def givers(self) -> tuple[PeerId, ...]:
        """The members whose packets count."""
        return tuple(peer for peer, said in self.commits.items() if not said.word.commit.newcomer)

    @property
    def priority(self) -> tuple[int, int]:
        """The roster with the greatest counts."""
        return self.said.word.roster.attempt, -self.of.rank(self.writer)

    def owner(self, piece: int) -> PeerId:
        """The member that averages a piece."""
        return self.owners[piece % len(self.owners)]

    def pieces_of(self, peer: PeerId, pieces: int) -> list[int]:
        """The pieces of `pieces` that `peer` averages."""
        return [piece for piece in range(pieces) if self.owner(piece) == peer]


def write_roster(
    of: RoundOf,
    commits: Mapping[PeerId, Said],
    owners: Collection[PeerId],
    elsewhere: Collection[str],
    attempt: int,
) -> wire.RoundWord:
    """The word of a roster of `commits`: `owners` average pieces, and the packets of those `elsewhere` do not count."""
    members = sorted(commits)
    body = wire.Roster(
        attempt=attempt,
        commits=[commits[member].signed.SerializeToString(deterministic=True) for member in members],
        owners=pack_bits([member in owners for member in members]),
        elsewhere=pack_bits([member in elsewhere for member in members]),
    )
    return wire.RoundWord(round=of.round_index, stage=of.stage, roster=body)


def open_roster(of: RoundOf, said: Said, known: Mapping[PeerId, Said]) -> RosterView:
    """The roster in `said`; signatures of commits that are `known` are not checked again. Raises RemoteFault if it is
    not in order, not of this round, or nobody averages."""
    body = said.word.roster
    commits = dict[PeerId, Said]()
    if said.word.round != of.round_index or not 0 < len(body.commits) <= MEMBERS_MAX:
        raise RemoteFault(
            f"a roster of {len(body.commits)} members of round {said.word.round}; {of.round_index} is due"
        )
    for raw in body.commits:
        signed = parse(wire.SignedWord, raw, "a commit in a roster")
        commit = _heard(signed, known) or hear(signed, of.run_id, of.stage, "commit")
        if commit.word.round != of.round_index or (commits and commit.member <= max(commits)):
            raise RemoteFault("a roster whose commits are of other rounds, or not in order")
        commits[commit.member] = commit
    owns = unpack_bits(body.owners, len(commits), "owners of pieces")
    owners = [member for member, bit in zip(commits, owns, strict=True) if bit]
    if not owners:
        raise RemoteFault("a roster in which nobody averages")
    leads = unpack_bits(body.elsewhere, len(commits), "packets that lead elsewhere")
    elsewhere = frozenset([member for member, bit in zip(commits, leads, strict=True) if bit])
    return RosterView(of, said, commits, of.deal(owners), elsewhere)


def _heard(signed: wire.SignedWord, known: Mapping[PeerId, Said]) -> Said | None:
    digest = short_digest(signed.word)
    return next((said for said in known.values() if said.digest == digest and said.signed == signed), None)


def leaves_out_too_many(roster: RosterView, due: Collection[PeerId]) -> bool:
    """Whether packets of more than half of those that are `due` do not count: the writer would average with few."""
    return 2 * len((roster.commits.keys() - roster.elsewhere) & set(due)) < len(due)


def choose_owners(me: PeerId, commits: Mapping[PeerId, Said], met: Callable[[PeerId], bool]) -> set[PeerId]:
    """The members that average pieces: of the givers those that were met before, since keys cost nothing, and `me`; all
    of them where none was, as at a run's begin; all members where nobody gives."""
    givers = [peer for peer, said in commits.items() if not said.word.commit.newcomer]
    if not any(met(peer) for peer in givers if peer != me):
        return {*(givers or commits)}
    return {peer for peer in givers if peer == me or met(peer)}

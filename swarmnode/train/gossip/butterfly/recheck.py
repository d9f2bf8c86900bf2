"""Means are checked after their round: members drawn by hash average some pieces again, and show a false mean to all.

The digest of the next round's roster draws the pieces and who checks them: nobody knew it while the means were made,
since it holds the commits of all members. A checker asks the members that an owner took for their pieces, which must be
those committed to, and averages them. A false mean is shown with all that it is made of. Each word in it is signed, so
that each member sees for itself, and nobody is blamed on another's word. A quarter of the pieces is checked after each
round: an owner that falsifies the one it has among sixty-four is found within four rounds most of the time, one of four
owners, with sixteen false means, in the first of a hundred rounds but one. Members send an eighth more for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from swarmnode.base.errors import RemoteFault, Unavailable
from swarmnode.base.ids import PeerId, digest64
from swarmnode.base.ports import Answer, Data, GivenPiece, Priority
from swarmnode.base.remembered import Remembered
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.net.membership.swarm import StageContext
from swarmnode.train.gossip.butterfly.roster import RosterView, RoundOf, open_roster
from swarmnode.train.gossip.butterfly.round_state import RoundState, check_list, members_taken
from swarmnode.train.gossip.butterfly.word import DIGEST_NBYTES, Said, digest_at, hear, short_digest

CHECKED_SHARE = 4  # guess: one in so many pieces is averaged again; more finds a false mean sooner, and sends more
Ask = Callable[[PeerId, int, Sequence[int]], Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class Falsehood:
    """A mean that was found false: whose, in which round, the proof with its `data`, and who is to see it."""

    owner: PeerId
    round_index: int
    proof: wire.FalseMean
    data: bytes
    hearers: Sequence[PeerId]


@dataclass(frozen=True, slots=True)
class ShownPiece:
    """A member's piece, and the digests and lengths of all of its packet."""

    digests: bytes
    lengths: bytes
    data: Data


def roster_pieces(roster: RosterView, piece: int, given: Mapping[PeerId, Mapping[int, Data]]) -> list[GivenPiece]:
    """The content of the mean of `piece`: all givers of the roster in order, with what they gave."""
    found = list[GivenPiece]()
    for peer in roster.givers:
        commit = roster.commits[peer].word.commit
        data = given[peer][piece] if peer in given else None
        found.append(GivenPiece(commit.length, commit.targets, data, peer not in roster.elsewhere))
    return found


def drawn(seed: bytes, pieces: int, checkers: Sequence[PeerId], me: PeerId) -> list[int]:
    """The pieces that `me`, one of `checkers`, averages again."""
    order = sorted(range(pieces), key=lambda piece: digest64("checked", seed, piece))
    chosen = order[: -(-pieces // CHECKED_SHARE)]
    return [piece for piece in chosen if checkers[digest64("checker", seed, piece) % len(checkers)] == me]


class Recheck:
    """The checks of one replica."""

    def __init__(self, here: StageContext, ask: Ask, accuse: Callable[[Falsehood], None]) -> None:
        self._here = here
        self._ask = ask
        self._accuse = accuse
        self._begun = Remembered[int, bytes]()  # rounds whose means are checked

    def begin(self, tasks: asyncio.TaskGroup, last: RoundState, seed: bytes) -> None:
        """Check, in `tasks`, some means of the round `last`; once, whatever rosters follow."""
        roster = last.roster
        round_index = last.of.round_index
        if roster is None or round_index in self._begun or not last.is_in:
            return
        self._begun[round_index] = seed
        for piece in drawn(seed, last.pieces, roster.members, last.me):
            owner = roster.owner(piece)
            if owner != last.me and owner in last.means and owner not in last.lacking:
                tasks.create_task(self._check(last, roster, piece))

    async def _check(self, last: RoundState, roster: RosterView, piece: int) -> None:
        owner = roster.owner(piece)
        means = last.means[owner]
        took = [peer for peer, bit in last.taken(means.said).items() if bit]
        shown = dict[PeerId, ShownPiece]()
        for peer in took:
            try:
                shown[peer] = await self._shown(last, peer, piece)
            except (RemoteFault, Unavailable) as error:  # nobody can tell: it may have died, or left
                self._here.telemetry.event(
                    "butterfly.unchecked", round=last.of.round_index, peer=owner, reason=str(error), level="debug"
                )
                return
        said = means.data[roster.pieces_of(owner, last.pieces).index(piece)]
        if await self._is_false(roster, piece, means.said, said, shown):
            proof = wire.FalseMean(
                roster=roster.said.signed,
                means=means.said.signed,
                digests=means.digests,
                piece=piece,
                sizes=[memoryview(said).nbytes, *[memoryview(shown[peer].data).nbytes for peer in took]],
                lists=[shown[peer].digests + shown[peer].lengths for peer in took],
            )
            data = b"".join([bytes(said), *[bytes(shown[peer].data) for peer in took]])
            self._accuse(Falsehood(owner, last.of.round_index, proof, data, roster.members))

    async def _shown(self, last: RoundState, peer: PeerId, piece: int) -> ShownPiece:
        if peer == last.me:
            return ShownPiece(last.own.digests, last.own.lengths, last.own.drafted.pieces[piece])
        answer = await self._ask(peer, last.of.round_index, [piece])
        given = answer.header.butterfly
        if len(answer.tensors) != 1:
            raise RemoteFault(f"{len(answer.tensors)} pieces where one was asked for")
        return ShownPiece(given.digests, given.lengths, answer.tensors[0].data)

    async def _is_false(
        self, roster: RosterView, piece: int, means: Said, said: Data, shown: Mapping[PeerId, ShownPiece]
    ) -> bool:
        """Whether `said` is not the mean of what was `shown`. Raises RemoteFault unless that was committed to."""
        replica = self._here.replica
        round_index = roster.of.round_index

        def again() -> bool:
            for peer, found in shown.items():
                pieces = len(found.digests) // DIGEST_NBYTES
                lengths = check_list(roster.commits[peer], found.digests, found.lengths, pieces)
                if piece >= pieces or replica.piece_digest(found.data) != digest_at(found.digests, piece):
                    raise RemoteFault(f"piece {piece} is not the one committed to")
                replica.check_piece(round_index, piece, found.data, lengths[piece])
            replica.check_piece(round_index, piece, said, None)
            given = {peer: {piece: found.data} for peer, found in shown.items()}
            return replica.is_false_mean(round_index, piece, roster_pieces(roster, piece, given), said)

        return await self._here.compute.run(Priority.OUTER, 0, again)

    async def see(self, proof: wire.FalseMean, data: Data) -> tuple[PeerId, int]:
        """The owner of a false mean, and its round. Raises RemoteFault unless the proof holds."""
        here = self._here
        said = hear(proof.roster, here.run_id, here.stage, "roster")
        roster = open_roster(RoundOf(here.run_id, here.stage, said.word.round), said, {})
        means = hear(proof.means, here.run_id, here.stage, "means")
        body = means.word.means
        owns = (means.word.round, body.roster, body.means)
        if owns != (said.word.round, said.digest, short_digest(proof.digests)):
            raise RemoteFault("a false mean of another round")
        took = [peer for peer, bit in members_taken(roster, means).items() if bit]
        if len(proof.lists) != len(took) or len(proof.sizes) != 1 + len(took):
            raise RemoteFault("a false mean without all that it is made of")
        if sum(proof.sizes) != memoryview(data).nbytes:
            raise RemoteFault("a false mean of other sizes")
        parts = list[Data]()
        at = 0
        for size in proof.sizes:
            parts.append(memoryview(data)[at : at + size])
            at += size
        shown = dict[PeerId, ShownPiece]()
        for peer, raw, part in zip(took, proof.lists, parts[1:], strict=True):
            pieces = len(raw) // (DIGEST_NBYTES + 4)
            shown[peer] = ShownPiece(raw[: pieces * DIGEST_NBYTES], raw[pieces * DIGEST_NBYTES :], part)
            if roster.owner(proof.piece) != means.member:
                raise RemoteFault("a false mean of another owner")
            place = roster.pieces_of(means.member, pieces)
            if proof.piece not in place or here.replica.piece_digest(parts[0]) != digest_at(
                proof.digests, place.index(proof.piece)
            ):
                raise RemoteFault("a false mean that its owner did not sign")
        if not shown or not await self._is_false(roster, proof.piece, means, parts[0], shown):
            raise RemoteFault("a mean that is said to be false is right")
        return means.member, said.word.round

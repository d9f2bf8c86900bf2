"""Takes one replica through its rounds in pieces: sends and hears words, pieces and means, and waits for what is due.

    commit   each member tells all the digest of its pieces: nothing else travels before
    roster   one member, named by hash, writes down whose commits it has (roster.py)
    pieces   each giver sends each owner the pieces that it averages; they must be those committed to
    means    each owner sends all the means of its pieces
    close    the roster's writer says which means came
    hold     each member that has these means says so to all; once most members hold a close, all apply its means

So all members step by the same means, to the bit, whatever each saw. A member holds one close of a round, so no two
closes are held by most, also where a writer keeps its close to itself, shows it to one member, and the others begin
again (a quorum of each view: Paxos, Lamport 1998; the echo of reliable broadcast, Bracha 1987). A member whose commit
comes too late takes the means of the round from others, and its own gradient counts in the next. Where the roster's
writer dies the next one by hash begins again with those that are left; where an owner dies its pieces have no mean in
this step. The members send twice a packet in all, whatever their number. Means are checked afterwards (recheck.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from swarmnode.base.bounds.table import MEMBERS_MAX
from swarmnode.base.errors import RemoteFault, Unavailable
from swarmnode.base.ids import PeerId, short, stage_name
from swarmnode.base.ports import Answer, Call, Data, DraftedPieces, Priority, WireTensor
from swarmnode.base.remembered import Remembered
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.net.membership.liveness import PING_TIMEOUT_S, SMALL_CALL_S, patiently
from swarmnode.net.membership.swarm import StageContext
from swarmnode.train.gossip.agreement import Agreement
from swarmnode.train.gossip.butterfly.recheck import Falsehood, Recheck, roster_pieces
from swarmnode.train.gossip.butterfly.roster import RosterView, RoundOf, choose_owners, write_roster
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

ATTEMPTS_MAX = 4  # guess: writers of rosters tried in a round, before each goes on by itself
MUTE_ROUNDS_MAX = 64  # guess: a member that committed and sent nothing, over and over, is tried again after so many


@dataclass(frozen=True, slots=True)
class Meeting:
    """A round to be held: our packet, the members waited for, others that may take part; seconds that a member may take
    to commit, and those that the packets may take."""

    round_index: int
    drafted: DraftedPieces
    samples: int
    gives: bool
    awaited: Sequence[PeerId]
    others: Sequence[PeerId]
    commit_s: float
    packets_s: float


@dataclass(frozen=True, slots=True)
class HeldRound:
    """A round that was held: the mean of each piece, whether ours is in it, whose packets came, who gave nothing, whose
    packets lead elsewhere, the samples behind each member's, and the members of its roster."""

    means: Sequence[Data | None]
    ours: Sequence[bool]
    counted: Sequence[PeerId]
    newcomers: Collection[PeerId]
    elsewhere: Collection[PeerId]
    samples: dict[PeerId, int]
    members: Sequence[PeerId]
    reason: str = ""


def tensor_of(data: Data) -> WireTensor:
    """`data` as it travels."""
    return WireTensor("u8", (memoryview(data).nbytes,), data)


class Butterfly:
    """The rounds of one replica, one at a time, and the handler of its members' calls."""

    def __init__(
        self,
        here: StageContext,
        done: Callable[[], int],
        *,
        met: Callable[[PeerId], int],
        left_out: Callable[[], Collection[PeerId]],
        lost: Callable[[PeerId], None],
        past: Callable[[PeerId, int], None],
        called_for: Callable[[PeerId, int], None],
    ) -> None:
        """`done`: the last round that is over here. `met`: rounds that a peer was in. `lost` is told of members that
        cannot be reached, `past` of those that are through with a round, `called_for` of those that begin one."""
        self._here = here
        self._done = done
        self._met = met
        self._left_out = left_out
        self._lost = lost
        self._past = past
        self.called_for = called_for
        # Told of members that were proven to lie, and how.
        self.exclude: Callable[[PeerId, str], None] = lambda peer, reason: None
        self.state: RoundState | None = None  # of the round under way
        self.last: RoundState | None = None  # of the last one held: for members that come late, and for checks
        self._dropped = b""  # the close that this member held in the last round, if it gave that up
        # Members that went by another close before, so that their state is to be taken; empty: none.
        self.went_on = frozenset[PeerId]()
        self._early = Remembered[PeerId, Said]()  # commits for rounds that have not begun here
        self._mute = Remembered[PeerId, tuple[int, int]]()  # times in a row, and the round until which it is left out
        self._agreement = Agreement()
        self._elsewhere = set[str]()  # members whose packets lead elsewhere than most, as of the last round
        self._compared: RoundState | None = None  # the last round whose close was compared with another one's
        self._changed = asyncio.Event()
        self._incarnation = int(asyncio.get_running_loop().time() * 1e3)
        self._accusers = Remembered[PeerId, int]()  # the round in which each was heard last
        self._packets_s = SMALL_CALL_S  # that a round's packets may take, as of the last one
        self._tasks: asyncio.TaskGroup | None = None  # of the node: means go on to the others after our step
        self._recheck = Recheck(here, self.ask_pieces, self._accuse)

    # ---- waiting

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    async def _awaited(self, peer: PeerId, condition: Callable[[], bool], within_s: float) -> str:
        """Wait for `peer` to do what `condition` sees, `within_s` seconds at most. Returns why it did not, else ""."""
        try:
            async with asyncio.timeout(within_s):
                wait = self._until(condition)
                await patiently(self._here.transport, self._here.run_id, peer, wait, PING_TIMEOUT_S)
        except TimeoutError:
            return f"{short(peer)} was waited for {within_s:.3g} s"
        except (RemoteFault, Unavailable) as error:
            self._lost(peer)
            if self.state is not None:
                self.state.gone.add(peer)
                self._wake()
            return str(error)
        return ""

    # ---- our own rounds

    @property
    def called(self) -> int:
        """The latest round that others have begun; 0: none."""
        return max((said.word.round for said in self._early.values()), default=0)

    async def meet(self, tasks: asyncio.TaskGroup, meeting: Meeting) -> HeldRound | None:
        """Hold a round; `tasks` run on after it. None if nobody could be met, or the others `went_on` without this
        member before: then nothing is applied."""
        self._tasks = tasks
        self._packets_s = meeting.packets_s
        state = await self._begin(meeting)
        self.state = state
        for peer, said in [*self._early.items()]:
            if said.word.round == meeting.round_index:
                state.hear_commit(said)
            if said.word.round <= meeting.round_index:
                del self._early[peer]
        try:
            async with asyncio.TaskGroup() as group:
                told = [
                    group.create_task(self._tell_commit(state, peer)) for peer in (*meeting.awaited, *meeting.others)
                ]
                reason = await self._settle(state, meeting)
                for task in told:
                    task.cancel()
            self._show_contradictions(state)
            if state.close is None or self._is_apart(state):
                self._dropped = b"" if state.hold is None else state.hold.word.hold.close
                return None
            self._dropped = b""
            self._remember_mute(state)
            self._elsewhere = self._agreement.refused(state.agreements())
            means, ours = state.result()
            samples = {peer: said.word.commit.samples for peer, said in state.commits.items()}
            state.given = {}
            self.last = state
            assert state.roster is not None
            newcomers = {*state.roster.members} - {*state.roster.givers}
            elsewhere = state.roster.elsewhere
            return HeldRound(means, ours, state.counted(), newcomers, elsewhere, samples, state.roster.members, reason)
        finally:
            self.state = None

    def _is_apart(self, state: RoundState) -> bool:
        """Whether this member lacks a step that the others took, or means of this one: its weights differ from
        theirs."""
        assert state.roster is not None
        self.went_on = state.went_on(self._dropped)
        if not self.went_on and state.lacking:
            self.went_on = frozenset(state.roster.members) - {state.me}
        return bool(self.went_on)

    def restored(self) -> None:
        """The replica was given another state: the last round is none of it."""
        self.last = None
        self._dropped = b""
        self.went_on = frozenset()

    async def _begin(self, meeting: Meeting) -> RoundState:
        here = self._here
        drafted = meeting.drafted
        digests = await here.compute.run(
            Priority.OUTER, 0, lambda: digests_of(drafted.pieces, here.replica.piece_digest)
        )
        own = OwnPacket(drafted, digests, pack_floats(drafted.lengths))
        body = wire.PacketCommit(
            pieces=commit_digest(own.digests, own.lengths),
            length=packet_length(drafted.lengths),
            targets=drafted.targets,
            samples=meeting.samples,
            newcomer=not meeting.gives,
            before=b"" if self.last is None or self.last.close is None else self.last.close.digest,
        )
        of = RoundOf(here.run_id, here.stage, meeting.round_index)
        commit = self._say(wire.RoundWord(round=of.round_index, stage=of.stage, commit=body))
        return RoundState(of, here.me, commit, own, meeting.awaited, here.replica.piece_digest)

    def _say(self, word: wire.RoundWord) -> Said:
        word.incarnation = self._incarnation
        return say(self._here.identity, self._here.run_id, word)

    async def _tell_commit(self, state: RoundState, peer: PeerId) -> None:
        call = wire.Butterfly(word=state.commits[state.me].signed)
        try:
            self._hear_answer(state, peer, await self._call(peer, call, SMALL_CALL_S))
        except (RemoteFault, Unavailable) as error:
            state.gone.add(peer)
            if isinstance(error, RemoteFault):
                self._lost(peer)
        self._wake()

    def _hear_answer(self, state: RoundState, peer: PeerId, answer: Answer) -> None:
        """A member says that the round is over, and how; that it holds a close; or that it follows another roster.
        Raises RemoteFault or Unavailable for what cannot be."""
        given = answer.header.butterfly
        of = state.of
        if state is not self.state:
            return
        holds = [hear(one, of.run_id, of.stage, "hold") for one in given.holds]
        if not given.HasField("roster"):
            for one in holds:
                state.hear_hold(one)
                self._wake()
            return
        roster = hear(given.roster, of.run_id, of.stage, "roster")
        if given.HasField("word"):
            close = hear(given.word, of.run_id, of.stage, "close")
            if state.hear_over(peer, roster, close, holds):
                self._past(peer, close.word.round)
        else:
            self._hear_roster(state, roster)
        self._wake()

    def _hear_roster(self, state: RoundState, said: Said) -> None:
        """A roster of another member. Raises as RoundState.hear_roster, and for one whose writer was silent lately."""
        if self._is_mute(said.member, state.of.round_index):
            raise Unavailable(f"{short(said.member)} did not do its part lately, and writes no roster")
        if state.hear_roster(said):
            self._on_roster(state)

    async def _settle(self, state: RoundState, meeting: Meeting) -> str:
        """Until the round is closed and its means are here, or nobody can close it; returns why not as planned."""
        reason = ""
        while state.close is None and len(state.given_up) < ATTEMPTS_MAX and not state.behind:
            if state.over is not None:
                return await self._catch_up(state, meeting)
            roster = state.roster
            if roster is not None and state.hold is not None:
                if found := await self._until_held(state, roster, meeting):
                    return found
                continue
            if state.proposed is None and (roster is None or roster.writer in state.given_up):
                writer = state.writer(self._able(state, meeting))
                if writer is None:
                    break
                if writer == state.me:
                    await self._write(state, meeting)
                    continue
                found = await self._awaited(writer, partial(_moved, state, roster), _roster_s(meeting))
            else:
                assert roster is not None
                writer = roster.writer
                found = await self._carry_out(state, roster, meeting)
            if found and not _moved(state, roster) and state.hold is None:
                reason = found
                state.given_up.add(writer)
                self._tell(state, writer, reason)
                if state.proposed is not None:
                    state.drop_proposal()
        if state.close is not None:
            await self._complete(state, meeting)
        return reason

    def _able(self, state: RoundState, meeting: Meeting) -> list[PeerId]:
        """The members that may write the roster: of those here the ones that were met before, if any was, since keys
        cost nothing; and this one."""
        out = self._left_out()
        here = {*meeting.awaited, *state.commits} - {state.me} - {*out}
        known = {peer for peer in here if self._met(peer) and not self._is_mute(peer, state.of.round_index)}
        return [state.me, *(known or here)]

    def _is_mute(self, peer: PeerId, round_index: int) -> bool:
        return round_index < self._mute.get(peer, (0, 0))[1]

    async def _write(self, state: RoundState, meeting: Meeting) -> None:
        """Wait for the commits, and write the roster."""
        round_index = state.of.round_index
        due = [peer for peer in meeting.awaited if not self._is_mute(peer, round_index)]

        before = state.roster

        def over() -> bool:
            missing = any(peer not in state.commits and peer not in state.gone for peer in due)
            return not missing or state.roster is not before or _ended(state)

        async def come(peer: PeerId) -> None:
            await self._awaited(peer, lambda: peer in state.commits or peer in state.gone or over(), meeting.commit_s)

        await asyncio.gather(*[come(peer) for peer in due])
        if _ended(state) or state.roster is not before:
            return
        await self._sign_roster(state, meeting)

    async def _sign_roster(self, state: RoundState, meeting: Meeting) -> None:
        round_index = state.of.round_index
        before = state.roster
        allowed = {state.me, *meeting.awaited, *meeting.others} - {*self._left_out()}
        commits = {
            peer: said
            for peer, said in state.commits.items()
            if (peer in allowed or self._met(peer))
            and peer not in state.gone
            and peer not in state.silent
            and not self._is_mute(peer, round_index)
        }
        commits[state.me] = state.commits[state.me]
        commits = {peer: commits[peer] for peer in state.of.order(commits)[:MEMBERS_MAX]}
        attempt = len(state.given_up)
        if before is not None:
            attempt = max(attempt, before.said.word.roster.attempt + 1)
        owners = choose_owners(state.me, commits, lambda peer: self._met(peer) > 0)
        said = self._say(write_roster(state.of, commits, owners, self._elsewhere, attempt))
        try:
            if len(commits) < 2:
                raise Unavailable("nobody else committed")
            state.hear_roster(said)
        except Unavailable as error:
            state.given_up.add(state.me)
            self._tell(state, state.me, str(error))
            return
        self._on_roster(state)
        assert self._tasks is not None
        for peer in sorted({*commits, *meeting.awaited, *meeting.others} - {state.me}):
            self._tasks.create_task(self._tell_roster(state, peer, said))

    async def _tell_roster(self, state: RoundState, peer: PeerId, said: Said) -> None:
        """Send our roster to `peer`. Where most refuse it, go by another one: else we would step by ourselves."""
        try:
            answer = await self._call(peer, wire.Butterfly(word=said.signed), SMALL_CALL_S)
            follows = not answer.header.butterfly.HasField("roster")
            self._hear_answer(state, peer, answer)
        except (RemoteFault, Unavailable):
            follows = False
        if follows or state is not self.state or not state.follows(said.digest) or _ended(state) or state.hold:
            return
        if state.roster is not None and peer in state.roster.commits:
            state.refused.add(peer)
        if state.is_refused:
            state.give_up_own()
            self._tell(state, state.me, "most members refuse its roster")
            self._wake()
            if state.roster is not None:
                await self._ask_close(state, state.roster.writer)

    async def _ask_close(self, state: RoundState, writer: PeerId) -> None:
        """Ask `writer` whether its roster is closed already."""
        request = wire.PieceRequest(round=state.of.round_index, stage=state.of.stage)
        with contextlib.suppress(RemoteFault, Unavailable):
            self._hear_answer(state, writer, await self._call(writer, wire.Butterfly(wanted=request), SMALL_CALL_S))

    def _tell(self, state: RoundState, peer: PeerId, reason: str) -> None:
        self._here.telemetry.event(
            "butterfly.given_up", level="warning", round=state.of.round_index, peer=peer, reason=reason
        )

    def _on_roster(self, state: RoundState) -> None:
        """A roster is followed: what it is, nobody knew before, so its digest says who checks which means."""
        self._wake()
        assert state.roster is not None
        if self.last is not None and self._tasks is not None:
            self._recheck.begin(self._tasks, self.last, state.roster.said.digest)
            self._compare_closes(state, self.last)

    # ---- a roster's round

    async def _carry_out(self, state: RoundState, roster: RosterView, meeting: Meeting) -> str:
        """Give pieces, average ours, close the round if the roster is ours, until its close is held here. Returns why
        it is not, or ""."""
        heard = state.proposed is not None  # its close came from a member that holds it: there is nothing to give
        work: list[Coroutine[Any, Any, None]] = [self._hold(state, meeting)]
        if state.is_in and state.me in roster.givers and not heard:
            work += [self._give(state, roster, owner, meeting) for owner in roster.owners if owner != state.me]
        if state.is_in and state.mine and not heard:
            work.append(self._average(state, roster, meeting))
        if roster.writer == state.me:
            work.append(self._close(state, roster, meeting))

        def over() -> bool:
            return _moved(state, roster) or state.hold is not None

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
            if roster.writer == state.me:
                await self._until(over)
                found = ""
            elif heard:
                found = await self._within(2.0 * meeting.packets_s, over)
            else:
                found = await self._awaited(roster.writer, over, 3.0 * meeting.packets_s)
            for task in tasks:
                task.cancel()
        return found

    async def _within(self, seconds: float, condition: Callable[[], bool]) -> str:
        try:
            async with asyncio.timeout(seconds):
                await self._until(condition)
        except TimeoutError:
            return f"nothing came within {seconds:.3g} s"
        return ""

    async def _hold(self, state: RoundState, meeting: Meeting) -> None:
        """Wait for a close and the means that it names, and tell all that this member holds it."""
        await self._until(lambda: state.proposed is not None)
        await self._complete(state, meeting)
        self._say_hold(state, told=())

    def _say_hold(self, state: RoundState, told: Collection[PeerId]) -> None:
        """Hold the close that was proposed, if all its means are here, and tell all but those `told` otherwise."""
        if not state.may_hold:
            return
        assert state.proposed is not None
        of = state.of
        word = wire.RoundWord(round=of.round_index, stage=of.stage, hold=wire.RoundHold(close=state.proposed.digest))
        state.hold = self._say(word)
        state.hear_hold(state.hold)
        self._wake()
        self._tell_hold(state, told)

    def _tell_hold(self, state: RoundState, told: Collection[PeerId]) -> None:
        assert state.roster is not None and state.hold is not None
        for peer in sorted({*state.roster.members, *state.commits} - {state.me, *told}):
            self._send(peer, wire.Butterfly(word=state.hold.signed), (), SMALL_CALL_S)

    async def _until_held(self, state: RoundState, roster: RosterView, meeting: Meeting) -> str:
        """Wait until most members hold the close that this one holds, or another; ask them again at times. Returns why
        they do not, or ""."""
        tries = math.ceil(2.0 * meeting.packets_s / meeting.commit_s)
        for _ in range(tries):
            if not await self._within(meeting.commit_s, lambda: _moved(state, roster)):
                return ""
            self._tell_hold(state, ())
        return f"most members do not hold the close of {short(roster.writer)}"

    async def _give(self, state: RoundState, roster: RosterView, owner: PeerId, meeting: Meeting) -> None:
        pieces = roster.pieces_of(owner, state.pieces)
        if not pieces:
            return
        body = wire.GivenPieces(
            round=state.of.round_index,
            stage=state.of.stage,
            roster=roster.said.digest,
            digests=state.own.digests,
            lengths=state.own.lengths,
        )
        tensors = [tensor_of(state.own.drafted.pieces[piece]) for piece in pieces]
        try:
            self._hear_answer(
                state, owner, await self._call(owner, wire.Butterfly(pieces=body), meeting.packets_s, tensors)
            )
        except (RemoteFault, Unavailable) as error:
            self._here.telemetry.event(
                "butterfly.not_given", round=state.of.round_index, peer=owner, reason=str(error), level="debug"
            )

    async def _average(self, state: RoundState, roster: RosterView, meeting: Meeting) -> None:
        """Wait for the pieces that are ours to average, and give their means to all."""
        mine = state.mine
        own = state.own
        givers = [peer for peer in roster.givers if peer != state.me]

        async def come(peer: PeerId) -> None:
            await self._awaited(peer, lambda: peer in state.given, meeting.packets_s)

        await asyncio.gather(*[come(peer) for peer in givers])
        given = {peer: pieces.data for peer, pieces in state.given.items()}
        if state.me in roster.givers:
            given[state.me] = {piece: own.drafted.pieces[piece] for piece in mine}
        if not given:
            return
        round_index = state.of.round_index

        def average() -> tuple[list[Data], list[float]]:
            means = list[Data]()
            total = [0.0] * len(roster.givers)
            for piece in mine:
                mean = self._here.replica.mean_piece(round_index, piece, roster_pieces(roster, piece, given))
                means.append(mean.data)
                total = [sum(both) for both in zip(total, mean.agreements, strict=True)]
            return means, total

        means, total = await self._here.compute.run(Priority.OUTER, 0, average)
        told = dict(zip(roster.givers, total, strict=True))
        digests = digests_of(means, self._here.replica.piece_digest)
        body = wire.PieceMeans(
            roster=roster.said.digest,
            means=short_digest(digests),
            taken=pack_bits([member in given for member in roster.members]),
            agreements=pack_floats([told.get(member, 0.0) / len(mine) for member in roster.members]),
        )
        said = self._say(wire.RoundWord(round=round_index, stage=state.of.stage, means=body))
        state.hear_means(MeanSet(said, digests, means))
        self._wake()
        call = wire.Butterfly(means=wire.GivenMeans(word=said.signed, digests=digests))
        for peer in roster.members:
            if peer != state.me:
                self._send(peer, call, [tensor_of(mean) for mean in means], meeting.packets_s)

    async def _close(self, state: RoundState, roster: RosterView, meeting: Meeting) -> None:
        """Wait for all means, as the roster's writer, and say which came."""
        owners = [owner for owner in roster.owners if owner != state.me and roster.pieces_of(owner, state.pieces)]
        if not roster.givers:
            owners = []  # there is nothing to average

        async def come(owner: PeerId) -> None:
            await self._awaited(owner, lambda: owner in state.means, 2.0 * meeting.packets_s)

        waits: list[Coroutine[Any, Any, object]] = [come(owner) for owner in owners]
        if state.mine and roster.givers:
            waits.append(self._within(2.0 * meeting.packets_s, lambda: state.me in state.means))
        await asyncio.gather(*waits)
        if state.roster is not roster:
            return
        if state.lacks_most(roster, state.closing()):
            state.give_up_own()
            self._tell(state, state.me, "the means of most owners did not come")
            self._wake()
            return
        body = wire.RoundClose(roster=roster.said.digest, means=state.closing())
        said = self._say(wire.RoundWord(round=state.of.round_index, stage=state.of.stage, close=body))
        state.hear_close(said)
        others = sorted({*roster.members, *state.commits, *meeting.awaited} - {state.me})
        self._say_hold(state, told=others)
        for peer in others:
            self._send(peer, wire.Butterfly(word=said.signed), (), SMALL_CALL_S)

    async def _complete(self, state: RoundState, meeting: Meeting) -> None:
        """Wait for the means that a close names, and fetch those that do not come from members that hold it."""
        assert state.roster is not None and state.proposed is not None
        holders = [state.roster.writer, *sorted(state.holders(state.proposed))]

        async def come(owner: PeerId) -> None:
            if state.is_in and owner not in state.means:
                await self._awaited(owner, lambda: owner not in state.lacking, meeting.packets_s)
            if owner in state.lacking:
                await self._fetch_means(state, owner, [*holders, owner], meeting.packets_s)

        await asyncio.gather(*[come(owner) for owner in state.lacking])

    async def _catch_up(self, state: RoundState, meeting: Meeting) -> str:
        """The round was closed without us: take its means from those that have them."""
        peer = state.take_over()
        assert state.roster is not None
        givers = [peer, state.roster.writer]
        lacking = [self._fetch_means(state, owner, givers, meeting.packets_s) for owner in state.lacking]
        await asyncio.gather(*lacking)
        return f"{short(peer)} was through with it"

    async def _fetch_means(self, state: RoundState, owner: PeerId, givers: Sequence[PeerId], within_s: float) -> None:
        request = wire.PieceRequest(round=state.of.round_index, stage=state.of.stage, owner=owner)
        for giver in dict.fromkeys(givers):
            if giver == state.me:
                continue
            try:
                answer = await self._call(giver, wire.Butterfly(wanted=request), within_s)
                given = answer.header.butterfly
                if given.HasField("word"):
                    await self._hear_means(state, given.word, given.digests, _data(answer))
            except (RemoteFault, Unavailable) as error:
                self._here.telemetry.event(
                    "butterfly.not_given", round=state.of.round_index, peer=giver, reason=str(error), level="debug"
                )
            if owner not in state.lacking:
                return

    def _remember_mute(self, state: RoundState) -> None:
        """Leave out, for a while, members that committed and sent nothing: twice as long each time."""
        assert state.roster is not None
        counted = {*state.counted()}
        round_index = state.of.round_index
        owners = [owner for owner in state.roster.owners if state.roster.pieces_of(owner, state.pieces)]
        silent = {owner for owner in owners if not state.named(owner)}
        silent |= {*state.roster.givers} - counted if any(state.named(owner) for owner in owners) else set()
        silent |= state.given_up  # writers of rosters
        for peer in {*state.roster.members, *state.given_up} - {state.me}:
            times = self._mute.get(peer, (0, 0))[0]
            if peer in silent:
                self._mute[peer] = (times + 1, round_index + 1 + min(2**times, MUTE_ROUNDS_MAX))
            elif times and peer in counted:
                self._mute[peer] = (times - 1, 0)

    # ---- contradictions

    def _compare_closes(self, state: RoundState, last: RoundState) -> None:
        """Ask a member that went by another close of the `last` round for it: its writer may have said two."""
        if self._compared is last or last.close is None or self._tasks is None:
            return
        self._compared = last
        mine = last.close.digest
        for peer, said in state.commits.items():
            if said.word.commit.before not in (b"", mine):
                self._tasks.create_task(self._compare_close(peer, last))
                return

    async def _compare_close(self, peer: PeerId, last: RoundState) -> None:
        request = wire.PieceRequest(round=last.of.round_index, stage=last.of.stage)
        try:
            given = (await self._call(peer, wire.Butterfly(wanted=request), SMALL_CALL_S)).header.butterfly
            last.compare_close(hear(given.word, last.of.run_id, last.of.stage, "close"))
        except (RemoteFault, Unavailable):
            return
        self._show_contradictions(last)

    def _show_contradictions(self, state: RoundState) -> None:
        """Exclude members that said two things, and show both to all others."""
        for one, other in state.contradictions:
            self.exclude(one.member, f"it said two {one.kind}s of round {one.word.round}")
            proof = wire.Contradiction(one=one.signed, other=other.signed)
            for peer in sorted({*state.commits} - {state.me, one.member}):
                self._send(peer, wire.Butterfly(contradiction=proof), (), SMALL_CALL_S)
        state.contradictions = []

    def _hear_contradiction(self, proof: wire.Contradiction) -> None:
        here = self._here
        one = hear(proof.one, here.run_id, here.stage)
        other = hear(proof.other, here.run_id, here.stage)
        if not contradict(one, other):
            raise RemoteFault("two words that do not contradict each other")
        self.exclude(one.member, f"it said two {one.kind}s of round {one.word.round}")

    async def ask_pieces(self, peer: PeerId, round_index: int, pieces: Sequence[int]) -> Answer:
        """Some pieces of the packet of `peer` in a round, with the lists of all; nothing is checked."""
        request = wire.PieceRequest(round=round_index, stage=self._here.stage, pieces=pieces)
        return await self._call(peer, wire.Butterfly(wanted=request), self._packets_s)

    def _accuse(self, found: Falsehood) -> None:
        """Exclude an owner whose mean was found false here, and show it to all others."""
        assert self._tasks is not None
        self.exclude(found.owner, f"its mean of piece {found.proof.piece} in round {found.round_index} is false")
        for peer in found.hearers:
            if peer not in (self._here.me, found.owner):
                self._send(peer, wire.Butterfly(false_mean=found.proof), [tensor_of(found.data)], self._packets_s)

    async def _hear_false_mean(self, peer: PeerId, proof: wire.FalseMean, tensors: Sequence[WireTensor]) -> None:
        """See for ourselves, once a round for each accuser."""
        if self._accusers.get(peer, -1) == self._done() or len(tensors) != 1:
            raise Unavailable("one accusation a round is heard")
        self._accusers[peer] = self._done()
        owner, round_index = await self._recheck.see(proof, tensors[0].data)
        self.exclude(owner, f"its mean of piece {proof.piece} in round {round_index} is false")

    # ---- calls

    async def _call(
        self, peer: PeerId, body: wire.Butterfly, within_s: float, tensors: Sequence[WireTensor] = ()
    ) -> Answer:
        call = Call(wire.Request(run_id=self._here.run_id, butterfly=body), tensors)
        most = self._here.manifest.limits.frame_bytes_max if body.HasField("wanted") else 0
        return await self._here.transport.call(peer, call, timeout_s=within_s, reply_bytes_max=most)

    def _send(self, peer: PeerId, body: wire.Butterfly, tensors: Sequence[WireTensor], within_s: float) -> None:
        """Call `peer` beside the round, and after it."""
        state = self.state

        async def send() -> None:
            try:
                answer = await self._call(peer, body, within_s, tensors)
                if state is not None:
                    self._hear_answer(state, peer, answer)
            except (RemoteFault, Unavailable):
                return

        assert self._tasks is not None
        self._tasks.create_task(send())

    async def serve(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "butterfly". Raises RemoteFault for what no honest member says, Unavailable for what cannot
        be taken or given here."""
        body = call.header.butterfly
        match body.WhichOneof("body"):
            case "word":
                return self._serve_word(peer, body.word)
            case "pieces":
                return await self._serve_pieces(peer, body.pieces, _data(call))
            case "means":
                return await self._serve_means(peer, body.means, _data(call))
            case "wanted":
                return self._serve_wanted(body.wanted)
            case "false_mean":
                await self._hear_false_mean(peer, body.false_mean, call.tensors)
            case "contradiction":
                self._hear_contradiction(body.contradiction)
            case _:
                raise RemoteFault("a call about a round that says nothing")
        return _answer()

    def _serve_word(self, peer: PeerId, signed: wire.SignedWord) -> Answer:
        here = self._here
        state = self.state
        said = hear(signed, here.run_id, here.stage)
        if said.member != peer or said.kind == "means":
            raise RemoteFault(f"a word {said.kind!r} of {short(said.member)} brought by {short(peer)}")
        round_index = said.word.round
        if state is None or state.of.round_index != round_index:
            return self._early_or_late(said)
        if state.close is not None and said.kind not in ("close", "hold"):
            return _over(state)
        match said.kind:
            case "commit":
                state.hear_commit(said)
                self._wake()
                if state.roster is not None and peer not in state.roster.commits:
                    return self._other_roster(state)
            case "roster":
                if self._is_mute(peer, round_index) and state.roster is not None:
                    return self._other_roster(state)
                self._hear_roster(state, said)
                if not state.follows(said.digest):
                    return self._other_roster(state)
            case "hold":
                return self._serve_hold(state, said)
            case _:
                if state.hold is not None and not state.follows(said.word.close.roster):
                    return _held(state)
                state.hear_close(said)
                self._say_hold(state, told=(peer,))
        self._wake()
        return _answer(state.hold)

    def _serve_hold(self, state: RoundState, said: Said) -> Answer:
        if said.member not in state.commits:
            raise Unavailable(f"{short(said.member)} committed to nothing here")
        state.hear_hold(said)
        self._wake()
        if state.close is not None and state.close.digest != said.word.hold.close:
            return _over(state)
        if state.close is None and (state.proposed is None or state.proposed.digest != said.word.hold.close):
            assert self._tasks is not None  # its writer did not send it here
            self._tasks.create_task(self._ask_close(state, said.member))
        return _answer(state.hold)

    def _early_or_late(self, said: Said) -> Answer:
        last = self.last
        if said.kind == "hold" and last is not None and said.word.round == last.of.round_index:
            assert last.close is not None
            return _answer() if said.word.hold.close == last.close.digest else _over(last)
        if said.word.round <= self._done():
            return self._over_here(said.word.round)
        if said.kind != "commit":
            raise Unavailable(f"round {said.word.round} is not under way here")
        known = self._early.get(said.member)
        if known is None or known.word.round <= said.word.round:
            self._early[said.member] = said
            self.called_for(said.member, said.word.round)
        return _answer()

    def _over_here(self, round_index: int) -> Answer:
        """The close of the last round held here, for a member that is still in it, or in an older one."""
        if self.last is None or self.last.of.round_index < round_index:
            raise Unavailable(f"round {round_index} is over here")
        return _over(self.last)

    async def _reached(self, round_index: int, roster: bytes) -> RoundState | Answer:
        """The round under way, once this roster is followed here; or what is to be answered instead."""
        state = self.state
        if state is None or state.of.round_index != round_index:
            return self._over_here(round_index)
        if await self._within(SMALL_CALL_S, lambda: state.roster is not None or state is not self.state):
            raise Unavailable("no roster came here")
        if state is not self.state:
            return self._over_here(round_index)
        return state if state.follows(roster) else self._other_roster(state)

    async def _serve_pieces(self, peer: PeerId, body: wire.GivenPieces, data: Sequence[Data]) -> Answer:
        here = self._here
        if body.stage != here.stage:
            raise RemoteFault(f"pieces for {stage_name(body.stage)} sent to a replica of {stage_name(here.stage)}")
        state = await self._reached(body.round, body.roster)
        if isinstance(state, Answer):
            return state
        if peer in state.given:
            raise RemoteFault("pieces were given already")

        def check() -> Any:
            pieces = state.check_given(peer, body.roster, body.digests, body.lengths, data)
            for piece, found in pieces.data.items():
                here.replica.check_piece(body.round, piece, found, pieces.lengths[piece])
            return pieces

        state.hear_given(peer, body.roster, await here.compute.run(Priority.OUTER, 0, check))
        self._wake()
        return _answer()

    async def _serve_means(self, peer: PeerId, body: wire.GivenMeans, data: Sequence[Data]) -> Answer:
        said = hear(body.word, self._here.run_id, self._here.stage, "means")
        if said.member != peer:
            raise RemoteFault(f"means of {short(said.member)} brought by {short(peer)}")
        state = await self._reached(said.word.round, said.word.means.roster)
        if isinstance(state, Answer):
            return state
        await self._hear_means(state, body.word, body.digests, data)
        return _answer()

    @staticmethod
    def _other_roster(state: RoundState) -> Answer:
        assert state.roster is not None
        if state.hold is not None:
            return _held(state)
        return Answer(wire.Reply(butterfly=wire.ButterflyAnswer(roster=state.roster.said.signed)))

    async def _hear_means(
        self, state: RoundState, signed: wire.SignedWord, digests: bytes, data: Sequence[Data]
    ) -> None:
        here = self._here
        said = hear(signed, here.run_id, here.stage, "means")
        if not state.follows(said.word.means.roster) or said.word.round != state.of.round_index:
            raise RemoteFault("means of another round")

        def check() -> MeanSet:
            means = state.check_means(said, digests, data)
            assert state.roster is not None
            for piece, found in zip(state.roster.pieces_of(said.member, state.pieces), data, strict=True):
                here.replica.check_piece(state.of.round_index, piece, found, None)
            return means

        state.hear_means(await here.compute.run(Priority.OUTER, 0, check))
        self._wake()

    def _serve_wanted(self, body: wire.PieceRequest) -> Answer:
        state = next((one for one in (self.state, self.last) if one and one.of.round_index == body.round), None)
        if state is None or state.roster is None or body.stage != self._here.stage:
            raise Unavailable(f"nothing of round {body.round} is here")
        if body.pieces:
            if max(body.pieces) >= state.pieces:
                raise RemoteFault(f"a packet has {state.pieces} pieces")
            answer = wire.ButterflyAnswer(digests=state.own.digests, lengths=state.own.lengths)
            data = [state.own.drafted.pieces[piece] for piece in body.pieces]
            return Answer(wire.Reply(butterfly=answer), [tensor_of(one) for one in data])
        if not body.owner:
            if state.close is not None:
                return _over(state)
            if state.hold is not None:
                return _held(state)
            raise Unavailable(f"round {body.round} is not closed here")
        means = state.means.get(PeerId(body.owner))
        if means is None:
            raise Unavailable(f"no means of {short(PeerId(body.owner))} are here")
        answer = wire.ButterflyAnswer(word=means.said.signed, digests=means.digests)
        return Answer(wire.Reply(butterfly=answer), [tensor_of(one) for one in means.data])


def _roster_s(meeting: Meeting) -> float:
    """Seconds that a roster may take: its writer waits for commits, and pings those that are late."""
    return 2.0 * meeting.commit_s + PING_TIMEOUT_S


def _moved(state: RoundState, roster: RosterView | None) -> bool:
    """Whether more is known than `roster`, the last one."""
    return _ended(state) or state.roster is not roster


def _ended(state: RoundState) -> bool:
    """Whether the round is closed, here or elsewhere."""
    return state.close is not None or state.over is not None or state.behind


def _data(message: Call | Answer) -> list[Data]:
    return [one.data for one in message.tensors]


def _answer(hold: Said | None = None) -> Answer:
    holds = [] if hold is None else [hold.signed]
    return Answer(wire.Reply(butterfly=wire.ButterflyAnswer(holds=holds)))


def _over(state: RoundState) -> Answer:
    """The close that is in force, and most members' words that they hold it."""
    assert state.close is not None and state.roster is not None
    members = [peer for peer in state.roster.members if peer in state.holders(state.close)]
    return _close_answer(state, state.close, members[: len(state.roster.members) // 2 + 1])


def _held(state: RoundState) -> Answer:
    """The close that is held here, and may come to be in force."""
    assert state.proposed is not None
    return _close_answer(state, state.proposed, [state.me])


def _close_answer(state: RoundState, close: Said, holders: Sequence[PeerId]) -> Answer:
    assert state.roster is not None
    holds = [state.holds[peer].signed for peer in holders]
    roster = state.roster.said.signed
    return Answer(wire.Reply(butterfly=wire.ButterflyAnswer(word=close.signed, roster=roster, holds=holds)))

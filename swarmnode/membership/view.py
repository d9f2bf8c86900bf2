"""What one answer of the directory says of a stage, found out once for all nodes of this process that get it."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from swarmnode.ids import PeerId, digest64
from swarmnode.membership import swarm
from swarmnode.membership.swarm import Member, shared
from swarmnode.wire import record_pb2 as wire

VIEWS_MAX = 64
ODD = 0x9E3779B97F4A7C15  # multiplication by it mixes
CHANGES_MAX = 256  # guess: in a stage of hundreds, hours of who came and went
_Signed = Iterable[wire.SignedRecord]


class Line:
    """Views of which each was made from the one before: a later one never knows an older record of anybody."""

    __slots__ = ()


@dataclass(slots=True)
class View:
    """Not to be changed once it is made."""

    records: Sequence[wire.SignedRecord]
    line: Line = field(default_factory=Line)
    number: int = 0  # in the line
    members: dict[PeerId, Member] = field(default_factory=dict)  # in the order of `records`
    special: dict[PeerId, Member] = field(default_factory=dict)  # those that are not plain
    fed: tuple[PeerId, ...] = ()  # those that tell of samples or blocks
    samples: dict[PeerId, int] = field(default_factory=dict)
    blocks: dict[PeerId, wire.Blocks] = field(default_factory=dict)
    expires_unix_s: tuple[float, float] = (math.inf, 0.0)  # nobody before, and nobody after
    speed: float | None = None  # samples per second of a plain member, about: as of the last look through
    stage: int | None = None  # of all members, none of whom has left; None: not of all
    renewed: int = 0  # records since all of it was looked through
    came: tuple[tuple[int, PeerId], ...] = ()  # who was not in the view before, in those of the line since `since`
    went: tuple[tuple[int, PeerId], ...] = ()  # who was, and is no more
    since: int = 0
    numbers: npt.NDArray[np.uint64] | None = None  # of `members`, for lots

    def least(self, salt: int, count: int) -> list[PeerId]:
        """The `count` members of the least `rank`, in the order of `members`."""
        if self.numbers is None:
            self.numbers = np.array([_number(peer) for peer in self.members], np.uint64)
        ranks = (self.numbers ^ np.uint64(salt)) * np.uint64(ODD)
        names = [*self.members]
        return [names[at] for at in sorted(np.argpartition(ranks, count)[:count].tolist())]

    def follows(self, before: View) -> bool:
        """Whether it is known who came and went since `before`."""
        return self.line is before.line and self.since <= before.number <= self.number


def rank(peer: PeerId, salt: int) -> int:
    """One node's order of all peers; another's has nothing to do with it."""
    return ((_number(peer) ^ salt) * ODD) % (1 << 64)


@functools.lru_cache(maxsize=1 << 16)
def _number(peer: PeerId) -> int:
    return digest64("lot", peer)


_views: dict[int, View] = {}


def view_of(records: Sequence[wire.SignedRecord]) -> View | None:
    """The view that this very list gives, when messages are shared in memory (simulation) and all are verified."""
    known = _views.get(id(records))
    if known is not None and known.records is records:
        return known
    if not swarm.SHARED_MAX or not records:
        return None
    return _keep(View(records), records)


def view_after(
    records: Sequence[wire.SignedRecord],
    before: Sequence[wire.SignedRecord],
    news: _Signed,
    gone: Collection[PeerId] = (),
) -> None:
    """`view_of` of `records` will be asked for: they are `before` but for `news`, none of them older, and for those
    `gone`."""
    if (known := _views.get(id(before))) is None or known.records is not before:
        return
    view = replace(
        known,
        records=records,
        number=known.number + 1,
        members=known.members.copy(),
        special=known.special.copy(),
        samples=known.samples.copy(),
        blocks=known.blocks.copy(),
        numbers=None,
    )
    if len(view.came) + len(view.went) > CHANGES_MAX:
        view.came, view.went, view.since = (), (), view.number - 1
    for peer in gone:
        for told in (view.members, view.special, view.samples, view.blocks):
            told.pop(peer, None)
    if gone:
        view.went += tuple([(view.number, peer) for peer in gone])
        view.fed, view.renewed = tuple([peer for peer in view.fed if peer in view.members]), len(view.members)
    _keep(view, news)


def _keep(view: View, news: _Signed) -> View | None:
    """`view`, to which what `news` say is added; None when one of them was not verified in this process."""
    first, last = view.expires_unix_s
    fed, begun = False, bool(view.members)
    for signed in news:
        if (one := shared(signed)) is None:
            return None
        _, record, member = one
        peer = member.peer
        if begun and peer not in view.members:
            view.came += ((view.number, peer),)
        view.members[peer] = member
        if member.plain:
            view.special.pop(peer, None)
        else:
            view.special[peer] = member
        if member.fed or peer in view.samples or peer in view.blocks:
            fed = True
        if member.fed:
            if record.progress.samples:
                view.samples[peer] = record.progress.samples[0]
            if record.HasField("blocks"):
                view.blocks[peer] = record.blocks
        first, last = min(first, member.expires_unix_s), max(last, member.expires_unix_s)
        here = None if member.state == wire.NODE_STATE_LEFT else member.stage
        view.stage, begun = here if here == view.stage or not begun else None, True
        view.renewed += 1
    if view.renewed >= len(view.members):
        members = view.members.values()
        first, view.renewed = min([member.expires_unix_s for member in members], default=math.inf), 0
        places = {None if member.state == wire.NODE_STATE_LEFT else member.stage for member in members}
        view.stage = places.pop() if len(places) == 1 else None
        told = [member.samples_per_second for member in members if member.plain]
        view.speed = math.fsum(told) / len(told) if told else None
    view.expires_unix_s = first, last
    if fed:
        view.fed = tuple([peer for peer, member in view.members.items() if member.fed])
    if len(_views) >= VIEWS_MAX:
        del _views[next(iter(_views))]  # the oldest: the last of each stage is made the next one from
    _views[id(view.records)] = view
    return view


def forget() -> None:
    """No view is known any more."""
    _views.clear()

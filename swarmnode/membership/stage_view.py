"""The members of a stage in one answer of the directory, computed once for all nodes of this process that get it."""

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
ODD = 0x9E3779B97F4A7C15  # multiplication by it mixes bits
CHANGES_MAX = 256  # guess: in a stage of hundreds, hours of joins and leaves
_Signed = Iterable[wire.SignedRecord]


class ViewHistory:
    """A series of views, each made from the previous one. A later view never has an older record of any peer."""

    __slots__ = ()


@dataclass(slots=True)
class StageView:
    """A view of a stage; immutable once made."""

    records: Sequence[wire.SignedRecord]
    line: ViewHistory = field(default_factory=ViewHistory)
    number: int = 0  # in the series
    members: dict[PeerId, Member] = field(default_factory=dict)  # in the order of `records`
    special: dict[PeerId, Member] = field(default_factory=dict)  # members that are not plain
    fed: tuple[PeerId, ...] = ()  # members whose records carry samples or blocks
    samples: dict[PeerId, int] = field(default_factory=dict)
    blocks: dict[PeerId, wire.Blocks] = field(default_factory=dict)
    expires_unix_s: tuple[float, float] = (math.inf, 0.0)  # earliest and latest expiry
    speed: float | None = None  # average samples per second of a plain member, as of the last complete pass
    stage: int | None = None  # of all members, none of which has left; None: members differ
    renewed: int = 0  # records since the last complete pass
    came: tuple[tuple[int, PeerId], ...] = ()  # peers added, in the views of the series after `since`
    went: tuple[tuple[int, PeerId], ...] = ()  # peers removed, likewise
    since: int = 0
    numbers: npt.NDArray[np.uint64] | None = None  # of `members`, for random choice

    def least(self, salt: int, count: int) -> list[PeerId]:
        """The `count` members of least `rank`, in the order of `members`."""
        if self.numbers is None:
            self.numbers = np.array([_number(peer) for peer in self.members], np.uint64)
        ranks = (self.numbers ^ np.uint64(salt)) * np.uint64(ODD)
        names = [*self.members]
        return [names[at] for at in sorted(np.argpartition(ranks, count)[:count].tolist())]

    def follows(self, before: StageView) -> bool:
        """Whether all joins and leaves since `before` are known."""
        return self.line is before.line and self.since <= before.number <= self.number


def rank(peer: PeerId, salt: int) -> int:
    """The position of `peer` in one node's random order of all peers. Orders of different nodes are independent."""
    return ((_number(peer) ^ salt) * ODD) % (1 << 64)


@functools.lru_cache(maxsize=1 << 16)
def _number(peer: PeerId) -> int:
    return digest64("lot", peer)


_views: dict[int, StageView] = {}


def view_of(records: Sequence[wire.SignedRecord]) -> StageView | None:
    """The view of exactly this list, if messages are shared in memory (simulation) and all are verified; else None."""
    known = _views.get(id(records))
    if known is not None and known.records is records:
        return known
    if not swarm.SHARED_MAX or not records:
        return None
    return _keep(StageView(records), records)


def view_after(
    records: Sequence[wire.SignedRecord],
    before: Sequence[wire.SignedRecord],
    news: _Signed,
    gone: Collection[PeerId] = (),
) -> None:
    """Prepare `view_of` for `records`, which equal `before` except for `news`, none of them older, and the peers
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
        for mapping in (view.members, view.special, view.samples, view.blocks):
            mapping.pop(peer, None)
    if gone:
        view.went += tuple([(view.number, peer) for peer in gone])
        view.fed, view.renewed = tuple([peer for peer in view.fed if peer in view.members]), len(view.members)
    _keep(view, news)


def _keep(view: StageView, news: _Signed) -> StageView | None:
    """`view` with `news` added; None if one of them was not verified in this process."""
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
        rates = [member.samples_per_second for member in members if member.plain]
        view.speed = math.fsum(rates) / len(rates) if rates else None
    view.expires_unix_s = first, last
    if fed:
        view.fed = tuple([peer for peer, member in view.members.items() if member.fed])
    if len(_views) >= VIEWS_MAX:
        del _views[next(iter(_views))]  # the oldest: the last view of each stage is the base of the next
    _views[id(view.records)] = view
    return view


def forget() -> None:
    """Drop all views."""
    _views.clear()

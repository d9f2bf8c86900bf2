"""Why a node waits: a table of every cause, and the causes that stand at one node now.

A cause begins and ends with events of the node's log, or follows from what the node sees of the swarm. `join`,
`status`, `ui` and the run's page show the causes that stand, with what a person can do. docs/waiting.md is made
from the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from swarmnode.base.errors import DiskFull, HardwareFault, NotPermitted, SwarmnodeError, Unreachable, UsageError
from swarmnode.base.ids import stages_name
from swarmnode.base.metrics.events import nbytes_text
from swarmnode.base.untrusted_text import printable
from swarmnode.base.wire import record_pb2

FLAP_S = 60.0  # guess: a cause that comes back within this is the same one
CALM_S = 10.0  # guess: a cause that came back stays on the panel for so long after its end
TEXT_MAX = 300  # characters of a sentence: some of them are peers' words
PANEL = "the panel"

Fields = Mapping[str, object]


def _always(fields: Fields) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause of waiting. `says` is what the node waits for, with fields of the event in braces; `do` what a person
    can do.

    `begins` has the events that begin it, with the condition on their fields; the same event begins and ends it where
    the condition decides. `ends` has others that end it. `stops`: nothing is trained here meanwhile. `lasts_s`: it ends
    by itself so long after its last event; 0: it does not. `told`: where it is shown, if not on the panel.
    """

    name: str
    says: str
    do: str
    begins: Mapping[str, Callable[[Fields], bool]] = field(default_factory=dict)
    ends: tuple[str, ...] = ()
    stops: bool = True
    lasts_s: float = 0.0
    told: str = PANEL
    each: str = ""  # field of the events that tells several apart: the cause ends with the last of them
    joins: bool = False  # stands only before the node trains: later it fetches what it keeps for its neighbours

    @property
    def panel(self) -> bool:
        """Whether the panel shows it among what the node waits for."""
        return self.told == PANEL

    @property
    def public(self) -> str:
        """The words for others: without a reason, which may name folders of this machine."""
        return re.sub(r" \(\{\w+\}\)|: \{\w+\}", "", self.says)


def _number(fields: Fields, key: str) -> float:
    value = fields.get(key)
    return float(value) if isinstance(value, int | float) else 0.0


def _ends(error: type[SwarmnodeError]) -> str:
    return f"`join` ends with code {error.exit_code}"


_GOT_STATE = ("state.downloaded", "state.fresh", "recovery.done", "recovery.failed", "base.loaded")

CAUSES: Final[tuple[Cause, ...]] = (
    Cause(
        "meeting point",
        "the run's meeting point {peer} does not answer ({why})",
        "look at this machine's network; if others miss it too, its owner has to start it again. Machines that know"
        " each other go on",
        {"bootstrap.unreachable": _always},
        ("bootstrap.connected",),
        stops=False,
        each="peer",
    ),
    Cause(
        "port",
        "others cannot open connections to this machine ({reason}): it is reached through a relay, which is slower",
        "open a TCP port in router and firewall, and join with --listen /ip4/0.0.0.0/tcp/PORT",
        {"node.reach": lambda fields: fields.get("reach") == "relayed"},
        stops=False,
    ),
    Cause(
        "no relay",
        "others cannot reach this machine ({reason}), and no meeting point relays for it",
        "open a TCP port in router and firewall, and join with --listen /ip4/0.0.0.0/tcp/PORT; at its start "
        f"{_ends(Unreachable)}",
        {"node.reach": lambda fields: fields.get("reach") == "private"},
        stops=False,
    ),
    Cause(
        "network program",
        "its network program p2pd died and starts again",
        "nothing; if it comes back, send the log with swarmnode logs",
        {"p2pd.died": _always},
        ("p2pd.restarted",),
    ),
    Cause(
        "text",
        "it waits for the run's text or model: {reason}",
        "wait: it asks again and again; a machine that has the text gives it with --data-root FOLDER",
        {"data.waiting": _always},
        ("data.opened", "data.block", "base.opened", "base.loaded"),
    ),
    Cause(
        "no text here",
        "this machine does not feed the run: {reason}",
        "nothing: it serves later stages; or join with --data-root FOLDER of the run's own text",
        {"data.refused": _always},
        ("data.opened",),
        stops=False,
    ),
    Cause(
        "queue",
        "it waits for a place: the {donors} machines that could give it the weights of its stage give them to others",
        "wait: the first free one is asked",
        {"state.waiting": _always},
        ("state.donor", *_GOT_STATE),
        joins=True,
    ),
    Cause(
        "download",
        "it downloads the weights of its stage: {chunks} of {of} chunks of {size}",
        "wait; a higher --max-down, or a cable in place of Wi-Fi, makes it faster",
        {"state.download": lambda fields: _number(fields, "chunks") < _number(fields, "of")},
        _GOT_STATE,
        joins=True,
    ),
    Cause(
        "lost stage",
        "the state of its stage is not here yet: {reason}",
        "wait for the machine that has it, or ask its owner to start it",
        {"recovery.waiting": _always},
        ("recovery.began", *_GOT_STATE),
    ),
    Cause("weights", "it fetches the weights of its stage", "wait: it serves when it has them"),
    Cause("round", "it waits for its first round with the others of its stage", "wait: it serves after that round"),
    Cause(
        "stage",
        "nothing can be trained until a machine serves {stages}",
        "invite more machines, or wait for them",
    ),
    Cause(
        "asleep",
        "{stages}",
        "wait, or join with one machine more: it would take that stage",
    ),
    Cause(
        "next stage",
        "no machine of the next stage took its work ({reason})",
        "wait: it is sent again; one machine more at that stage would help",
        {"microbatch.lost": _always},
        lasts_s=30.0,
        stops=False,
    ),
    Cause("work", "it is ready, and no work passes through it now", "wait: the machines of stage 1 send it"),
    Cause("first work", "it is ready, and no work of its has come back yet", "wait: the first takes some seconds"),
    Cause(
        "line",
        "its line or its speed is too thin for each round: it takes part in one of {stride} ({reason})",
        "raise --max-up, or use a faster line; it trains on meanwhile",
        {"round.stride": lambda fields: _number(fields, "stride") > 1},
        stops=False,
    ),
    Cause(
        "processor",
        "other programs have this machine's processor: it waits for {share} % of the time in which it could work",
        "nothing: it works on when they end; --priority normal gives it its part beside them, and slows them",
        {"processor.taken": _always},
        ("processor.given",),
        stops=False,
    ),
    Cause(
        "disk",
        "the disk does not take what this machine keeps ({reason}): it trains on",
        "free space at its --home and --cache, or choose others",
        {"state.unsaved": _always, "data.uncached": _always},
        ("state.saved",),
        stops=False,
    ),
    Cause(
        "pause",
        "its own limits hold it: hours, quota, battery, heat, somebody at the machine, a program that wants the card",
        "wait until the hour that is shown, or change it: swarmnode limit, swarmnode resume",
        told="the panel's line `paused`, with the reason and until when",
    ),
    Cause(
        "clock",
        "its clock was set, or is not that of its peers: it counts on",
        "set it by NTP: timedatectl set-ntp true",
        stops=False,
        told="the panel's line `clock`, with how far it is off",
    ),
    Cause(
        "version",
        "the run's owner admits newer versions only",
        "install the version that the owner names, as you installed this one (docs/bad-version.md)",
        told=_ends(NotPermitted),
    ),
    Cause(
        "memory",
        "no stage of the run fits into the memory, or the card's, that is free",
        "close other programs, raise --max-memory, or take another machine",
        told=_ends(HardwareFault),
    ),
    Cause(
        "full disk",
        "there is no room for its home or its cache",
        "free space there, or choose another --home or --cache",
        told=_ends(DiskFull),
    ),
    Cause(
        "taken port",
        "another program listens on its port",
        "choose another with --listen",
        told=_ends(UsageError),
    ),
)
BY_NAME: Final = {cause.name: cause for cause in CAUSES}
PRIVATE: Final = ("disk", "no text here")  # their reasons may name folders of this machine


@dataclass(frozen=True, slots=True)
class Place:
    """A node's view of itself and the swarm: the `empty` stages, without anybody at work; those that sleep, each with
    its words ("stage 2 sleeps until 22:00"); the tokens that pass through this machine a second; and whether it
    `feeds`: it begins the work."""

    state: record_pb2.NodeState
    empty: Sequence[int] = ()
    asleep: Mapping[int, str] = field(default_factory=dict)
    tokens_per_second: float = 0.0
    feeds: bool = False


@dataclass(frozen=True, slots=True)
class StandingWait:
    """A cause that stands since `since_s`, in words."""

    cause: Cause
    says: str
    since_s: float


@dataclass(slots=True)
class _Spell:
    says: str
    since_s: float
    last_s: float  # of the last event that began it
    times: int = 1
    ended_s: float | None = None
    of: dict[object, None] = field(default_factory=dict)  # by the cause's `each`


class Waits:
    """The causes that stand at one node. `now_s` is its clock."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._spells: dict[str, _Spell] = {}

    def hear(self, event: str, fields: Fields) -> None:
        """Hear an event of the node's log."""
        for cause in CAUSES:
            if (begins := cause.begins.get(event)) is not None and begins(fields):
                self._begin(cause, fields)
            elif begins is not None or event in cause.ends:
                self._end(cause, fields)

    def now(self, place: Place) -> list[StandingWait]:
        """The causes that stand, in the order of the table: those that keep the node from training first."""
        self._derive(place)
        now_s = self._now_s()
        found = []
        training = place.state == record_pb2.NODE_STATE_TRAINING
        for cause in CAUSES:
            if (spell := self._spells.get(cause.name)) is None or (cause.joins and training):
                continue
            if spell.ended_s is None and cause.lasts_s and now_s >= spell.last_s + cause.lasts_s:
                spell.ended_s = now_s
            calm = spell.ended_s is not None and (spell.times == 1 or now_s >= spell.ended_s + CALM_S)
            if not calm:
                often = f" ({spell.times} times in {now_s - spell.since_s:.0f} s)" if spell.times > 1 else ""
                found.append(StandingWait(cause, spell.says + often, spell.since_s))
        return sorted(found, key=lambda one: not one.cause.stops)

    def _derive(self, place: Place) -> None:
        training = place.state == record_pb2.NODE_STATE_TRAINING
        empty = [stage for stage in place.empty if stage not in place.asleep]
        stands = {
            "weights": place.state == record_pb2.NODE_STATE_JOINING and not self._known("queue", "download"),
            "round": place.state == record_pb2.NODE_STATE_SYNCING,
            "stage": training and bool(empty),
            "asleep": training and bool(place.asleep) and not empty,
        }
        idle = training and not place.tokens_per_second and not any(stands.values()) and not self._known("text")
        stands["work"] = idle and not place.feeds
        stands["first work"] = idle and place.feeds
        words = {"stage": stages_name(empty), "asleep": ", ".join(place.asleep.values())}
        for name, holds in stands.items():
            if holds:
                self._begin(BY_NAME[name], {"stages": words.get(name, "")})
            else:
                self._end(BY_NAME[name], {})

    def _known(self, *names: str) -> bool:
        return any(name in self._spells and self._spells[name].ended_s is None for name in names)

    def _begin(self, cause: Cause, fields: Fields) -> None:
        now_s = self._now_s()
        says = printable(cause.says.format_map(_Words(fields)), TEXT_MAX)
        spell = self._spells.get(cause.name)
        if spell is None or (spell.ended_s is not None and now_s >= spell.ended_s + FLAP_S):
            spell = self._spells[cause.name] = _Spell(says, now_s, now_s)
        elif spell.ended_s is not None:
            spell.times += 1
        spell.says = says
        spell.last_s = now_s
        spell.ended_s = None
        spell.of[fields.get(cause.each)] = None

    def _end(self, cause: Cause, fields: Fields) -> None:
        if (spell := self._spells.get(cause.name)) is None or spell.ended_s is not None:
            return
        spell.of.pop(fields.get(cause.each), None)
        if not (cause.each and spell.of):
            spell.ended_s = self._now_s()


class _Words(dict[str, object]):
    """Fields of an event by name, `size` for its bytes; one that is missing reads as "?"."""

    def __missing__(self, key: str) -> object:
        return nbytes_text(_number(self, "nbytes")) if key == "size" else "?"

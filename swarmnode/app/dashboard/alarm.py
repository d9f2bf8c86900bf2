"""Decides which alarms to show, from one frozen view of the run. Pure; each alarm carries its reason.

Levels: `error` when training is, or will soon be, stopped or wrong; `warning` when one more failure could cause that.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from swarmnode.base.ids import PeerId, stage_name, stages_name
from swarmnode.net.membership.record import CLOCK_SKEW_MAX_S

STAGE_REPLICAS_MIN = 2  # with one replica, its death loses the stage
SKEW_MAX_S = CLOCK_SKEW_MAX_S / 2  # before records are refused
# Measured: over as many points of the demo's curve the loss rises by 0.05 nats and 4.8 median deviations at most
# (`swarmnode up --nodes 4 --stages 2 --for 240s`; the history of its page).
SPIKE_NATS = 0.5
SPIKE_DEVIATIONS = 8.0
SPIKE_POINTS = 12
ISLAND_MIN = 2  # nodes; a single unconnected node counts as silent
LONE_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Alarm:
    """One alarm. `kind` is one word, stable while the alarm stands. `about` separates alarms of one kind."""

    kind: str
    level: str
    title: str
    reason: str
    about: str = ""


@dataclass(frozen=True, slots=True)
class Health:
    """The frozen input of `alarms`. `replicas` counts serving nodes by stage; `groups` lists node names by island."""

    replicas: Sequence[int]
    versions: Sequence[str]
    skews_s: Sequence[tuple[str, float]]  # (name of the node, its clock ahead of ours)
    silent: Sequence[str]
    groups: Sequence[Sequence[str]]
    losses: Sequence[float]  # train loss, oldest first
    stalled_s: float
    stall_s: float  # a microbatch under way has ended by then: limits.microbatch_timeout_s
    rounds: Sequence[tuple[int, int]]  # (paired, lone), oldest first
    trained: bool
    living: int = 1  # nodes with a valid record, in any state
    texts: Sequence[tuple[str, str]] = ()  # (name of the node, digest of its copy of the run's text)
    asleep: Mapping[int, str] = field(
        default_factory=dict
    )  # stages that nobody serves: until when they sleep, with whom
    slowness: tuple[str, str] | None = None  # title and reason (train/pipeline/microbatch_size.py)
    forked: Sequence[str] = ()  # what owners signed twice (run/admission/admission.py)


STOPPED = Alarm(
    "stopped",
    "warning",
    "Nobody is here: the run has stopped",
    "It goes on when the machines that trained it join again: each has its state on its disk.",
)


REPEAT_S = 900.0  # guess: how often an alarm that comes and goes is news


class AlarmNews:
    """Which alarms are news. One that comes and goes is told once in REPEAT_S, with how often it came; an error at
    once, and so is the end of what was told. Pure: time is an argument."""

    def __init__(self) -> None:
        self._standing: dict[tuple[str, str], Alarm] = {}
        self._told_s: dict[tuple[str, str], float] = {}
        self._open: set[tuple[str, str]] = set()  # told, and their end is not
        self._came: Counter[tuple[str, str]] = Counter()  # since they were told

    def look(self, standing: Sequence[Alarm], now_s: float) -> tuple[list[tuple[Alarm, int]], list[Alarm]]:
        """(alarms to tell now, each with how often it came since it was told last; alarms whose end is to be told)."""
        now = {(alarm.kind, alarm.about): alarm for alarm in standing}
        begun = []
        for key, alarm in now.items():
            self._came[key] += key not in self._standing
            again = 0.0 <= now_s - self._told_s.get(key, -math.inf) < REPEAT_S and alarm.level != "error"
            if self._came[key] and not again:
                begun.append((alarm, self._came.pop(key)))
                self._told_s[key] = now_s
                self._open.add(key)
        over = [key for key in self._standing if key not in now and key in self._open]
        ended = [self._standing[key] for key in over]
        self._open.difference_update(over)
        self._standing = now
        return begun, ended


def alarms(health: Health) -> list[Alarm]:
    """All current alarms, errors first."""
    alarms_now = [
        *(thin_stages(health.replicas, health.asleep) if health.trained and health.living else ()),
        *(STOPPED for _ in range(health.trained and not health.living)),
        *(Alarm("forked", "error", "Two owners contradict each other", reason, reason) for reason in health.forked),
        *islands(health.groups),
        *stalled(health.stalled_s, health.stall_s, health.replicas),
        *loss_spike(health.losses),
        *lone_rounds(health.rounds, health.replicas),
        *clock_skew(health.skews_s),
        *silent_nodes(health.silent, sum(health.replicas)),
        *version_mix(health.versions),
        *text_mix(health.texts),
        *(() if health.slowness is None else (Alarm("slow", "warning", *health.slowness),)),
    ]
    return sorted(alarms_now, key=lambda alarm: alarm.level != "error")


def thin_stages(replicas: Sequence[int], asleep: Mapping[int, str]) -> list[Alarm]:
    """Alarms for stages without a node, for stages that sleep, and for stages with only one node."""
    empty = [stage for stage, count in enumerate(replicas) if count == 0 and stage not in asleep]
    lonely = [stage for stage, count in enumerate(replicas) if 0 < count < STAGE_REPLICAS_MIN]
    reason = f"Training goes on when it wakes, or at once with {_more_people(1)}: newcomers go there by themselves."
    thin = [
        Alarm("stage_asleep", "warning", f"{stage_name(stage).capitalize()} sleeps {until}", reason, str(stage))
        for stage, until in sorted(asleep.items())
    ]
    if empty:
        thin.append(
            Alarm(
                "stage_empty",
                "error",
                f"Nobody serves {_stages(empty)}",
                f"No microbatch gets through without {_more_people(len(empty))}. Newcomers go there by themselves.",
            )
        )
    if lonely:
        thin.append(
            Alarm(
                "stage_thin",
                "warning",
                f"{_stages(lonely).capitalize()} hang{'s' if len(lonely) == 1 else ''} by one node"
                + ("" if len(lonely) == 1 else " each"),
                f"A stage whose last node dies has to be rebuilt. What helps: {_more_people(len(lonely))}.",
            )
        )
    return thin


def islands(groups: Sequence[Sequence[str]]) -> list[Alarm]:
    """An alarm when training nodes form groups that exchange nothing with each other."""
    large = [group for group in groups if len(group) >= ISLAND_MIN]
    if len(large) < 2:
        return []
    smaller = large[1]
    sizes = " and ".join(str(len(group)) for group in large[:4])
    return [
        Alarm(
            "islands",
            "error",
            f"The swarm has fallen into {len(large)} islands",
            f"Groups of {sizes} nodes exchange nothing with each other; one of them: {_names(smaller)}.",
        )
    ]


def stalled(stalled_s: float, stall_s: float, replicas: Sequence[int]) -> list[Alarm]:
    """An alarm when every stage is served but no sample is trained."""
    if stalled_s < stall_s or not all(replicas):
        return []
    reason = f"Every stage has a replica, but for {stalled_s:.0f} s the run's sample count has not grown."
    return [Alarm("stalled", "error", "Training stands still", reason)]


def loss_spike(losses: Sequence[float]) -> list[Alarm]:
    """An alarm when the newest training loss is far above the recent ones."""
    if len(losses) <= SPIKE_POINTS:
        return []
    before = losses[-SPIKE_POINTS - 1 : -1]
    now = losses[-1]
    middle = statistics.median(before)
    deviation = statistics.median(abs(loss - middle) for loss in before)
    bound = middle + max(SPIKE_NATS, SPIKE_DEVIATIONS * deviation)
    if now <= bound:
        return []
    reason = f"{now:.3f} nats per token after a median of {middle:.3f}; up to {bound:.3f} would pass for noise."
    return [Alarm("loss_spike", "error" if now > 2 * bound else "warning", "The training loss has jumped", reason)]


def lone_rounds(rounds: Sequence[tuple[int, int]], replicas: Sequence[int]) -> list[Alarm]:
    """An alarm when replicas have possible partners but mostly step alone, so that they drift apart."""
    recent = rounds[-LONE_ROUNDS:]
    paired = sum(pair for pair, _ in recent)
    lone = sum(alone for _, alone in recent)
    if len(recent) < LONE_ROUNDS or lone <= paired or min(replicas, default=0) < 2:
        return []
    reason = f"{lone} of the last {paired + lone} outer steps found no partner, though every stage has some."
    return [Alarm("lone_rounds", "warning", "Replicas seldom meet", reason)]


def clock_skew(skews_s: Sequence[tuple[str, float]]) -> list[Alarm]:
    """An alarm for clocks far from ours. When most clocks are off, ours is the wrong one."""
    off = sorted(((name, skew) for name, skew in skews_s if abs(skew) > SKEW_MAX_S), key=lambda entry: -abs(entry[1]))
    if not off:
        return []
    if len(off) > 2 and len(off) > len(skews_s) / 2:
        middle = statistics.median(skew for _, skew in skews_s)
        reason = f"{len(off)} of {len(skews_s)} nodes' clocks differ by about {middle:+.1f} s. Set it by NTP."
        return [Alarm("clock_skew", "warning", "This coordinator's clock seems wrong", reason)]
    told = ", ".join(f"{name} {skew:+.1f} s" for name, skew in off[:3])
    reason = f"{told}{_more(len(off) - 3)}. Beyond 3 s their records are refused: set them by NTP."
    return [Alarm("clock_skew", "warning", f"{_nodes(len(off))} with a wrong clock", reason)]


def silent_nodes(silent: Sequence[str], serving: int) -> list[Alarm]:
    """An alarm for nodes with a valid record that do not answer."""
    if not silent:
        return []
    many = len(silent) > max(1, serving) / 4
    reason = f"{_names(silent)}: frozen, killed, or cut off from here. Their records run out by themselves."
    return [Alarm("silent", "error" if many else "warning", f"{_nodes(len(silent))} not answering", reason)]


def version_mix(versions: Sequence[str]) -> list[Alarm]:
    """An alarm when more than one version of swarmnode takes part."""
    counted = Counter(version for version in versions if version)
    if len(counted) < 2:
        return []
    told = ", ".join(f"{count} × {version}" for version, count in counted.most_common(4))
    reason = f"{told}{_more(len(counted) - 4)}. They may work together; upgrade the few."
    return [Alarm("version_mix", "warning", f"{len(counted)} versions of swarmnode", reason)]


def text_mix(texts: Sequence[tuple[str, str]]) -> list[Alarm]:
    """An alarm for nodes whose text differs from the majority's. They do not feed, or they train on other text."""
    counted = Counter(digest for _, digest in texts)
    if len(counted) < 2:
        return []
    usual, count = counted.most_common(1)[0]
    others = [(name, digest) for name, digest in texts if digest != usual]
    told = ", ".join(f"{name} has {digest}" for name, digest in others[:3]) + _more(len(others) - 3)
    reason = f"{count} have {usual}; {told}. Make a data set of it (swarmnode data make), which is the same everywhere."
    return [Alarm("text_mix", "warning", f"{_nodes(len(others))} with another text", reason)]


def _stages(stages: Sequence[int]) -> str:
    return stages_name(stages[:6]) + _more(len(stages) - 6)


def _nodes(count: int) -> str:
    return "One node" if count == 1 else f"{count} nodes"


def more_of(noun: str, count: int) -> str:
    """`count` in words as far as people write it so: "two more machines"."""
    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    return f"{words[count] if count < len(words) else count} more {noun}{'s' * (count != 1)}"


def _more_people(count: int) -> str:
    return more_of("volunteer", count) + ("" if count == 1 else ", one for each of these stages")


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + _more(len(names) - 3)


def _more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""


def parties(links: Iterable[tuple[PeerId, PeerId]], members: Iterable[PeerId]) -> list[set[PeerId]]:
    """The connected components of `members` over `links`, the largest first."""
    leader = {member: member for member in members}

    def find(member: PeerId) -> PeerId:
        while leader[member] != member:
            leader[member] = leader[leader[member]]
            member = leader[member]
        return member

    for one, other in links:
        if one in leader and other in leader:
            leader[find(one)] = find(other)
    groups: dict[PeerId, set[PeerId]] = {}
    for member in leader:
        groups.setdefault(find(member), set()).add(member)
    return sorted(groups.values(), key=lambda group: (-len(group), min(group)))

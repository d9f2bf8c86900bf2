"""A volunteer's part and limits, and the decision whether the node may run now.

Pure: limits and a frozen reading in, a verdict and its reason out. Nothing here reads a clock, a sensor or a counter.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from swarmnode.base.uplink_scheduler import SLOWEST_BYTES_PER_S

DAY_S = 86_400
WEEK_S = 7 * DAY_S
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
COOL_C = 5.0  # guess: degrees below the limit before work goes on, so that it does not flutter
FREE_SHARE = 0.05  # guess: the same for memory
QUOTA_SHARE = 0.995  # of the quota: the rest is for saying that we pause; so it stops within 1 %
QUOTA_SOON_S = 600.0  # guess: a quota that lasts for less is told to others, who need time to take over
QUOTA_AHEAD_S = 2.0  # derived: two readings; what is under way when the quota is near still goes through
YIELD_MAX = 16
LOAD_LEAST = 0.05  # guess: below that others take the node for one that hangs

_DAY = "|".join(DAYS)
_HOURS = re.compile(rf"(?:({_DAY})(?:-({_DAY}))?)?\s*(?:(\d{{1,2}})(?::(\d{{2}}))?-(\d{{1,2}})(?::(\d{{2}}))?)?\Z")
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*|°[cC]?|%)\Z")
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmMgG]?)([bB]its?|[bB]|)(?:/s|ps)?\Z")
_THOUSANDS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_BYTES = {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}

FULL_SCREEN = "full-screen"  # stands among the programs while one fills the screen


@dataclass(frozen=True, slots=True)
class HourSpan:
    """Seconds of the local day from and to; from > to goes past midnight. `days`: on which it begins, Monday first."""

    begin: int
    end: int
    days: tuple[int, ...] = tuple(range(7))

    @property
    def length(self) -> int:
        """Seconds that it lasts."""
        return (self.end - self.begin) % DAY_S or DAY_S

    def left_s(self, second: float) -> float:
        """Seconds until it ends, at a `second` of the local week; 0 outside it."""
        begun = min((second - day * DAY_S - self.begin) % WEEK_S for day in self.days)
        return max(0.0, self.length - begun)


class NodeRole(StrEnum):
    """The part of a node in a run; its user decides."""

    ANY = "any"
    """It serves a stage; at the first one it feeds as well."""
    REPLICA = "replica"
    """It serves later stages alone, and neither reads nor fetches text."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`hours` empty: always. Rates are bits a second, `quota_nbytes` is of a local day, both directions together,
    `max_load` is a share of the device's time."""

    hours: tuple[HourSpan, ...] = ()
    max_up_bps: float | None = None
    max_down_bps: float | None = None
    quota_nbytes: int | None = None
    max_temp_c: float | None = None
    max_memory_nbytes: int | None = None
    max_load: float | None = None
    yield_to: tuple[str, ...] = ()
    when_idle_s: float | None = None
    on_ac_only: bool = False


@dataclass(frozen=True, slots=True)
class AskedPause:
    """A person asked to pause until then: infinity is until told, None never."""

    until_unix_s: float | None = None
    reason: str = ""


NOT_ASKED = AskedPause()


@dataclass(frozen=True, slots=True)
class SensorReading:
    """The machine at one moment. What cannot be measured is None, and no limit on it can be kept.

    `running` is what the node does now, for limits that must not flutter. `offset_at`: the offset of local time at a
    later Unix time, which differs where summer time begins or ends; None: it does not. `pace`: seconds that local
    clocks go on in a second; tests let a day pass sooner.
    """

    unix_s: float
    utc_offset_s: int
    running: bool = True
    used_nbytes: int = 0
    nbytes_per_s: float = 0.0
    temperature_c: float | None = None
    memory_nbytes: int = 0
    processes: frozenset[str] = frozenset()
    idle_s: float | None = None
    on_battery: bool | None = None
    asked: AskedPause = NOT_ASKED
    offset_at: Callable[[float], int] | None = None
    pace: float = 1.0
    sees_screen: bool = True  # whether anything tells what fills it

    def local_s_later(self, wait_s: float) -> float:
        """Unix time when local clocks show `wait_s` more than now."""
        then = self.unix_s + wait_s / self.pace
        return then if self.offset_at is None else then + self.utc_offset_s - self.offset_at(then)


@dataclass(frozen=True, slots=True)
class LimitVerdict:
    """`until_unix_s` is when it changes by itself as far as can be foreseen: None when it cannot."""

    running: bool
    until_unix_s: float | None
    reason: str


def decide(limits: Limits, reading: SensorReading) -> LimitVerdict:
    """Whether to run now. With several reasons to pause, the verdict gives the one that lasts longest."""
    pauses = [verdict for check in _CHECKS if (verdict := check(limits, reading)) is not None]
    if not pauses:
        ends = [at for at in (_closes(limits.hours, reading), _quota_ends(limits, reading)) if at is not None]
        pauses = [LimitVerdict(True, min(ends, default=None), "within its limits")]
    last = max(pauses, key=lambda verdict: math.inf if verdict.until_unix_s is None else verdict.until_unix_s)
    return dataclasses.replace(last, reason="; ".join([last.reason, *_unkept(limits, reading)]))


def _unkept(limits: Limits, reading: SensorReading) -> list[str]:
    """Which limits cannot be kept, because nothing on this machine measures what they are about."""
    unkept = []
    if limits.when_idle_s is not None and reading.idle_s is None:
        unkept.append("nothing here tells when somebody uses this machine")
    if limits.max_temp_c is not None and reading.temperature_c is None:
        unkept.append("nothing here tells a temperature")
    if FULL_SCREEN in limits.yield_to and not reading.sees_screen:
        unkept.append("nothing here tells what fills the screen")
    return unkept


def may_give(limits: Limits, reading: SensorReading) -> bool:
    """Whether a node that is paused may still send its state: within its day's quota."""
    coming = reading.nbytes_per_s * QUOTA_AHEAD_S
    return limits.quota_nbytes is None or reading.used_nbytes + coming < QUOTA_SHARE * limits.quota_nbytes


def _asked(limits: Limits, reading: SensorReading) -> LimitVerdict | None:
    until = reading.asked.until_unix_s
    if until is None or until <= reading.unix_s:
        return None
    return LimitVerdict(False, None if math.isinf(until) else until, reading.asked.reason or "asked to")


def _hours(limits: Limits, reading: SensorReading) -> LimitVerdict | None:
    if not limits.hours:
        return None
    second = _second(reading)
    if any(span.left_s(second) for span in limits.hours):
        return None
    wait_s = min((day * DAY_S + span.begin - second) % WEEK_S for span in limits.hours for day in span.days)
    return LimitVerdict(False, reading.local_s_later(wait_s), f"outside its hours ({show_hours(limits.hours)})")


def _quota(limits: Limits, reading: SensorReading) -> LimitVerdict | None:
    if limits.quota_nbytes is None:
        return None
    if may_give(limits, reading if reading.running else dataclasses.replace(reading, nbytes_per_s=0.0)):
        return None
    until = reading.local_s_later(DAY_S - _second(reading) % DAY_S)
    return LimitVerdict(False, until, f"the day's quota of {show_nbytes(limits.quota_nbytes)} is used up")


def _quota_ends(limits: Limits, reading: SensorReading) -> float | None:
    """When the day's quota will be used up at the present rate; None if not within QUOTA_SOON_S."""
    if limits.quota_nbytes is None or reading.nbytes_per_s <= 0.0:
        return None
    left_s = (QUOTA_SHARE * limits.quota_nbytes - reading.used_nbytes) / reading.nbytes_per_s - QUOTA_AHEAD_S
    day_left_s = DAY_S - _second(reading) % DAY_S
    return reading.unix_s + left_s if left_s < min(QUOTA_SOON_S, day_left_s) else None


def _temperature(limits: Limits, reading: SensorReading) -> LimitVerdict | None:
    if limits.max_temp_c is None or reading.temperature_c is None:
        return None
    bound = limits.max_temp_c if reading.running else limits.max_temp_c - COOL_C
    if reading.temperature_c <= bound:
        return None
    return LimitVerdict(False, None, f"{reading.temperature_c:.0f} °C, at most {limits.max_temp_c:g} are allowed")


def _memory(limits: Limits, reading: SensorReading) -> LimitVerdict | None:
    if limits.max_memory_nbytes is None:
        return None
    bound = limits.max_memory_nbytes if reading.running else limits.max_memory_nbytes * (1 - FREE_SHARE)
    if reading.memory_nbytes <= bound:
        return None
    held = show_nbytes(reading.memory_nbytes)
    allowed = show_nbytes(limits.max_memory_nbytes)
    return LimitVerdict(False, None, f"it holds {held} of memory, at most {allowed} are allowed")


def _yield(limits: Limits, reading: SensorReading) -> LimitVerdict | None:
    for name in limits.yield_to:
        if name in reading.processes:
            says = "a program fills the screen" if name == FULL_SCREEN else f"{name} runs"
            return LimitVerdict(False, None, says)
    return None


def _used(limits: Limits, reading: SensorReading) -> LimitVerdict | None:
    if limits.when_idle_s is None or reading.idle_s is None or reading.idle_s >= limits.when_idle_s:
        return None
    return LimitVerdict(False, None, f"somebody used this machine in the last {show_s(limits.when_idle_s)}")


def _battery(limits: Limits, reading: SensorReading) -> LimitVerdict | None:
    return LimitVerdict(False, None, "on battery") if limits.on_ac_only and reading.on_battery else None


_CHECKS: tuple[Callable[[Limits, SensorReading], LimitVerdict | None], ...] = (
    _asked,
    _hours,
    _quota,
    _temperature,
    _memory,
    _yield,
    _used,
    _battery,
)


def _second(reading: SensorReading) -> float:
    """Second of the local week, which begins on Monday."""
    return (reading.unix_s + reading.utc_offset_s + 3 * DAY_S) % WEEK_S  # 1970 began on a Thursday


def _closes(hours: tuple[HourSpan, ...], reading: SensorReading) -> float | None:
    """When the hours that hold now end, spans that touch counted as one; None when they never do."""
    second = _second(reading)
    passed = 0.0
    while passed < WEEK_S and (left := max((span.left_s(second + passed) for span in hours), default=0.0)):
        passed += left
    return reading.local_s_later(passed) if hours and passed < WEEK_S else None


# ---- as people write them


def parse_hours(text: str) -> tuple[HourSpan, ...]:
    """`22-07`, `22:30-07:15`, `0-6,12-14`, `mon-fri 22-07,sat-sun`. Raises ValueError."""
    spans = []
    for part in text.lower().split(","):
        match = _HOURS.match(part.strip())
        if match is None or not match[0]:
            raise ValueError("say 22-07, 22:30-07:15, 0-6,12-14 or mon-fri 22-07,sat-sun (local time)")
        numbers = [int(number or 0) for number in match.groups()[2:]]
        begin = numbers[0] * 3600 + numbers[1] * 60
        end = numbers[2] * 3600 + numbers[3] * 60
        if max(begin, end) > DAY_S or max(numbers[1], numbers[3]) > 59:
            raise ValueError(f"{part.strip()!r} is not of a day: hours are 0 to 24, minutes 0 to 59")
        first = DAYS.index(match[1] or "mon")
        last = DAYS.index(match[2] or match[1] or "sun")
        days = sorted((first + later) % 7 for later in range((last - first) % 7 + 1))
        if begin % DAY_S == end % DAY_S and (len(days) == 7 or begin == end != 0):
            raise ValueError(f"{part.strip()!r} is empty, or always: leave it out for always")
        spans.append(HourSpan(begin % DAY_S, end % DAY_S, tuple(days)))
    return tuple(spans)


def parse_rate(text: str) -> float:
    """Bits a second of `20Mbit`, `500kbit` or `2MB` (bytes a second). Raises ValueError, also for a plain number."""
    match = _RATE.match(text.strip())
    if match is None or not match.group(2) + match.group(3):
        raise ValueError("say 20Mbit, 500kbit or 2MB (a second)")
    rate = float(match.group(1)) * _THOUSANDS[match.group(2).lower()] * (8 if match.group(3) == "B" else 1)
    if not 8.0 * SLOWEST_BYTES_PER_S <= rate <= 1e12:
        raise ValueError("a rate is 210kbit to 1000Gbit: other nodes give up what comes more slowly")
    return rate


def _amount(units: Mapping[str, float], least: float, most: float, says: str, text: str) -> float:
    """The number in `text` times its unit. Raises ValueError that `says` what to say."""
    match = _AMOUNT.match(text.strip())
    value = float(match[1]) * units.get(match[2].lower(), math.nan) if match else math.nan
    if not least <= value <= most:
        raise ValueError(f"say {says} are allowed")
    return value


def parse_nbytes(text: str) -> int:
    """Bytes of `50GB`, `512MiB`. Raises ValueError."""
    return int(_amount(_BYTES, 1e6, 1e15, "50GB or 512MiB; 1MB to 1000TB", text))


def parse_yes(text: str) -> bool:
    """True of `yes`. Raises ValueError for anything else."""
    if text.strip().lower() != "yes":
        raise ValueError("say yes, or none")
    return True


def parse_names(text: str) -> tuple[str, ...]:
    """Program names of `steam,blender`. Raises ValueError."""
    names = tuple(dict.fromkeys(part.strip().lower() for part in text.split(",") if part.strip()))
    if not 0 < len(names) <= YIELD_MAX or any(len(name) > 64 or "/" in name for name in names):
        raise ValueError(f"say steam,blender: 1 to {YIELD_MAX} names of programs as `ps` shows them")
    return names


def show_hours(hours: tuple[HourSpan, ...]) -> str:
    def clock(second: int) -> str:
        return f"{second // 3600:02}" + (f":{second // 60 % 60:02}" if second % 3600 else "")

    def show_span(span: HourSpan) -> str:
        days = span.days
        first = next((day for day in days if (day - 1) % 7 not in days), 0)  # Saturday of sat-mon
        last = DAYS[(first + len(days) - 1) % 7]
        named = "" if len(days) == 7 else DAYS[first] if len(days) == 1 else f"{DAYS[first]}-{last}"
        times = "" if span.length == DAY_S and not span.begin else f"{clock(span.begin)}-{clock(span.end)}"
        return f"{named} {times}".strip()

    return ",".join(map(show_span, hours))


def show_s(seconds: float) -> str:
    size, unit = (3600, "h") if seconds % 3600 == 0 else (60, "m") if seconds % 60 == 0 else (1, "s")
    return f"{seconds / size:.6g}{unit}"


def show_rate(bps: float) -> str:
    for unit, size in (("Gbit", 1e9), ("Mbit", 1e6), ("kbit", 1e3)):
        if bps >= size:
            return f"{bps / size:.10g}{unit}"
    return f"{bps:.10g}bit"


def show_nbytes(nbytes: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if nbytes >= size:
            return f"{nbytes / size:.10g}{unit}"
    return f"{nbytes:.0f}B"


@dataclass(frozen=True, slots=True)
class LimitKind:
    """A limit of the command line: its field, its parser and formatter, an example ("" for one that takes no value) and
    its help."""

    field: str
    parse: Callable[[str], object]
    show: Callable[..., str]
    example: str
    help: str


LIMIT_KINDS: Mapping[str, LimitKind] = {
    "hours": LimitKind(
        "hours",
        parse_hours,
        show_hours,
        "22-07",
        "Run only then (local time); 0-6,12-14 for two spans, mon-fri 22-07,sat-sun for days.",
    ),
    "max-up": LimitKind("max_up_bps", parse_rate, show_rate, "20Mbit", "Most to send per second."),
    "max-down": LimitKind("max_down_bps", parse_rate, show_rate, "100Mbit", "Most to receive per second."),
    "quota": LimitKind(
        "quota_nbytes",
        lambda text: parse_nbytes(text.strip().removesuffix("/day").removesuffix("/d")),
        lambda n: f"{show_nbytes(n)}/day",
        "50GB/day",
        "Most bytes per day, both directions together.",
    ),
    "max-temp": LimitKind(
        "max_temp_c",
        partial(_amount, {"": 1, "c": 1, "°": 1, "°c": 1}, 30, 110, "80 or 80C; 30 to 110"),
        lambda c: f"{c:g}C",
        "80C",
        "Pause while the GPU (or processor) is hotter than this.",
    ),
    "max-memory": LimitKind(
        "max_memory_nbytes", parse_nbytes, show_nbytes, "6GB", "Pause while this process uses more memory."
    ),
    "max-load": LimitKind(
        "max_load",
        partial(_amount, {"%": 0.01}, LOAD_LEAST, 1.0, f"50%; {LOAD_LEAST:.0%} to 100%"),
        lambda share: f"{share * 100:.6g}%",
        "50%",
        "Share of the time to compute at most, in pieces well under a second.",
    ),
    "yield-to": LimitKind(
        "yield_to",
        parse_names,
        ",".join,
        "steam,full-screen",
        "Pause while one of these programs, or any full-screen one, runs.",
    ),
    "when-idle": LimitKind(
        "when_idle_s",
        partial(_amount, {"s": 1, "m": 60, "h": 3600}, 1.0, DAY_S, "5m, 90s or 1h; a second to a day"),
        show_s,
        "5m",
        "Run only once nobody has used keyboard and mouse for so long.",
    ),
    "on-ac-only": LimitKind("on_ac_only", parse_yes, lambda on: "yes", "", "Pause while on battery."),
}
LIFTED = ("", "none")  # texts that lift a limit


def change(limits: Limits, changed: Mapping[str, str]) -> Limits:
    """`limits` with those in `changed` as written; "" and "none" lift a limit. Raises ValueError that names it."""
    values: dict[str, object] = {}
    for name, text in changed.items():
        kind = LIMIT_KINDS.get(name)
        if kind is None:
            raise ValueError(f"{name[:40]!r} is no limit; there are {', '.join(LIMIT_KINDS)}")
        if text.strip().lower() in LIFTED:
            values[kind.field] = getattr(Limits(), kind.field)
            continue
        try:
            values[kind.field] = kind.parse(text[:200])
        except ValueError as error:
            raise ValueError(f"--{name} {text[:60]!r}: {error}") from None
    return dataclasses.replace(limits, **values)  # type: ignore[arg-type]


def show(limits: Limits) -> dict[str, str]:
    """The limits that are set, as `change` reads them."""
    none = Limits()
    return {
        name: kind.show(value)
        for name, kind in LIMIT_KINDS.items()
        if (value := getattr(limits, kind.field)) != getattr(none, kind.field)
    }

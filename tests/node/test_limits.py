"""Limits: the decision against dumb twins, words against themselves, hours on the simulated clock."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.swarm.fault_injection import SLOW_LINK
from swarmnode.train.node.limits import (
    COOL_C,
    DAY_S,
    LIMIT_KINDS,
    QUOTA_SHARE,
    AskedPause,
    HourSpan,
    Limits,
    SensorReading,
    change,
    decide,
    parse_hours,
    parse_nbytes,
    parse_rate,
    show,
)
from swarmnode.train.node.regulator import allowance

NOON = 1_700_000_000 // DAY_S * DAY_S + DAY_S // 2
minutes = st.integers(0, 1439)
days = st.integers(0, 6)
spans = st.tuples(minutes, minutes, days, days).filter(lambda span: span[0] != span[1])
WEEK = 7 * 1440


def test_no_limits_never_pause() -> None:
    verdict = decide(Limits(), SensorReading(NOON, 0))
    assert (verdict.running, verdict.until_unix_s) == (True, None)


@given(st.lists(spans, min_size=1, max_size=3), st.integers(-12, 14), st.integers(0, WEEK - 1))
@example([(1320, 420, 0, 6)], 0, 1319)
@example([(0, 720, 0, 6), (720, 0, 0, 6)], 0, 5)
@example([(1320, 420, 6, 0)], 0, 5)
def test_hours_agree_with_a_table_of_minutes(
    hours: list[tuple[int, int, int, int]], offset_h: int, minute: int
) -> None:
    table = [False] * WEEK
    limited = []
    for begin, end, first, last in hours:
        chosen = [(first + later) % 7 for later in range((last - first) % 7 + 1)]
        limited.append(HourSpan(begin * 60, end * 60, tuple(sorted(chosen))))
        for day in chosen:
            at = begin
            while at % 1440 != end or at == begin:
                table[(day * 1440 + at) % WEEK] = True
                at += 1
    limits = Limits(hours=tuple(limited))
    monday = NOON - DAY_S // 2 + 6 * DAY_S  # NOON is on a Tuesday
    verdict = decide(limits, SensorReading(monday + minute * 60 - offset_h * 3600, offset_h * 3600))
    assert verdict.running == table[minute]
    turned = table[minute:] + table[:minute]
    changes = [at for at, value in enumerate(turned) if value != turned[0]]
    if not changes:
        assert verdict.until_unix_s is None
    else:
        assert verdict.until_unix_s == monday + (minute + changes[0]) * 60 - offset_h * 3600


@given(st.integers(1, 10**7), st.floats(1e3, 1e8))
def test_a_quota_stops_within_one_percent(step_ms: int, rate: float) -> None:
    """Bytes flow at `rate` and are read now and then: the first pause comes before the quota and not below 99 % of it,
    as long as a reading comes every second and the quota lasts longer than a few minutes."""
    quota = int(rate * 600)
    limits = Limits(quota_nbytes=quota)
    used = 0.0
    step_s = min(1.0, step_ms / 1000 + 0.01)
    while True:
        verdict = decide(limits, SensorReading(NOON, 0, used_nbytes=int(used), nbytes_per_s=rate))
        if not verdict.running:
            break
        used += rate * step_s
        if step_s < 0.5:
            step_s = 0.5
    assert 0.99 * quota <= used + rate <= 1.01 * quota
    assert verdict.until_unix_s == NOON + DAY_S // 2, "until midnight"
    assert (
        decide(limits, SensorReading(NOON, 0, running=False, used_nbytes=int(QUOTA_SHARE * quota) + 1)).running is False
    )


def test_temperature_and_memory_do_not_flutter() -> None:
    limits = change(Limits(), {"max-temp": "80C", "max-memory": "1GB"})
    assert decide(limits, SensorReading(NOON, 0, temperature_c=80)).running
    assert not decide(limits, SensorReading(NOON, 0, temperature_c=81)).running
    assert not decide(limits, SensorReading(NOON, 0, running=False, temperature_c=79)).running
    assert decide(limits, SensorReading(NOON, 0, running=False, temperature_c=80 - COOL_C)).running
    assert decide(limits, SensorReading(NOON, 0, temperature_c=None)).running, "what cannot be measured is not kept"
    assert not decide(limits, SensorReading(NOON, 0, memory_nbytes=1_000_000_001)).running
    assert not decide(limits, SensorReading(NOON, 0, running=False, memory_nbytes=960_000_000)).running


def test_it_makes_way_for_programs_and_people() -> None:
    limits = change(Limits(), {"yield-to": "Steam, blender"})
    verdict = decide(limits, SensorReading(NOON, 0, processes=frozenset({"bash", "blender"})))
    assert (verdict.running, verdict.reason) == (False, "blender runs")
    assert decide(limits, SensorReading(NOON, 0, processes=frozenset({"bash"}))).running
    asked = decide(Limits(), SensorReading(NOON, 0, asked=AskedPause(NOON + 60, "snoozed")))
    assert (asked.running, asked.until_unix_s, asked.reason) == (False, NOON + 60, "snoozed")
    assert decide(Limits(), SensorReading(NOON, 0, asked=AskedPause(NOON))).running
    forever = decide(Limits(), SensorReading(NOON, 0, asked=AskedPause(math.inf)))
    assert (forever.running, forever.until_unix_s) == (False, None)


def test_the_longest_pause_is_told() -> None:
    limits = change(Limits(), {"hours": "13-14", "quota": "1GB/day"})
    verdict = decide(limits, SensorReading(NOON, 0, used_nbytes=10**9))
    assert "quota" in verdict.reason and verdict.until_unix_s == NOON + DAY_S // 2
    hot = change(limits, {"max-temp": "70"})
    assert decide(hot, SensorReading(NOON, 0, used_nbytes=10**9, temperature_c=90)).until_unix_s is None


def test_limits_that_matter_to_others_are_announced() -> None:
    limits = change(Limits(), {"hours": "22-07", "max-up": "20Mbit"})
    told = allowance(limits, decide(limits, SensorReading(NOON, 0)), NOON)
    assert told is not None and (told.up_bps, told.resumes_unix_s) == (20_000_000, NOON + 10 * 3600)
    night = NOON + 11 * 3600
    told = allowance(limits, decide(limits, SensorReading(night, 0)), night)
    assert told is not None and (told.pauses_unix_s, told.resumes_unix_s) == (NOON + 19 * 3600, 0)
    assert allowance(Limits(), decide(Limits(), SensorReading(NOON, 0)), NOON) is None


WORDS = {
    "hours": ["22-07", "22:30-07:15", "00-06,12-14", "20-00", "mon-fri 22-07,sat-sun", "sun-mon 08-09:30,wed"],
    "max-up": ["20Mbit", "1.5Gbit", "210kbit"],
    "max-down": ["100Mbit"],
    "quota": ["50GB/day", "1.5TB/day"],
    "max-temp": ["80C", "72.5C"],
    "max-memory": ["6GB", "512MB"],
    "max-load": ["50%", "12.5%"],
    "yield-to": ["steam,full-screen"],
    "when-idle": ["5m", "90s", "2h"],
    "on-ac-only": ["yes"],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in WORDS.items() for text in texts])
def test_words_read_back(name: str, text: str) -> None:
    limits = change(Limits(), {name: text})
    assert show(limits) == {name: text}
    assert change(limits, show(limits)) == limits
    assert change(limits, {name: "none"}) == change(limits, {name: ""}) == Limits()


def test_words_have_many_forms() -> None:
    assert parse_rate("2MB/s") == parse_rate("16Mbps") == parse_rate("16 mbit") == 16e6
    assert parse_nbytes("1GiB") == 2**30 and parse_rate(SLOW_LINK) > 0, "also of the storm that `make chaos` makes"
    assert parse_hours("9-24") == parse_hours("09:00-00")
    for name, kind in LIMIT_KINDS.items():
        assert change(Limits(), {name: kind.example or "yes"}) != Limits()


NO_WORDS = {
    "hours": ["22", "25-07", "7-7", "mon-sun", "sat 7-7", "someday 1-2", "mon,", "22:60-1"],
    "when-idle": ["5", "2d"],
    "on-ac-only": ["no"],
    "max-up": ["fast", "209kbit", "20", "16000000", "20Mbyte"],
    "quota": ["50", "-5GB"],
    "max-temp": ["hot", "500"],
    "max-memory": ["6"],
    "max-load": ["50", "2%", "101%", "half%"],
    "yield-to": [","],
    "speed": ["1"],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in NO_WORDS.items() for text in texts])
def test_malformed_limits_are_refused(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=name):
        change(Limits(), {name: text})


@given(st.sampled_from(sorted(LIMIT_KINDS)), st.text(max_size=40))
def test_no_text_breaks_it(name: str, text: str) -> None:
    try:
        change(Limits(), {name: text})
    except ValueError as error:
        assert str(error)


def test_somebody_at_the_machine_a_film_and_a_battery_pause_it() -> None:
    limits = change(Limits(), {"when-idle": "5m", "on-ac-only": "yes", "yield-to": "full-screen"})
    assert decide(limits, SensorReading(NOON, 0, idle_s=300.0, on_battery=False)).running
    used = decide(limits, SensorReading(NOON, 0, idle_s=299.0))
    assert not used.running and "used this machine in the last 5m" in used.reason
    assert decide(limits, SensorReading(NOON, 0, idle_s=300.0, on_battery=True)).reason == "on battery"
    film = decide(limits, SensorReading(NOON, 0, idle_s=300.0, processes=frozenset({"full-screen"})))
    assert film.reason == "a program fills the screen"
    blind = decide(limits, SensorReading(NOON, 0))
    assert blind.running and "nothing here tells" in blind.reason


def test_a_limit_that_nothing_here_can_measure_is_named_running_or_paused() -> None:
    limits = change(Limits(), {"when-idle": "5m", "max-temp": "80C", "yield-to": "full-screen,steam", "hours": "22-07"})
    unkept = ["when somebody uses this machine", "a temperature", "what fills the screen"]
    for offset_s in (0, 12 * 3600):
        reading = SensorReading(NOON, offset_s, sees_screen=False)
        said = decide(limits, reading).reason.split("; ")
        assert [one.removeprefix("nothing here tells ") for one in said[-3:]] == unkept
        whole = SensorReading(NOON, offset_s, idle_s=400.0, temperature_c=50.0)
        assert "nothing here tells" not in decide(limits, whole).reason


def test_hours_end_when_local_clocks_say_so_where_summer_time_begins_and_ends() -> None:
    limits = Limits(hours=parse_hours("22-7"))
    evening = NOON + 11 * 3600  # 23:00, at offset 0
    for offset_s, night_s in ((3600, 7 * 3600), (-3600, 9 * 3600)):  # an hour less of night, and an hour more
        change_s = evening + 3 * 3600
        reading = SensorReading(evening, 0, offset_at=lambda t, c=change_s, o=offset_s: o if t >= c else 0)  # type: ignore[misc]
        verdict = decide(limits, reading)
        assert (verdict.running, verdict.until_unix_s) == (True, evening + night_s)
        assert decide(limits, SensorReading(evening + night_s - 1, offset_s)).running
        assert not decide(limits, SensorReading(evening + night_s, offset_s)).running

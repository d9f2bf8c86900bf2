"""Local time as this machine's sensors give it, when the machine travels."""

import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmnode.app.daemon.clock import SystemClock
from swarmnode.app.machine.sensors import DailyTraffic, Sensors, idle_s, utc_offset_s
from swarmnode.train.node.limits import Limits, change, decide


@pytest.fixture(autouse=True)
def zone() -> Iterator[None]:
    """The zone of this process as it was."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC0")
        time.tzset()
        yield
    time.tzset()


async def test_hours_follow_the_machines_zone_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noon = 1_700_000_000 // 86_400 * 86_400 + 43_200
    clock = SystemClock(lambda: float(noon), lambda: 0.0)
    sense = Sensors(DailyTraffic(tmp_path, lambda: 0), clock)
    limits = change(Limits(), {"hours": "21-23"})
    assert (await sense(limits)).utc_offset_s == 0
    assert not decide(limits, await sense(limits)).running
    monkeypatch.setenv("TZ", "AEST-10")
    reading = await sense(limits)
    assert reading.utc_offset_s == 36_000
    assert decide(limits, reading).running, "it is 22:00 there"


def test_a_zone_file_that_changes_within_a_second_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "localtime"
    monkeypatch.setenv("TZ", f":{path}")
    for offset_s in (0, 32_400):
        path.write_bytes(
            b"TZif".ljust(20, b"\0")
            + struct.pack(">6l", 0, 0, 0, 0, 1, 4)
            + struct.pack(">l6s", offset_s, b"\0\0XYZ\0")
        )
        os.utime(path, (1, 1))
        assert utc_offset_s(1_700_000_000.0) == offset_s


async def test_the_end_of_hours_is_known_where_summer_time_begins_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    evening = 1_774_735_200  # 28 March 2026, 23:00 in Berlin; clocks go forward at 02:00
    sense = Sensors(DailyTraffic(tmp_path, lambda: 0), SystemClock(lambda: float(evening), lambda: 0.0))
    limits = change(Limits(), {"hours": "22-7"})
    assert decide(limits, await sense(limits)).until_unix_s == evening + 7 * 3600


TOOLS = {
    "gdbus": "exit 1",
    "xprintidle": "exit 1",
    "loginctl": "echo IdleHint=yes; echo IdleSinceHint=1700000000000000",
    "xprop": "[ $1 = -root ] && echo '_NET_ACTIVE_WINDOW(WINDOW): window id # 0x1c' || echo _NET_WM_STATE_FULLSCREEN",
}


async def test_a_desktop_says_who_is_there_and_whether_a_film_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def install(tool: str, text: str) -> None:
        (tmp_path / tool).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / tool).chmod(0o755)

    for tool, text in TOOLS.items():
        install(tool, text)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    now = [1_700_000_100.0]
    limits = change(Limits(), {"when-idle": "5m", "yield-to": "full-screen"})
    sense = Sensors(DailyTraffic(tmp_path, lambda: 0), SystemClock(lambda: now[0], lambda: now[0]))
    reading = await sense(limits)
    assert reading.idle_s == 100.0 and "full-screen" in reading.processes
    install("gdbus", "echo '(uint64 7000,)'")  # GNOME knows it to the millisecond
    install("xprop", "exit 1")
    assert (await sense(limits)).idle_s == 100.0, "a desktop is asked every three seconds"
    now[0] += 4.0
    reading = await sense(limits)
    assert reading.idle_s == 7.0 and "full-screen" not in reading.processes
    for tool in TOOLS:
        install(tool, "exit 1")
    assert idle_s(now[0]) is None
    now[0] += 4.0
    assert not (await sense(Limits())).processes


async def test_a_limit_that_is_set_later_is_measured_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`limit --when-idle` answers whether this machine can tell, not only the next call."""
    monkeypatch.setenv("PATH", str(tmp_path))
    noon = 1_700_000_000.0
    sense = Sensors(DailyTraffic(tmp_path, lambda: 0), SystemClock(lambda: noon, lambda: 0.0))
    assert (await sense(Limits())).idle_s is None
    film = change(Limits(), {"yield-to": "full-screen"})
    assert not (await sense(film)).sees_screen
    for tool, says in (("xprintidle", "7000"), ("xprop", "_NET_ACTIVE_WINDOW(WINDOW): window id # 0x3")):
        (tmp_path / tool).write_text(f"#!/bin/sh\necho '{says}'\n")
        (tmp_path / tool).chmod(0o755)
    idle = change(film, {"when-idle": "5m"})
    reading = await sense(idle)
    assert (reading.idle_s, reading.sees_screen) == (7.0, True)

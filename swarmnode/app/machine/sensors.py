"""Measurements for limits: local time, bytes moved today, temperature, memory, running programs."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import os
import re
import subprocess
import sys
import time
import zoneinfo
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from swarmnode.base.atomic_file import atomic_write
from swarmnode.base.damaged_file import read_own_json
from swarmnode.base.ports import Clock
from swarmnode.net.membership.liveness import PING_TIMEOUT_S
from swarmnode.train.node.limits import DAY_S, FULL_SCREEN, Limits, SensorReading

USAGE_FILE = "usage.json"
FILE_BYTES_MAX = 4096
SAVE_S = 15.0  # guess: the count of this time is lost if the process is killed
RATE_S = 3.0  # averaging time of bytes per second; between two looks at programs and desktop, each of 20 ms
TOOL_S = PING_TIMEOUT_S  # a desktop answers within milliseconds
ACTIVE_WINDOW = ("xprop", "-root", "_NET_ACTIVE_WINDOW")
MUTTER = "org.gnome.Mutter.IdleMonitor"


class DailyTraffic:
    """Bytes moved on the current local day, kept in the home over restarts."""

    def __init__(self, home: Path, total: Callable[[], int]) -> None:
        """`total` returns this process's bytes so far, in both directions."""
        self._path = home / USAGE_FILE
        self._total = total
        self._counted = total()
        self._day = -1
        self._nbytes = 0
        self._saved_s = float("-inf")
        self._recent: list[tuple[float, int]] = []

    def read(self, unix_s: float, utc_offset_s: int) -> tuple[int, float]:
        """(bytes today, recent bytes per second)."""
        day = int((unix_s + utc_offset_s) // DAY_S)
        if day != self._day:
            self._nbytes = self._load(day) if self._day == -1 else 0
            self._day = day
        total = self._total()
        self._nbytes += total - self._counted
        self._counted = total
        self._recent = [(at, seen) for at, seen in self._recent if at > unix_s - RATE_S] + [(unix_s, total)]
        first = self._recent[0][1]
        passed = unix_s - self._recent[0][0]
        if unix_s > self._saved_s + SAVE_S:
            self._saved_s = unix_s
            self.save()
        return self._nbytes, (total - first) / passed if passed > 0 else 0.0

    def save(self) -> None:
        """Save the count; a failing disk costs only the count."""
        with contextlib.suppress(OSError):
            atomic_write(self._path, json.dumps({"day": self._day, "nbytes": self._nbytes}).encode())

    def _load(self, day: int) -> int:
        def take(state: dict[str, Any]) -> int:
            return max(0, int(state["nbytes"])) if int(state["day"]) == day else 0

        return read_own_json(self._path, FILE_BYTES_MAX, take) or 0


class Sensors:
    """node.regulator.Sense of this machine. Measures only what a limit needs."""

    def __init__(self, usage: DailyTraffic, clock: Clock, pace: float = 1.0) -> None:
        """`pace`: seconds that local time goes on in a second, from the machine's own at the last midnight in UTC;
        tests let a day pass sooner, on all machines at once."""
        self._usage = usage
        self._clock = clock
        self._pace = pace
        self._programs: frozenset[str] = frozenset()
        self._sees_screen = True
        self._idle_s: float | None = None
        self._looked_s = float("-inf")
        self._looked_for = Limits()
        self._process = psutil.Process()

    async def __call__(self, limits: Limits) -> SensorReading:
        now = self._clock.unix_s()
        offset_s = utc_offset_s(now) + int((self._pace - 1.0) * (now % DAY_S))
        used, rate = self._usage.read(now, offset_s)
        if now > self._looked_s + RATE_S or limits != self._looked_for:
            self._looked_s = now
            self._looked_for = limits
            self._programs = await asyncio.to_thread(programs, limits.yield_to)
            self._sees_screen = FULL_SCREEN not in limits.yield_to or await asyncio.to_thread(sees_screen)
            self._idle_s = await asyncio.to_thread(idle_s, now) if limits.when_idle_s is not None else None
        return SensorReading(
            now,
            offset_s,
            used_nbytes=used,
            nbytes_per_s=rate,
            temperature_c=await asyncio.to_thread(temperature_c) if limits.max_temp_c is not None else None,
            memory_nbytes=self._process.memory_info().rss,
            processes=self._programs,
            sees_screen=self._sees_screen,
            idle_s=self._idle_s,
            on_battery=on_battery() if limits.on_ac_only else None,
            offset_at=utc_offset_s if self._pace == 1.0 else None,
            pace=self._pace,
        )


def local(unix_s: float) -> datetime.datetime:
    """Local time at `unix_s`. A laptop travels: the zone's file is read anew, which C does not within a second."""
    zone = None
    path = os.environ.get("TZ", "/etc/localtime").removeprefix(":")
    with contextlib.suppress(OSError, ValueError), open(path, "rb") as file:
        zone = zoneinfo.ZoneInfo.from_file(file)
    time.tzset()
    return datetime.datetime.fromtimestamp(unix_s, datetime.UTC).astimezone(zone)


def utc_offset_s(unix_s: float) -> int:
    """Seconds that local time is ahead of UTC at `unix_s`."""
    return int((local(unix_s).utcoffset() or datetime.timedelta()).total_seconds())


def local_time(in_s: float) -> str:
    """The local time `in_s` seconds from now, with the day if it is not today."""
    # People read these times.
    now = local(time.time())  # noqa: TID251
    then = local(time.time() + in_s)  # noqa: TID251
    return then.strftime("%H:%M") if then.date() == now.date() else then.strftime("%a %d %b %H:%M")


def programs(wanted: Sequence[str]) -> frozenset[str]:
    """Names of the running programs, in lower case, without the ending .exe; FULL_SCREEN while one fills the screen.
    Empty if none is `wanted`."""
    if not wanted:
        return frozenset()
    running = {(process.info["name"] or "").lower().removesuffix(".exe") for process in psutil.process_iter(["name"])}
    if FULL_SCREEN in wanted and (active := re.search("0x[0-9a-f]+", _said(*ACTIVE_WINDOW))):
        state = _said("xprop", "-id", active[0], "_NET_WM_STATE")
        running |= {FULL_SCREEN} if "_NET_WM_STATE_FULLSCREEN" in state else set()
    return frozenset(running)


def sees_screen() -> bool:
    """Whether a desktop here tells its active window."""
    return bool(_said(*ACTIVE_WINDOW))


def idle_s(now_unix_s: float) -> float | None:
    """Seconds since somebody used this machine: by GNOME, X11 or logind (which knows terminals, too), or macOS's
    input devices. None if none of them answers."""
    if sys.platform == "darwin":
        told = re.search(r'"HIDIdleTime" = (\d+)', _said("ioreg", "-c", "IOHIDSystem", "-d", "4"))
        return int(told[1]) / 1e9 if told else None
    core = f"/{MUTTER.replace('.', '/')}/Core"
    mutter = _said("gdbus", "call", "-e", "-d", MUTTER, "-o", core, "-m", f"{MUTTER}.GetIdletime")
    if told := re.search(r"(\d+)\D*$", mutter) or re.match(r"(\d+)$", _said("xprintidle").strip()):
        return int(told[1]) / 1e3
    told = re.search(
        r"IdleSinceHint=(\d+)", hint := _said("loginctl", "show-session", "-p", "IdleHint", "-p", "IdleSinceHint")
    )
    if told is None:
        return None
    return max(0.0, now_unix_s - int(told[1]) / 1e6) if "IdleHint=yes" in hint else 0.0


def on_battery() -> bool | None:
    """Whether this machine runs on its battery; None without one."""
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    return None if battery is None or battery.power_plugged is None else not battery.power_plugged


def _said(*command: str) -> str:
    """The output of a tool of the desktop; "" where it is missing, fails or hangs."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=TOOL_S, check=True).stdout
    return ""


def temperature_c() -> float | None:
    """The hottest GPU's temperature, else of the processor's sensors; None if none can be read."""
    if gpus := gpu_temperatures():
        return max(gpus)
    read = getattr(psutil, "sensors_temperatures", None)
    temps = read() if read is not None else {}
    chips = [temps[chip] for chip in ("coretemp", "k10temp", "zenpower", "cpu_thermal", "acpitz") if chip in temps]
    return max((sensor.current for sensors in chips for sensor in sensors if sensor.current > 0), default=None)


def gpu_temperatures() -> list[float]:
    """Degrees of every NVIDIA GPU; empty without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)) for handle in handles]
    except pynvml.NVMLError:
        return []
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()

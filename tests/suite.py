"""Run a suite of tests in parts side by side, then its failures once more, alone.

    python -m tests.suite push      # `make test`
    python -m tests.suite nightly   # `make nightly`: what `make test` leaves out
    python -m tests.suite push --record

The parts balance themselves: `tests/seconds.json` has the seconds that each file took when a suite was recorded last
(`--record`), and the longest files are dealt first, each to the part with the least to do. A file that is not there
counts as `UNKNOWN_S`. Each part is a session of its own, because Linux shares processors among sessions, and each node
that a test starts is one.

A loaded machine must not fail the suite: failures run once more, alone. Tests that pass only then are named at the
end, and in `build/SUITE-alone.txt`, so that they are not forgotten.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
SECONDS = ROOT / "tests" / "seconds.json"
# Tests with real processes mostly wait, so there are more parts than cores. Measured for two cores: six.
PARTS = 6
# A guess: the median file takes two seconds, a new one with real processes thirty.
UNKNOWN_S = 5.0
# More failures than this are no accident: they are not tried again.
MANY = 8
ENDED = re.compile(r"^\d+ .* in [\d.]+s|^no tests ran", re.MULTILINE)
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
# pytest's codes: 0 passed, 1 some failed, 5 no test in these files is of this suite.
FINISHED = (0, 1, 5)


@dataclass(frozen=True, slots=True)
class Suite:
    """The tests of one suite: pytest's own arguments, and what is set in its environment."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]


SUITES: Mapping[str, Suite] = {
    "push": Suite((), {"SWARMNODE_NIGHTLY": "0"}),
    "nightly": Suite(("-m", "nightly"), {"SWARMNODE_NIGHTLY": "1"}),
    # The properties of unit tests once more, with five times as many other examples.
    "properties": Suite(("-m", "unit", "--hypothesis-profile", "nightly"), {"SWARMNODE_NIGHTLY": "0"}),
}


@dataclass(slots=True)
class Part:
    """One process of pytest and what it left."""

    name: str
    process: subprocess.Popen[bytes]

    @property
    def output(self) -> Path:
        return ROOT / "build" / f"{self.name}.txt"

    @property
    def results(self) -> Path:
        return ROOT / "build" / f"{self.name}.xml"

    def text(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")


def dealt(files: Sequence[str], seconds: Mapping[str, float], parts: int) -> list[list[str]]:
    """`files` in at most `parts` lists of about equal seconds: the longest first, each to the list with the least."""
    lists: list[list[str]] = [[] for _ in range(parts)]
    totals = [0.0] * parts
    for file in sorted(files, key=lambda name: (-seconds.get(name, UNKNOWN_S), name)):
        least = totals.index(min(totals))
        lists[least].append(file)
        totals[least] += seconds.get(file, UNKNOWN_S)
    return [sorted(one) for one in lists if one]


def recorded() -> dict[str, dict[str, float]]:
    """For each suite the seconds of each of its files as they were recorded last."""
    if not SECONDS.exists():
        return {}
    known: dict[str, dict[str, float]] = json.loads(SECONDS.read_text())
    return known


def test_files() -> list[str]:
    """All test modules, as paths from the root."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))


def start(name: str, suite: Suite, files: Sequence[str]) -> Part:
    """Begin a part named `name`; its output and results go to `build/`."""
    output = ROOT / "build" / f"{name}.txt"
    results = output.with_suffix(".xml")
    results.unlink(missing_ok=True)
    command = [*PYTEST, "--durations=15", "--durations-min=1", f"--junitxml={results}", *suite.arguments, *files]
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | suite.environment,
            start_new_session=True,
        )
    return Part(name, process)


def wait(parts: Sequence[Part]) -> None:
    """Return when all have ended; say when each does. If this process is told to end, they are, too."""

    def end(number: int, _: object) -> None:
        for part in parts:
            if part.process.poll() is None:
                part.process.send_signal(number)
        sys.exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    running = list(parts)
    while running:
        for part in list(running):
            if part.process.poll() is not None:
                running.remove(part)
                print(f"{part.name}: {summary(part.text())}", flush=True)
        time.sleep(0.2)


def summary(text: str) -> str:
    """The last line in which pytest counts."""
    lines = [line for line in text.splitlines() if ENDED.match(line)]
    return lines[-1] if lines else "did not finish"


@dataclass(frozen=True, slots=True)
class Case:
    """One test by the results that pytest wrote; `name` is "" for a file that cannot be collected."""

    file: str
    name: str
    seconds: float
    failed: bool

    @property
    def node_id(self) -> str:
        return f"{self.file}::{self.name}"


def cases(results: Path) -> list[Case]:
    """The tests of one part. A result is of the file that its class name begins with; the rest names classes."""
    found = []
    for element in ElementTree.parse(results).iter("testcase"):
        words = element.get("classname", "").split(".")
        inside = [element.get("name", "")]
        while words and not (file := ROOT.joinpath(*words).with_suffix(".py")).is_file():
            inside.insert(0, words.pop())
        failed = element.find("failure") is not None or element.find("error") is not None
        seconds = float(element.get("time", "0"))
        if words:
            found.append(Case(str(file.relative_to(ROOT)), "::".join(inside), seconds, failed))
        else:
            found.append(Case(element.get("name", ""), "", seconds, failed))
    return found


def file_seconds(results: Path) -> dict[str, float]:
    """Seconds of each test file."""
    seconds: dict[str, float] = {}
    for case in cases(results):
        if case.name:
            seconds[case.file] = seconds.get(case.file, 0.0) + case.seconds
    return seconds


def counts(results: Path) -> tuple[int, int, int]:
    """(passed, failed, skipped) tests by the results that pytest wrote; an error counts as a failure."""
    suite = next(ElementTree.parse(results).iter("testsuite"))
    failed = int(suite.get("failures", "0")) + int(suite.get("errors", "0"))
    skipped = int(suite.get("skipped", "0"))
    return int(suite.get("tests", "0")) - failed - skipped, failed, skipped


def alone(failed: Sequence[str], suite: Suite) -> bool:
    """Whether `failed` tests pass when nothing runs beside them."""
    print(f"\nsecond try, alone: {len(failed)} of the tests", flush=True)
    # Files named on the command line are run whole; the names are of single tests, so the suite's filter is not needed.
    environment = os.environ | suite.environment | {"SWARMNODE_NIGHTLY": "1"}
    return subprocess.run([*PYTEST, *failed], cwd=ROOT, env=environment, check=False).returncode == 0


def record(name: str, parts: Sequence[Part]) -> None:
    """Keep the seconds of this run's files for the next deal."""
    known = recorded()
    seconds = {file: spent for part in parts for file, spent in file_seconds(part.results).items()}
    known[name] = {file: round(spent, 1) for file, spent in sorted(seconds.items())}
    SECONDS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def run(name: str, recording: bool) -> int:
    """Run the suite `name`; return its exit code."""
    suite = SUITES[name]
    (ROOT / "build").mkdir(exist_ok=True)
    began = time.monotonic()
    seconds = recorded().get(name, {})
    # A file without a recorded second has no test of this suite, if the suite was recorded after the file was made.
    lists = dealt(test_files(), seconds, PARTS)
    parts = [start(f"{name}-{number}", suite, files) for number, files in enumerate(lists, 1)]
    wait(parts)
    for part in parts:
        print(f"\n{part.name}\n{part.text()}")
    if cut := [part.name for part in parts if part.process.returncode not in FINISHED]:
        print(f"did not end: {', '.join(cut)}")
        return 1
    totals = [sum(column) for column in zip(*(counts(part.results) for part in parts), strict=True)]
    passed, failures, skipped = totals
    failures_of = [case for part in parts for case in cases(part.results) if case.failed]
    failed = sorted({case.node_id for case in failures_of})
    report = ROOT / "build" / f"{name}-alone.txt"
    report.write_text("")
    code = 0
    if failed:
        collected = all(case.name for case in failures_of)
        code = 1
        if len(failed) > MANY or not collected:
            print(f"{len(failed)} failures: no second try")
        elif alone(failed, suite):
            report.write_text("".join(f"{test}\n" for test in failed))
            passed += failures
            failures = 0
            code = 0
    if recording and code == 0:
        record(name, parts)
    minutes = (time.monotonic() - began) / 60
    print(f"\n{name}: {minutes:.1f} minutes")
    for test in report.read_text().splitlines():
        print(f"passed only alone, at the second try: {test}")
    print(f"{passed} passed, {failures} failed, {skipped} skipped")
    return code


def main(arguments: Sequence[str]) -> int:
    names = [word for word in arguments if word != "--record"]
    if not names or any(name not in SUITES for name in names):
        print(f"usage: python -m tests.suite {'|'.join(SUITES)} [--record]", file=sys.stderr)
        return 2
    codes = [run(name, "--record" in arguments) for name in names]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Figures on front pages have a row in docs/measurements/claims.md, whose small command prints what the row says."""

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "measurements" / "claims.md"
FRONT = ("README.md", "docs/README.md", "docs/quick-start.md", "docs/faq.md")
HISTORY = ("CHANGELOG.md", "docs/how-it-works.md")  # whose whole numbers are bounds and counts, not measurements
COLUMNS = ("figure", "where", "command", "measured", "small", "reads", "tolerance")
BOUND_S = 1500.0  # a command of some CPU seconds took 470 s at a load of 18
FENCE = re.compile(r"^ *```[^\n]*\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
NO_FIGURE = re.compile(r"`[^`]*`|\]\([^)]*\)|\b\d{4}\.\d{4,5}\b|Python 3\.\d+|Apache-2\.0|Llama 3 8B")
UNIT = r"(?: |-)?(?:%|times|nats?\b|bytes?\b|[kKMG]i?B\b|kbit|M\b|samples|tokens|seconds|minutes|hours)"
FIGURE = re.compile(rf"(?<![\w.,:/+-])((?:\d[\d,]*)?\.\d+(?![.\d])|\d[\d,]*(?={UNIT}))")
TO_MEASURED = re.compile(r"\]\([^)]*(?:measurements/|learning\.md)[^)]*\)")
DATE = re.compile(r"\d+ [A-Z][a-z]+ 20\d\d, [0-9a-f]{7,}")


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table; `small` is "" where nightly runs nothing."""

    figure: str
    where: str
    command: str
    measured: str
    small: str
    reads: str
    tolerance: str


def rows(text: str) -> list[Row]:
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == len(COLUMNS) and cells[0] != COLUMNS[0] and set(cells[0]) != {"-"}:
            found.append(Row(*cells))
    return found


ROWS = rows(TABLE.read_text())
PRINTED = [row for row in ROWS if row.small.startswith("`")]


def figures(text: str) -> list[str]:
    """Decimal numbers, and numbers with a unit, outside code and links."""
    return FIGURE.findall(NO_FIGURE.sub("", " ".join(FENCE.sub("", text).split())))


def without_row(page: str, text: str, table: Sequence[Row]) -> list[str]:
    """The figures of `text`, a part of `page`, that no row of the page has."""
    known = " ".join(row.figure for row in table if page in row.where.split(", "))
    numbers = set(re.findall(r"(?:\d[\d,]*)?\.\d+|\d[\d,]*", known))
    return [figure for figure in figures(text) if figure not in numbers]


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.:;])\s+(?=[A-Z*`\[|])|\n\n|\n(?=[*|#-])", FENCE.sub("", text))


@pytest.mark.parametrize("page", FRONT)
def test_every_figure_of_a_front_page_has_a_row(page: str) -> None:
    assert not without_row(page, (ROOT / page).read_text(), ROWS), f"{page}: add rows to {TABLE.name}"


@pytest.mark.parametrize("page", HISTORY)
def test_every_decimal_figure_of_the_history_has_a_row(page: str) -> None:
    assert not [one for one in without_row(page, (ROOT / page).read_text(), ROWS) if "." in one], (
        f"{TABLE.name}: {page}"
    )


def test_the_changelog_says_each_thing_once() -> None:
    """A merge of both sides leaves a paragraph twice, cut in mid-sentence."""
    text = (ROOT / "CHANGELOG.md").read_text()
    heads = re.findall(r"^\* \*\*([^*]+)\*\*", text, re.MULTILINE)
    lines = [line for line in text.splitlines() if len(line) > 40]
    assert sorted(set(heads)) == sorted(heads)
    assert sorted(set(lines)) == sorted(lines)


def test_every_figure_beside_a_link_to_a_measurement_has_a_row() -> None:
    for path in sorted((ROOT / "docs").glob("*.md")):
        page = f"docs/{path.name}"
        linked = [one for one in sentences(path.read_text()) if TO_MEASURED.search(one)]
        missing = [figure for one in linked for figure in without_row(page, one, ROWS)]
        assert path.name == "learning.md" or not missing, f"{page}: {missing}: add rows to {TABLE.name}"


@pytest.mark.parametrize("row", ROWS, ids=[row.figure[:40] for row in ROWS])
def test_a_row_is_whole(row: Row) -> None:
    """It has a page that has its figure, a reason where nothing is run, and a date and commit where a card ran."""
    for page in row.where.split(", "):
        assert (ROOT / page).is_file(), row
    said = [figure for page in row.where.split(", ") for figure in figures((ROOT / page).read_text())]
    numbers = figures(row.figure)
    assert not numbers or any(number in said for number in numbers), f"no page says {row.figure}"
    if row.small.startswith("`"):
        assert row.reads.startswith("`"), row
        assert (" to " in row.tolerance) == (">" in row.reads or " " not in row.reads.strip("`")), row
    else:
        assert re.match(r"- \w", row.small), f"{row.figure}: say why nothing small is run"
    if "a card" in row.small:
        assert row.measured.startswith("card: last run ") and DATE.search(row.measured), row


@functools.cache
def printed(command: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        environ = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": folder}
        run = subprocess.run(
            command.split(), cwd=folder, env=environ, capture_output=True, text=True, timeout=BOUND_S, check=False
        )
    assert run.returncode == 0, f"{command}\n{run.stderr[-2000:]}"
    return run.stdout


def at(found: Any, path: str) -> float:
    """The number at `a > 0 > b` of an object."""
    for step in path.split(" > "):
        found = found[int(step)] if isinstance(found, list) else found[step]
    return float(found)


def within(text: str, row: Row) -> bool:
    """Whether what the small command of `row` printed is what the row says."""
    reads = row.reads.strip("`")
    if not row.tolerance:
        return reads in text
    least, most = (float(end) for end in row.tolerance.split(" to "))
    return least <= at(json.loads(text), reads) <= most


@pytest.mark.nightly
@pytest.mark.timeout(2 * BOUND_S)
@pytest.mark.parametrize("row", PRINTED, ids=[row.figure[:40] for row in PRINTED])
def test_the_small_command_of_a_row_prints_what_it_says(row: Row) -> None:
    text = printed(row.small.strip("`"))
    assert within(text, row), f"{row.small}: {row.reads} is not {row.tolerance or 'there'}\n{text[:1000]}"


def a_row(**changed: str) -> Row:
    return Row(**(dict.fromkeys(COLUMNS, "") | {"where": "README.md", "figure": "2.5 times"} | changed))


def test_a_figure_without_a_row_is_found() -> None:
    table = [a_row()]
    assert not without_row("README.md", "It is 2.5 times as fast (`x 3.5`, [b](c/4.5.md), Python 3.11).", table)
    assert without_row("README.md", "It is 2.6 times as fast, in\n12 minutes.", table) == ["2.6", "12"]
    assert without_row("docs/faq.md", "It is 2.5 times as fast.", table) == ["2.5"]


def test_a_number_outside_the_tolerance_is_found() -> None:
    row = a_row(reads="`a > 0 > b/c`", tolerance="1 to 2")
    assert within('{"a": [{"b/c": 1.5}]}', row) and not within('{"a": [{"b/c": 2.5}]}', row)
    line = a_row(reads="`2.9 to 3.5 times`")
    assert within("they are 2.9 to 3.5 times\n", line) and not within("they are 4.9 times\n", line)


# ---- the code of each table


def tables(text: str) -> Iterator[list[str]]:
    """The headings above each table of a page, the page's own first."""
    above: list[str] = []
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if match := re.match(r"(#+) (.*)", line):
            above = [*above[: len(match[1]) - 1], match[2]]
        elif line.startswith("|") and not lines[number - 1].startswith("|"):
            yield list(above)


def undated(name: str, text: str, index: str) -> list[str]:
    """The last headings of tables of page `name` for which `index` names no commit."""
    said = re.findall(rf"^\| {re.escape(name)}, ([^|]*) \| [^|]*\b[0-9a-f]{{7,8}}\b", index, re.MULTILINE)
    return [above[-1] for above in tables(text) if not said or (len(above) > 1 and not set(above) & set(said))]


@pytest.mark.parametrize("name", ["attacks", "gossip", "h200", "lost-stages", "packets", "simulated-swarms"])
def test_every_table_of_measurements_names_the_commit_that_it_measured(name: str) -> None:
    folder = TABLE.parent
    assert not undated(f"{name}.md", (folder / f"{name}.md").read_text(), (folder / "README.md").read_text())


def test_a_table_without_a_commit_is_found() -> None:
    page = "# A\n\n## B\n\n| x |\n| - |\n\n## C\n\n### D\n\n| y |\n"
    assert undated("a.md", page, "| a.md, B | 6a480aea | no |") == ["D"]
    assert not undated("a.md", page, "| a.md, B | 6a480aea | no |\n| a.md, C | 6a480aea | no |")
    assert undated("a.md", page, "| a.md, B | lately | no |") == ["B", "D"]


# ---- "tested with real processes in each push"

SUBJECTS = {
    "training with kills": "tests/live/test_swarm.py::test_a_swarm_survives_and_leaves_nothing",
    "joining and leaving": "tests/live/test_swarm.py::test_a_swarm_survives_and_leaves_nothing",
    "all leaving at once": "tests/live/test_all_return.py::test_all_leave_and_come_back_and_nothing_is_lost",
    "a meeting point that dies": "tests/live/test_meeting_point.py::test_two_that_join_at_a_meeting_point",
    "a checkpoint": "tests/live/test_checkpoint.py::test_a_swarm_stops_and_goes_on_from_a_bucket",
    "an invite": "tests/live/test_invite.py::test_a_run_by_invitation",
    "a snooze": "tests/live/test_snooze.py::test_a_snooze_outlives_the_process",
    "a liar": "tests/live/test_liar.py::test_a_liar_in_a_swarm_of_processes_is_excluded",
}
"""What README says of `make test`, with the beginning of a test's id. The live test of kills has a node join and leave
as well."""
AT_NIGHT = {
    "limits": "tests/live/test_people.py::test_a_volunteer_joins",
    "two versions": "tests/live/test_versions.py::test_nodes_of_two_versions_train",
    "preemption": "tests/chaos/test_chaos.py::test_a_swarm_lives_through_the_storm",
    "an own text": "tests/live/test_own_data.py::test_a_run_on_an_organisers_own_text",
    "NAT": "tests/live/test_nat.py::test_",
    "a weekend": "tests/live/test_weekend.py::test_a_weekend_ends",
}


def listed(after: str) -> list[str]:
    """The subjects that README lists after a phrase, up to the full stop."""
    text = " ".join((ROOT / "README.md").read_text().split())
    match = re.search(re.escape(after) + r"([^.]*)\.", text)
    assert match, f"README has no list after {after!r}"
    return re.split(r", | and (?=a |an |[a-z]+\Z)", match[1].strip())


def collected(files: Iterator[str], nightly: str) -> list[str]:
    """Ids of tests in `files` that pytest would run, with or without nightly ones."""
    environ = os.environ | {"SWARMNODE_NIGHTLY": nightly}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *dict.fromkeys(files)]
    run = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=BOUND_S, check=False)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    return [line for line in run.stdout.splitlines() if "::" in line]


@pytest.mark.parametrize(
    ("phrase", "subjects", "nightly"),
    [
        ("`make test` has swarms of real processes for:", SUBJECTS, "0"),
        ("`make nightly` has them for:", AT_NIGHT, "1"),
    ],
    ids=["make test", "make nightly"],
)
def test_a_subject_that_the_readme_lists_has_a_test_that_is_run(
    phrase: str, subjects: dict[str, str], nightly: str
) -> None:
    assert sorted(listed(phrase)) == sorted(subjects)
    ids = collected((name.partition("::")[0] for name in subjects.values()), nightly)
    for subject, name in subjects.items():
        assert any(one.startswith(name) for one in ids), f"README: {subject}: {name} is not run"


def test_a_deselected_test_is_found() -> None:
    ids = collected(iter(["tests/chaos/test_chaos.py", "tests/docs/test_commands.py"]), "0")
    assert ids
    assert not any("test_a_swarm_lives_through_the_storm" in one for one in ids)

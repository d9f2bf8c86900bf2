"""Stages count from 1 for people: one function names them, in Python and on the pages."""

import re
from pathlib import Path

from swarmnode.base.ids import stage_name, stages_name
from swarmnode.base.metrics.event import told

ROOT = Path(__file__).resolve().parents[2]
# A value that is no number of a stage may follow the word (a list of speeds), and a sentence of the timeline takes
# fields that `told` counted.
ELSE = re.compile(
    r"by stage \{_?listing|--stage \{options\.stage \+ 1\}|return f\"stage \{stage \+ 1\}\"|`stage \$\{stage \+ 1\}`"
    r"|^ +\"[a-z]+\.[a-z]+\": \(\"\w+\", \".*"
)
NUMBERED = re.compile(r"\b[Ss]tage (\{(?!')|\$\{)|\b[Ss]tages \{(?!'|stages\}|list\(given|\[stage \+ 1)|\b[Ss]tage 0\b")


def lines() -> list[tuple[Path, str]]:
    found = []
    for path in sorted((ROOT / "swarmnode").rglob("*")):
        if path.suffix == ".py" and "wire" not in path.parts:
            found += [
                (path, line) for line in path.read_text().splitlines() if re.search(r"\bf?[\"'].*\bstages? ", line)
            ]
        if path.suffix in (".js", ".html") and "uplot" not in path.name:
            found += [(path, line) for line in path.read_text().splitlines()]
    return found


def test_no_text_writes_a_stages_number_by_itself() -> None:
    said = [
        f"{path.relative_to(ROOT)}: {line.strip()[:120]}"
        for path, line in lines()
        if NUMBERED.search(ELSE.sub("", line))
    ]
    assert not said, "name a stage by stage_name of swarmnode/base/ids.py, or of format.js"


def test_stages_are_named_from_one() -> None:
    assert stage_name(0) == "stage 1"
    assert stages_name([3]) == "stage 4"
    assert stages_name(range(3)) == "stages 1-3"
    assert stages_name([0, 2, 3]) == "stages 1, 3-4"


def test_fields_of_events_that_name_a_stage_are_told_from_one() -> None:
    assert (told("stage", 0), told("of_stage", "1"), told("source", "sigterm")) == (1, 2, "sigterm")
    assert (told("round", 0), told("stage", None), told("first", True)) == (0, None, True)

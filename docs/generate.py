"""Writes the pages of docs/ that are tables of the code: `make docs`. A test (tests/docs) says when they are stale."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import swarmnode
from swarmnode.app.cli import main as command_line
from swarmnode.base import errors
from swarmnode.base.bounds import FIELDS as WIRE_FIELDS
from swarmnode.base.bounds import Bound
from swarmnode.base.metrics import name
from swarmnode.base.metrics.event import EVENTS
from swarmnode.net.membership.words import WORDS
from swarmnode.run.manifest.spec import FIELDS, TABLES, Manifest
from swarmnode.train.node.waiting import CAUSES
from swarmnode.trust.verdict import VERDICTS

HERE = Path(__file__).parent
CODE_COLUMNS = 96
MADE = "<!-- Made by docs/generate.py from {source}: edit that, then `make docs`. -->\n"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Lines of a Markdown table."""
    head = list(head)
    yield f"| {' | '.join(head)} |"
    yield "|" + " --- |" * len(head)
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def metrics() -> str:
    """Every metric and every event."""

    def labels(metric: name.Metric) -> str:
        said = {name.OPEN: "a word", name.FREE: "any"}
        return "<br>".join(f"`{label}`: {said.get(v) or ', '.join(v)}" for label, v in metric.labels.items())

    lines = [
        MADE.format(source="swarmnode/base/metrics/name.py and event.py"),
        "# Metrics and events\n",
        "Every node serves these at `http://127.0.0.1:PORT/metrics` (`--metrics-port`, `--metrics-host`), in OpenMetrics for",
        "scrapers that ask for it and in Prometheus' older text else, with the usual `process_*` beside them. `/healthz` answers",
        "as long as the node's event loop turns; `/readyz` is 200 while the node trains (a bootstrap: while it runs), else 503.",
        "No label's values grow with the swarm: a peer is never a label. [Operations](operations.md) says what to watch;",
        "`deploy/prometheus/` has alert rules with tests, `deploy/grafana/` a board.\n",
        "## Metrics\n",
        *table(
            ("metric", "type", "unit", "labels", "meaning"),
            ((f"`{m.name}`", m.kind, m.unit, labels(m), m.help) for m in name.METRICS.values()),
        ),
        "\n## Events\n",
        "`events.jsonl` in the node's home: one JSON object a line with `ts`, `level`, `event`, `run`, `node`, `stage`, `fields`.\n",
        "A field is left out where it does not apply. `_s` and `seconds` are seconds, `nbytes` and `_bytes` bytes; losses are",
        "nats a token.\n",
        *table(
            ("event", "meaning", "fields"),
            (
                (f"`{event}`", kind.meaning, ", ".join(map("`{}`".format, kind.fields)))
                for event, kind in EVENTS.items()
            ),
        ),
    ]
    return "\n".join(lines) + "\n"


def exit_codes() -> str:
    """Every exit code, from the errors that have it."""
    meanings: dict[int, list[str]] = {0: ["Done, or left cleanly."]}
    for error in vars(errors).values():
        ours = isinstance(error, type) and issubclass(error, errors.SwarmnodeError) and "exit_code" in vars(error)
        if ours and error is not errors.SwarmnodeError:
            meanings.setdefault(error.exit_code, []).append((error.__doc__ or "").splitlines()[0])
    meanings |= {code: [meaning] for code, meaning in OTHER_CODES.items() if code not in meanings}
    lines = [
        MADE.format(source="swarmnode/base/errors.py"),
        "# Exit codes\n",
        "stdout is for data, stderr for words; an error is one line there that says what, where, and what to change.",
        "`SWARMNODE_DEBUG=1` shows where it came from.\n",
        *table(
            ("code", "meaning", "again?"),
            ((f"`{c}`", " ".join(meanings[c]), AGAIN.get(c, "")) for c in sorted(meanings)),
        ),
        "\nA service manager should start a node again after every code but those marked *no*, as `deploy/systemd` does.",
    ]
    return "\n".join(lines) + "\n"


OTHER_CODES = {
    30: "Preempted, and everything was brought home in time.",
    31: "Preempted, and time was too short for something; the log says what.",
    command_line.EXIT_INTERRUPTED: "Ended by Ctrl-C before there was anything to leave.",
    143: "Ended at once by a second SIGTERM (a second Ctrl-C: 130).",
}
AGAIN = dict.fromkeys((2, 10, 20, 30, 31, 74, 77, 78), "no") | dict.fromkeys((21, 69, 70, 75), "yes")


def manifest() -> str:
    """Every field of a manifest."""
    lines = [
        MADE.format(source="swarmnode/run/manifest/spec.py"),
        "# Manifest\n",
        "One training job, in TOML. Every field is optional. `swarmnode init` writes one with all of this as comments;",
        "once signed it is frozen, and its hash is the run's id. All mistakes in one are told at once. While the run",
        "trains, its owner can [amend some of it](run-a-swarm.md#change-a-run-under-way).",
    ]
    defaults = Manifest()
    for key in ("", *TABLES):
        rows = [field for field in FIELDS if field.table == key]
        if not rows:
            continue
        place = getattr(defaults, key) if key else defaults
        lines += ["", f"## [{key}]\n\n{TABLES[key]}\n" if key else ""]
        lines += table(
            ("field", "default", "allowed", "meaning", "the default is"),
            ((f"`{f.key}`", f"`{shown(getattr(place, f.key))}`", f.check.allowed, f.meaning, f.origin) for f in rows),
        )
    return "\n".join(lines) + "\n"


def shown(value: object) -> str:
    """`value` as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    return str(list(value)) if isinstance(value, tuple) else str(value)


def wire() -> str:
    """Every field that comes from another machine, and its range."""
    lines = [
        MADE.format(source="swarmnode/base/bounds/table.py"),
        "# What a message may hold\n",
        "A node believes no number, text or list that is out of its range: a record is neither believed nor stored, a call is",
        "refused, and its sender is told which field was wrong. The ranges are what is physically possible; they are the same in",
        "every run. What depends on how far a run has come (its samples, rounds and blocks) is bounded besides by what the",
        "machines that a node has seen at work can have trained. Fields that are *only shown* are made fit instead: texts are",
        "cut and their control characters replaced, numbers out of range are left out. NaN and infinity are in no range.",
    ]
    by_message: dict[str, list[tuple[str, Bound]]] = {}
    for field, bound in WIRE_FIELDS.items():
        by_message.setdefault(field.partition(".")[0], []).append((field.partition(".")[2], bound))
    for message, fields in by_message.items():
        lines += ["", f"## {message}\n"]
        lines += table(("field", "range", "because"), ((f"`{f}`", b.allowed(), b.why) for f, b in fields))
    return "\n".join(lines) + "\n"


def api() -> str:
    """Every name of `import swarmnode`, with its signature and docstring."""
    lines = [
        MADE.format(source="the docstrings of swarmnode's public names"),
        "# API reference\n",
        "The names of `import swarmnode`; [From Python](python.md) shows how they go together. Defaults of a scenario or of a",
        "plan are those of the verbs `simulate` and `plan`.",
    ]
    for public in sorted(swarmnode._PLACES, key=str.lower):
        value = getattr(swarmnode, public)
        lines += ["", f"## swarmnode.{public}\n"]
        if isinstance(value, dict):
            lines.append(f"A dictionary: {', '.join(f'`{key}`' for key in value)}.")
            continue
        lines += documented(public, value)
        for key, member in vars(value).items() if inspect.isclass(value) else ():
            if not key.startswith("_") and inspect.isfunction(member):
                lines += ["", f"### {public}.{key}\n", *documented(key, member)]
    return "\n".join(lines) + "\n"


def documented(called: str, value: Any) -> Iterator[str]:
    """Signature and docstring of a function or class."""
    signature = inspect.signature(value)
    parts = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        parts.append(re.sub(r": '([^']*)'", r": \1", str(parameter)).replace("mappingproxy({})", "{}"))
    returns = "" if inspect.isclass(value) else f" -> {signature.return_annotation!s}"
    line = f"{called}({', '.join(parts)}){returns}"
    if len(line) > CODE_COLUMNS:
        line = f"{called}(\n    " + ",\n    ".join(parts) + f",\n){returns}"
    yield f"```python\n{line}\n```\n"
    yield inspect.getdoc(value) or ""


def waiting() -> str:
    """Every cause of waiting, and what a person can do."""

    def says(text: str) -> str:
        return re.sub(r"\{(\w+)\}", r"*\1*", text)

    shown = (
        (cause.name, says(cause.says), cause.do, "no" if cause.stops else "yes") for cause in CAUSES if cause.panel
    )
    ends = ((cause.name, cause.says, cause.do, cause.told) for cause in CAUSES if not cause.panel)
    lines = [
        MADE.format(source="swarmnode/train/node/waiting.py"),
        "# Why a machine waits\n",
        "A machine that does not train says why, and what a person can do, within half a minute: on the panel of `join`, in",
        "`status` (the line `waits`), on the page of `ui`, on the machine's page of a coordinator, and as `waits` in",
        "`status --json`. What stops it stands first. A cause that comes and goes is one line, with how often it came. A",
        'machine is said to train only while work passes through it; before that, and when none comes, it is "ready".\n',
        "Words in italics are filled in. *Trains on* says whether the machine works meanwhile.\n",
        *table(("cause", "it waits, because", "what helps", "trains on"), shown),
        "\n## What `join` ends with, and pauses\n",
        *table(("cause", "because", "what helps", "where it is said"), ends),
        "\n[Exit codes](exit-codes.md) has all of them; `swarmnode doctor` looks for most of these before you join.",
    ]
    return "\n".join(lines) + "\n"


PAGES = {"api.md": api, "metrics.md": metrics, "exit-codes.md": exit_codes, "manifest.md": manifest, "wire.md": wire}
PAGES["waiting.md"] = waiting


END = "<!-- made until here -->"


def security() -> str:
    """The page on security, with its tables as the code has them: what a peer's words decide, and verdicts."""
    words = (
        (f"`{row.message}`: {', '.join(f'`{field}`' for field in row.fields)}", row.decides, row.bound, row.code)
        for row in WORDS
    )
    sizes = {(1, 2, 3): "any", (2, 3): "two and more", (2,): "two", (3,): "three and more"}
    weights = {None: "any", True: "those that answered, or a few steps later", False: "others"}
    verdicts = (
        (row.evidence.value, weights[row.comparable], sizes[row.stages], row.verdict.value, row.why) for row in VERDICTS
    )
    page = (HERE / "security.md").read_text()
    page = with_table(
        page, "net/membership/words.py", ("who says it", "what it decides", "what bounds it", "code"), words
    )
    heads = ("evidence about an answer", "weights that made it again", "replicas", "verdict on its server", "because")
    return with_table(page, "trust/verdict.py", heads, verdicts)


def with_table(page: str, source: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """`page` with the table that is made from `source` in its place."""
    begin = f"<!-- Made by docs/generate.py from swarmnode/{source} -->"
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(END)
    made = "\n".join(table(heads, rows))
    return f"{before}{begin}\n\n{made}\n\n{END}{after}"


PAGES["security.md"] = security


def llms() -> str:
    """The pages for language models, in the form of llmstxt.org: made of the table in docs/README.md."""
    rows = re.findall(r"^\| \[(.+?)\]\((.+?)\) \| (.+?) \|$", (HERE / "README.md").read_text(), re.MULTILINE)
    about = (
        "A volunteer runs `swarmnode join INVITE`; an organiser runs `swarmnode init`, `coordinator` and `invite`. Each"
        " verb has `--help`. `swarmnode doctor` says whether a machine can take part, `swarmnode status --json` what its"
        " node does."
    )
    lines = [
        "# swarmnode",
        "",
        "> A peer-to-peer daemon that trains large language models over the internet on machines nobody controls.",
        "",
        about,
        "",
        "## Pages",
        "",
        *(f"- [{title}]({path}): {what}" for title, path, what in rows),
        "",
    ]
    return "\n".join(lines)


PAGES["llms.txt"] = llms


def main(folder: Path) -> None:
    """Write every page below `folder`."""
    for page, make in PAGES.items():
        (folder / page).write_text(make())


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)

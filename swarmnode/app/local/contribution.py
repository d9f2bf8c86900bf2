"""The work that machines gave, added up over runs from signed receipts: a static page and a card to check.

Nothing here is central: a page is made of files of receipts, and each receipt is signed by the machine that the work
was done for. Whoever owns two keys can sign for the other one, and in a run of one stage a machine signs for itself:
the page counts such work apart.
"""

from __future__ import annotations

import datetime
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from swarmnode.base.atomic_file import atomic_write, write_errors
from swarmnode.base.errors import DataError, RemoteFault, cause_of
from swarmnode.base.untrusted_text import printable
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.net.membership.receipt import receipt_from_json, receipt_to_json

DAY_S = 86_400
WEEKS_SHOWN = 26  # half a year; guess
FILE_BYTES_MAX = 64 << 20  # derived: a quarter of a million receipts
PAGE = "index.html"
CARD = "card.svg"
RECEIPTS = "receipts.jsonl"


@dataclass(slots=True)
class GivenWork:
    """The work of one machine's key. `tokens` counts what others signed, `own` what it signed for itself. `runs` has
    the tokens of each run, `days` those of each day (Unix days, by a receipt's end)."""

    peer: str
    tokens: int = 0
    own: int = 0
    clients: set[str] = field(default_factory=set)
    runs: dict[str, int] = field(default_factory=dict)
    days: dict[int, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.tokens + self.own

    def add(self, receipt: wire.Receipt) -> None:
        """Count a verified receipt of this machine."""
        day = receipt.until_unix_s // DAY_S
        self.runs[receipt.run_id] = self.runs.get(receipt.run_id, 0) + receipt.tokens
        self.days[day] = self.days.get(day, 0) + receipt.tokens
        if receipt.client == self.peer:
            self.own += receipt.tokens
        else:
            self.tokens += receipt.tokens
            self.clients.add(receipt.client)

    def week(self, today: int) -> int:
        """Tokens of the seven days that end with `today`."""
        return sum(tokens for day, tokens in self.days.items() if today - 7 < day <= today)

    def streak(self, today: int) -> int:
        """Days in a row with work, up to today or yesterday."""
        day = today if today in self.days else today - 1
        length = 0
        while day in self.days:
            length += 1
            day -= 1
        return length


def given_works(receipts: Iterable[wire.Receipt]) -> list[GivenWork]:
    """The work of each machine in `receipts`, most first. Of several receipts of one client's life the newest counts,
    which holds the work of the older ones."""
    newest: dict[tuple[str, str, str, int], wire.Receipt] = {}
    for receipt in receipts:
        key = (receipt.server, receipt.run_id, receipt.client, receipt.from_unix_s)
        other = newest.get(key)
        if other is None or receipt.until_unix_s > other.until_unix_s:
            newest[key] = receipt
    found: dict[str, GivenWork] = {}
    for receipt in newest.values():
        found.setdefault(receipt.server, GivenWork(receipt.server)).add(receipt)
    return sorted(found.values(), key=lambda one: (-one.total, one.peer))


def read_file(path: Path) -> list[wire.Receipt]:
    """The receipts in a file of `receipts --json`, each verified. Raises DataError with the first line at fault."""
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {cause_of(error)}") from None
    if len(raw) > FILE_BYTES_MAX:
        raise DataError(f"{path}: longer than {FILE_BYTES_MAX} bytes: give several files")
    found = []
    for number, line in enumerate(raw.splitlines(), start=1):
        try:
            if line.strip():
                found.append(receipt_from_json(json.loads(line)))
        except (RemoteFault, ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number}: {error!s:.160}; leave it out, or have the file again") from None
    return found


def write_page(folder: Path, receipts: Sequence[wire.Receipt], names: Mapping[str, str], now_unix_s: float) -> Path:
    """Write the page, a card of the first machine and the receipts to `folder`; the page's path. `names` are those of
    machines, by key. Raises LocalFault, DiskFull."""
    found = given_works(receipts)
    today = int(now_unix_s) // DAY_S
    lines = "".join(json.dumps(receipt_to_json(receipt)) + "\n" for receipt in receipts)
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(folder / RECEIPTS, lines.encode())
        atomic_write(folder / PAGE, page(found, names, today).encode())
        if found:
            atomic_write(folder / CARD, card(found[0], names, today).encode())
    return folder / PAGE


def weekly(one: GivenWork, today: int) -> str:
    """A line on the last seven days: 1.2 M tokens this week, 3 days in a row, 14 M in all of 2 runs."""
    streak = one.streak(today)
    row = f", {streak} days in a row" if streak > 1 else ""
    runs = f"{len(one.runs)} run{'' if len(one.runs) == 1 else 's'}"
    return f"{amount(one.week(today))} tokens in seven days{row}; {amount(one.total)} in all, of {runs}"


def amount(count: float) -> str:
    """A count with three digits: 812, 4.2 k, 13 M."""
    for unit in ("", " k", " M", " G"):
        if count < 1000:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g} T"


def page(found: Sequence[GivenWork], names: Mapping[str, str], today: int) -> str:
    """One page of HTML without scripts: totals, weeks, and a row for each machine."""
    total = sum(one.total for one in found)
    runs = {run for one in found for run in one.runs}
    rows = "\n".join(_row(rank, one, names, today) for rank, one in enumerate(found, start=1))
    day = datetime.date.fromordinal(datetime.date(1970, 1, 1).toordinal() + today).isoformat()
    heading = _name(found[0], names) if len(found) == 1 else f"{len(found)} machines"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src 'self'">
<title>{heading} gave {amount(total)} tokens</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<p class="quiet">swarmnode, {day}</p>
<h1>{heading}</h1>
<p class="big"><b>{amount(total)}</b> tokens given to {len(runs)} run{"" if len(runs) == 1 else "s"}</p>
{weeks(found, today)}
<div class="scroll" tabindex="0" role="region" aria-label="Machines, a table">
<table>
<thead><tr><th scope="col">rank</th><th scope="col">machine</th><th scope="col">tokens that others signed for</th>
<th scope="col">signed by itself</th><th scope="col">signers</th><th scope="col">runs</th><th scope="col">this week</th>
<th scope="col">days in a row</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>
</div>
<p class="quiet">Every number is the sum of receipts that the machines signed which the work was done for; of a run of
one stage a machine signs for itself. A person with two keys can sign for the other: receipts are thanks, not money.
Check them: <code>swarmnode receipts --check {RECEIPTS}</code> with <a href="{RECEIPTS}">the receipts</a>.</p>
</main>
</body>
</html>
"""


STYLE = (
    ":root{color-scheme:light dark;--ink:#1c2230;--paper:#faf9f6;--muted:#5d6575;--line:#d9d5ca;--bar:#2f6fed}"
    "@media(prefers-color-scheme:dark){:root{--ink:#e8eaf0;--paper:#11141a;--muted:#9aa3b2;--line:#272d38;--bar:#7aa5ff}}"
    "body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif}"
    "main{max-width:960px;margin:0 auto;padding:28px 20px 60px}h1{font-size:30px;margin:4px 0}"
    ".big b{font-size:52px;letter-spacing:-.02em;margin-right:8px}.quiet{color:var(--muted);font-size:14px}"
    "svg{display:block;width:100%;height:120px;margin:18px 0}rect{fill:var(--bar)}.scroll{overflow-x:auto}"
    "table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}"
    "th,td{text-align:right;padding:7px 10px;border-top:1px solid var(--line)}th{font-weight:500;color:var(--muted)}"
    "th:nth-child(2),td:nth-child(2){text-align:left;white-space:nowrap}code{font-size:13px}a{color:inherit}"
)


def weeks(found: Sequence[GivenWork], today: int) -> str:
    """Bars of the last WEEKS_SHOWN weeks, of all machines together, the newest at the right."""
    sums = [0] * WEEKS_SHOWN
    for one in found:
        for day, tokens in one.days.items():
            age = (today - day) // 7
            if 0 <= age < WEEKS_SHOWN:
                sums[WEEKS_SHOWN - 1 - age] += tokens
    most = max(sums) or 1
    bars = "".join(
        f'<rect x="{12 * number}" y="{100 - 100 * value / most:.1f}" width="10" height="{100 * value / most:.1f}"/>'
        for number, value in enumerate(sums)
    )
    told = f"Tokens a week over {WEEKS_SHOWN} weeks; {amount(sums[-1])} in the last"
    shape = f'viewBox="0 0 {12 * WEEKS_SHOWN} 100" preserveAspectRatio="none"'
    return f'<svg {shape} role="img" aria-label="{told}">{bars}</svg>'


def card(one: GivenWork, names: Mapping[str, str], today: int) -> str:
    """A card of one machine as an SVG of 600 x 160, to be shown elsewhere."""
    name = _name(one, names)
    line = html.escape(weekly(one, today))
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 160" width="600" height="160" role="img"'
        f' aria-label="{name}: {line}" font-family="system-ui, sans-serif">'
        '<rect width="600" height="160" rx="14" fill="#11141a"/>'
        f'<text x="28" y="44" fill="#9aa3b2" font-size="18">{name}</text>'
        f'<text x="28" y="98" fill="#e8eaf0" font-size="46" font-weight="600">{amount(one.total)} tokens</text>'
        f'<text x="28" y="134" fill="#7aa5ff" font-size="15">{line}</text></svg>\n'
    )


def _row(rank: int, one: GivenWork, names: Mapping[str, str], today: int) -> str:
    cells = (
        str(rank),
        f'<span title="{html.escape(one.peer)}">{_name(one, names)}</span>',
        amount(one.tokens),
        amount(one.own),
        str(len(one.clients)),
        str(len(one.runs)),
        amount(one.week(today)),
        str(one.streak(today)),
    )
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _name(one: GivenWork, names: Mapping[str, str]) -> str:
    return html.escape(printable(names.get(one.peer) or f"machine {one.peer[-8:]}", 60))

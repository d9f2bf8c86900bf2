"""Receipts add up over runs to a page, a card and a weekly line; a receipt that nobody signed is told by its line."""

from __future__ import annotations

import asyncio
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest

from swarmnode.app.cli.main import main
from swarmnode.app.local.contribution import DAY_S, amount, given_works, page, weekly
from swarmnode.app.machine.receipt_store import Receipts
from swarmnode.base.identity import Identity
from swarmnode.base.ids import RunId
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.net.membership.receipt import WorkDone, receipt_to_json, sign_receipt

ME, CLIENT, OTHER = (Identity.of_seed(bytes([number]) * 32) for number in (1, 2, 3))
RUNS = (RunId("ab" * 32), RunId("cd" * 32))
TODAY = 20_000
HOSTILE = "<script>alert(1)</script>"


def receipt(
    day: int, tokens: int = 100, *, run: int = 0, client: Identity = CLIENT, server: Identity = ME, begun: int = 1
) -> wire.Receipt:
    done = WorkDone(1, min(10, tokens), tokens, tokens)
    return sign_receipt(client, RUNS[run], server.peer_id, done, begun, day * DAY_S + 5)


def test_receipts_add_up_over_runs_and_clients_and_the_newest_of_a_life_counts() -> None:
    given = [
        receipt(TODAY - 9, 50),
        receipt(TODAY - 8, 100),  # the same life, later: it holds the first one's work
        receipt(TODAY - 1, 30, begun=2),
        receipt(TODAY, 7, run=1),
        receipt(TODAY, 1000, client=ME, begun=3),
        receipt(TODAY - 3, 5000, server=OTHER),
    ]
    other, mine = given_works([*given, *given])
    assert (other.peer, other.total) == (OTHER.peer_id, 5000)
    assert (mine.tokens, mine.own, mine.clients) == (137, 1000, {CLIENT.peer_id})
    assert mine.runs == {RUNS[0]: 1130, RUNS[1]: 7}
    assert (mine.week(TODAY), mine.streak(TODAY), mine.streak(TODAY + 1), mine.streak(TODAY + 2)) == (1037, 2, 2, 0)
    assert weekly(mine, TODAY) == "1.04 k tokens in seven days, 2 days in a row; 1.14 k in all, of 2 runs"


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (812, "812"), (4210, "4.21 k"), (1.3e7, "13 M"), (2.5e12, "2.5 T")]
)
def test_counts_are_short(count: float, text: str) -> None:
    assert amount(count) == text


def home_with(folder: Path, receipts: Sequence[wire.Receipt]) -> Path:
    async def keep() -> None:
        kept = Receipts(folder)
        for one in receipts:
            await kept.keep(one)

    folder.mkdir()
    asyncio.run(keep())
    return folder


class Seen(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_of_a_team_is_checked_by_anybody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = home_with(tmp_path / "home", [receipt(TODAY), receipt(TODAY, run=1)])
    mate = tmp_path / "mate.jsonl"
    mate.write_text(json.dumps(receipt_to_json(receipt(TODAY, 900, server=OTHER))) + "\n")
    out = tmp_path / "page"
    assert main(["receipts", "--home", str(home), "--page", str(out), "--with", str(mate), "--name", HOSTILE]) == 0
    assert capsys.readouterr().out == f"{out / 'index.html'}\n"
    seen = Seen()
    seen.feed((out / "index.html").read_text())
    assert "script" not in seen.tags and HOSTILE in seen.text, "a name is text"
    assert seen.tags.count("tr") == 3 and "1.1 k tokens given to 2 runs" in " ".join(seen.text.split())
    ElementTree.parse(out / "card.svg")
    assert main(["receipts", "--check", str(out / "receipts.jsonl")]) == 0
    checked = capsys.readouterr().out
    assert f"{OTHER.peer_id}  " in checked and "900 in all" in checked and "200 in all, of 2 runs" in checked


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"tokens": 10**6}, "did not sign"),
        ({"server": str(OTHER.peer_id)}, "did not sign"),
        ({"tokens": "100"}, "no receipt"),
        ({"tokens": -1}, "no receipt"),
        ({"tokens": 1 << 70}, "no receipt"),
        ({"signature": "zz"}, "no receipt"),
        ({"run": 5}, "no receipt"),
        ({"more": 1}, "no receipt: other keys than a receipt's"),
        ({"client": "nobody"}, ""),
    ],
)
def test_a_line_that_nobody_signed_is_told_by_its_number(
    change: dict[str, object], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = receipt_to_json(receipt(TODAY))
    path = tmp_path / "receipts.jsonl"
    path.write_text(json.dumps(good) + "\n\n" + json.dumps(good | change) + "\n")
    assert main(["receipts", "--check", str(path)]) == 78
    error = capsys.readouterr().err
    assert f"{path}, line 3: " in error and told in error and error.count("\n") == 1


@pytest.mark.parametrize("raw", [b"[1]", b"{", b"\xff\xfe", b"null", b"[" * 100_000])
def test_a_file_of_something_else_is_told(raw: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x"
    path.write_bytes(raw)
    assert main(["receipts", "--check", str(path)]) == 78
    assert "line 1: " in capsys.readouterr().err


def test_a_machine_without_receipts_has_a_page_too(tmp_path: Path) -> None:
    assert main(["receipts", "--home", str(tmp_path), "--page", str(tmp_path / "out")]) == 0
    assert "0 machines" in page([], {}, TODAY)
    assert not (tmp_path / "out" / "card.svg").exists()

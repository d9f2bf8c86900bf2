"""The laws that logs can tell: each is kept by a good pair of logs, and broken by one changed line."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.swarm.laws import broken

A = "12D3KooWaaaaaaaa"
B = "12D3KooWbbbbbbbb"


def event(what: str, **fields: Any) -> dict[str, Any]:
    return {"event": what, "fields": fields}


def logs() -> dict[str, list[dict[str, Any]]]:
    return {
        A: [
            event("exchange.paired", round=1, peer=B),
            event("exchange.lone", round=2),
            event("state.served", peer=B, round=2),
            event("exchange.paired", round=4, peer=B),
            event("node.left"),
        ],
        B: [
            event("exchange.paired", round=1, peer=A),
            event("state.downloaded", peer=A, round=2),
            event("exchange.paired", round=4, peer=A),
            event("exchange.paired", round=5, peer="12D3KooWdeaddead"),  # killed before it could say
        ],
    }


def told(folder: Path, given: dict[str, list[dict[str, Any]]]) -> list[str]:
    homes = []
    for peer, events in given.items():
        home = folder / peer
        home.mkdir()
        times = [{"ts": f"2026-01-01T00:00:0{second}.000Z"} for second in range(len(events))]
        lines = [json.dumps({"stage": 0, **at, **each, "node": peer}) for at, each in zip(times, events, strict=True)]
        (home / "events.jsonl").write_text("\n".join(lines) + '\n{"event": "exchange.pa')  # torn by a kill
        homes.append(home)
    return broken(homes)


def test_kept(tmp_path: Path) -> None:
    assert told(tmp_path, logs()) == []


@pytest.mark.parametrize(
    ("peer", "index", "changed", "says"),
    [
        (A, 3, event("exchange.paired", round=2, peer=B), "was in round 2 after round 2"),
        (A, 4, event("node.left"), "went on after it had left: exchange.lone"),
        (B, 1, event("state.downloaded", peer=A, round=3), "loaded round 3 of"),
        (B, 1, event("peer.excluded", peer=A, reason="false"), "left out aaaaaaaa: false"),
        (B, 1, event("peer.left_out", peer=A, reason="3 of 4"), "left out aaaaaaaa: 3 of 4"),
        (B, 2, event("exchange.lone", round=4), "in round 4, which was alone"),
        (B, 2, event("exchange.paired", round=4, peer="12D3KooWcccccccc"), "in round 4, which paired with cccccccc"),
    ],
)
def test_broken(tmp_path: Path, peer: str, index: int, changed: dict[str, Any], says: str) -> None:
    given = logs()
    given[peer][index] = changed
    if changed["event"] == "node.left":
        given[peer].append(event("exchange.lone", round=9))
    found = told(tmp_path, given)
    assert len(found) == 1 and says in found[0], found


def test_a_log_on_a_full_disk_is_no_witness(tmp_path: Path) -> None:
    """It ends before what its node did later."""
    given = logs()
    given[B][1] = event("state.downloaded", peer=A, round=3)
    given[A] = given[A][:1]
    given[B][2:] = []
    assert told(tmp_path, given) == []


def test_a_round_counts_at_one_stage(tmp_path: Path) -> None:
    """Who moves may come to the new stage in the very round that is over at the old one."""
    given = logs()
    given[A].insert(4, {**event("exchange.lone", round=4), "stage": 1})
    assert told(tmp_path, given) == []


def test_a_replica_that_refused_its_partner_may_take_a_fallback(tmp_path: Path) -> None:
    """The partner steps with it all the same, and who stood in does not say so."""
    given = logs()
    given[B][2] = event("exchange.paired", round=4, peer="12D3KooWcccccccc", fallback=True)
    before = tmp_path / "before"
    before.mkdir()
    assert len(told(before, given)) == 1, "nobody said why"
    given[B].insert(2, event("exchange.refused", round=4, peer=A))
    assert told(tmp_path, given) == []


def test_a_lost_commit_may_differ(tmp_path: Path) -> None:
    given = logs()
    given[B][2] = event("exchange.lone", round=4)
    given[A].insert(3, event("exchange.onesided", round=4))
    assert told(tmp_path, given) == []

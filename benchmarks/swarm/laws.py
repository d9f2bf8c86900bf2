"""Invariants of node event logs, whatever the faults. They are checked after a run.

The simulator checks more while it runs (swarmsim/law.py); these are the laws that event logs can show.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from swarmnode.base.ids import PeerId, short

LOG_NAME = "events.jsonl"
Event = dict[str, Any]


def read_log(home: Path) -> list[Event]:
    """Events of one node, oldest first, without a last line cut short by a kill."""
    events: list[Event] = []
    for path in (home / f"{LOG_NAME}.1", home / LOG_NAME):
        events += read_lines(path)
    return events


def told(home: Path, event: str) -> list[dict[str, Any]]:
    """Fields of every `event` of one node, oldest first."""
    return [found["fields"] for found in read_log(home) if found["event"] == event]


def read_lines(path: Path) -> list[Event]:
    """JSON objects of `path`, one per line. A missing file gives none; a line cut short is skipped."""
    found: list[Event] = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def broken(homes: Sequence[Path]) -> list[str]:
    """Violations in the logs of the nodes in `homes`, one sentence each."""
    logs = [log for log in map(read_log, homes) if log]
    by_peer = {log[-1]["node"]: log for log in logs if log[-1]["node"]}
    found: list[str] = []
    for log in by_peer.values():
        found += (
            _rounds_in_order(log) + _nothing_after_the_end(log) + _state_as_given(log, by_peer) + _nobody_left_out(log)
        )
    return found + _pairs_agree(by_peer)


def _rounds_in_order(log: Sequence[Event]) -> list[str]:
    """A node is in one exchange at a time: its rounds only increase while it serves one stage."""
    rounds = [(e["stage"], e["fields"]["round"]) for e in log if e["event"] in ("exchange.paired", "exchange.lone")]
    return [f"{_who(log)} was in round {b} after round {a}" for (s, a), (t, b) in pairwise(rounds) if s == t and b <= a]


def _nothing_after_the_end(log: Sequence[Event]) -> list[str]:
    names = [event["event"] for event in log]
    if "node.left" not in names:
        return []
    after = [each for each in names[names.index("node.left") + 1 :] if each.split(".")[0] in ("exchange", "microbatch")]
    return [f"{_who(log)} went on after it had left: {', '.join(after)}"] if after else []


def _state_as_given(log: Sequence[Event], by_peer: dict[str, list[Event]]) -> list[str]:
    """Check that a newcomer loaded the state its donor logged: the same stage at the same round. A donor whose log ends
    earlier may have had a full disk, on which its log cannot grow either."""
    found = []
    for event in log:
        if event["event"] == "state.downloaded" and (donor := by_peer.get(event["fields"]["peer"])) is not None:
            if donor[-1]["ts"] < event["ts"]:
                continue
            given = [e["fields"]["round"] for e in donor if e["event"] == "state.served"]
            if event["fields"]["round"] not in given:
                found.append(
                    f"{_who(log)} loaded round {event['fields']['round']} of {_who(donor)}, which gave {given}"
                )
    return found


def _nobody_left_out(log: Sequence[Event]) -> list[str]:
    """No node is excluded for its packets or answers, nor called a forger, since all nodes of the run are honest."""
    told = [event["fields"] for event in log if event["event"] in ("peer.left_out", "peer.excluded")]
    found = [f"{_who(log)} left out {short(PeerId(each['peer']))}: {each['reason']}" for each in told]
    return found + [f"{_who(log)} calls a peer a forger: {reason}" for reason in called_forged(log)]


def called_forged(log: Sequence[Event]) -> list[str]:
    """The reasons in one node's events by which something of a peer is forged."""
    reasons = [str(event["fields"].get("reason", "")) for event in log]
    return [reason for reason in reasons if "is forged" in reason]


def _pairs_agree(by_peer: dict[str, list[Event]]) -> list[str]:
    """Two replicas that step together agree on it in the round. Exceptions are a lost commit, a packet that was not
    believed, and one given by a stand-in."""
    met: dict[tuple[str, str, int], set[str]] = {}
    for peer, log in by_peer.items():
        for event in log:
            fields = event["fields"]
            if event["event"] == "exchange.paired" and not fields.get("fallback"):
                met.setdefault((peer, event["stage"], fields["round"]), set()).add(fields["peer"])
            elif event["event"] == "exchange.group":
                met.setdefault((peer, event["stage"], fields["round"]), set()).update(fields["peers"])
    finished = {
        (peer, event["stage"], event["fields"]["round"])
        for peer, log in by_peer.items()
        for event in log
        if event["event"] in ("exchange.paired", "exchange.lone")
    }
    refused = {
        (peer, event["stage"], event["fields"]["round"])
        for peer, log in by_peer.items()
        for event in log
        if event["event"] == "exchange.refused"
    }
    found = []
    for (peer, stage, round_index), other in ((key, other) for key, others in met.items() for other in sorted(others)):
        theirs = met.get((other, stage, round_index), set())
        if peer in theirs or (other, stage, round_index) not in finished:
            continue  # they agree, or the partner was killed before it logged the step
        if (other, stage, round_index) in refused:
            continue  # it refused the packet (gossip.acceptance)
        if _lost_a_commit(by_peer[peer], round_index):
            continue
        said = "paired with " + ", ".join(short(PeerId(one)) for one in sorted(theirs)) if theirs else "was alone"
        found.append(f"{short(PeerId(peer))} paired with {short(PeerId(other))} in round {round_index}, which {said}")
    return found


def _lost_a_commit(log: Sequence[Event], round_index: int) -> bool:
    return any(e["event"] == "exchange.onesided" and e["fields"]["round"] == round_index for e in log)


def _who(log: Sequence[Event]) -> str:
    return short(log[-1]["node"])

"""Stuck is never silent: each row of the table of causes is brought about, and read from the panel that a person sees.

The rows of the swarm are villages in virtual time; those of one machine are the part of the product that says so.
"""

import asyncio
import io
import string
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.memory_network import MemoryDirectory
from swarmnode.app.daemon import reachability
from swarmnode.app.daemon.control_api import peers_of, waiting_at
from swarmnode.app.local.swarm_view import NodeWatch, panel, trains
from swarmnode.base.metrics.event import EVENTS
from swarmnode.base.wire.record_pb2 import (
    NODE_STATE_JOINING,
    NODE_STATE_PAUSED,
    NODE_STATE_SYNCING,
    NODE_STATE_TRAINING,
    NodeState,
)
from swarmnode.base.wire.report_pb2 import StatusReply, Wait
from swarmnode.net.transport.reachability import Reachability
from swarmnode.train.node.waiting import BY_NAME, CALM_S, CAUSES, FLAP_S, PRIVATE, Place, Waits
from tests.node.test_data_set import meeting_point, on, text, volunteer
from tests.support.fake_telemetry import Quiet
from tests.support.village import Village, Villager, manifest, village

BOUND_S = 30.0  # of the issue: whoever waits is told so within it


def shown(status: StatusReply) -> str:
    """The panel, on one line."""
    watch = NodeWatch()
    watch.add(0.0, status)
    console = Console(width=200, file=io.StringIO(), force_terminal=False)
    console.print(panel(watch))
    assert isinstance(console.file, io.StringIO)
    return " ".join(console.file.getvalue().split())


class Watched:
    """A villager's panel, from its events and what it sees, as its daemon makes it."""

    def __init__(self, v: Village, person: Villager) -> None:
        self.stages = v.run.pipeline.stages
        self.person = person
        self.heard = 0
        self.waits = Waits(asyncio.get_running_loop().time)

    def status(self) -> StatusReply:
        events = self.person.quiet.events
        for event, fields in events[self.heard :]:
            self.waits.hear(event, fields)
        self.heard = len(events)
        node = self.person.node
        now_s = asyncio.get_running_loop().time()
        status = StatusReply(run_name="village", stage=node.stage or 0, stages=self.stages, state=node.state)
        status.given_tokens_per_second = node.stage_status().given_tokens_per_second
        status.peers.extend(peers_of(node, now_s))
        status.waits.extend(waiting_at(status, self.waits, now_s))
        return status

    def says(self, text: str) -> Callable[[], bool]:
        return lambda: text in shown(self.status())


async def test_a_stage_without_a_machine_and_one_that_sleeps() -> None:
    async with village(manifest(2), stages=(0,)) as v:
        alone = Watched(v, v.people[0])
        await v.until(alone.says("until a machine serves stage 2. What helps: invite more machines"), "told", BOUND_S)
        assert not trains(alone.status()), "nothing has passed through it"
        other = v.add(1)
        await v.fed(64)
        assert trains(alone.status()) and "What helps" not in shown(alone.status())
        await other.node.pause_control.apply(False, "snoozed")
        await v.until(alone.says("stage 2 sleeps"), "told", BOUND_S)
        await other.node.pause_control.apply(True, "resumed")
        await v.trains(64, "it goes on")
        await v.until(lambda: trains(alone.status()), "and says so", CALM_S + BOUND_S)


async def test_a_machine_that_is_ready_says_that_no_work_came() -> None:
    async with village(manifest(2), stages=(1,)) as v:
        last = Watched(v, v.people[0])
        await v.until(lambda: v.people[0].node.state == NODE_STATE_TRAINING, "it is ready")
        feeder = v.add(0)
        await v.until(last.says("no work passes through it"), "told before the first microbatch", BOUND_S)
        await v.fed(64)
        assert trains(last.status())
        await feeder.die()
        await v.until(lambda: not trains(last.status()), "a dead feeder is missed", 2 * BOUND_S)


async def test_a_newcomer_says_that_it_fetches_weights_and_waits_for_a_round() -> None:
    async with village(manifest(), stages=(0, 1, 2)) as v:
        await v.heard(64)
        late = Watched(v, v.add(1))
        seen = set[str]()

        def served() -> bool:
            seen.update(wait.cause for wait in late.status().waits)
            return trains(late.status())

        await v.until(served, "it trains")
        assert seen >= {"weights", "round"} or seen >= {"download", "round"}, seen


async def test_a_machine_without_text_says_that_it_does_not_feed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmnode.train.node.run_text.LOOK_S", 0.3)
    monkeypatch.setattr("swarmnode.train.node.run_text.AGAIN_S", 0.3)
    async with village(on(text(tmp_path))) as v:
        alone = Watched(v, v.add(None, data=volunteer(v, tmp_path / "cache")))
        await v.until(alone.says("this machine does not feed the run: "), "told", BOUND_S)
        await meeting_point(v, tmp_path)
        told = alone.says("this machine does not feed")
        await v.until(lambda: not told(), "it is over once somebody gives the text", CALM_S + BOUND_S)


async def test_a_feeder_says_that_its_text_is_nowhere(tmp_path: Path) -> None:
    index = text(tmp_path)
    async with village(on(index)) as v:
        point, _ = await meeting_point(v, tmp_path)
        people = [v.add(stage, data=volunteer(v, tmp_path / f"cache-{stage}")) for stage in (0, 1)]
        feeder = Watched(v, people[0])
        await v.until(lambda: people[0].fed > 8, "it feeds")
        await point.close()
        await v.until(feeder.says("it waits for the run's text or model: "), "told", 4 * BOUND_S)


async def test_a_joiner_says_that_its_stage_is_not_here_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    async def claimed(_: MemoryDirectory) -> int:
        return 2422

    monkeypatch.setattr(MemoryDirectory, "claimed", claimed)
    async with village(manifest()) as v:
        joiner = Watched(v, v.add(0))
        await v.until(joiner.says("the state of its stage is not here yet: "), "told", BOUND_S)


Happening = tuple[str, dict[str, object]]


def heard(*events: Happening) -> StatusReply:
    """What a node that trains shows after `events`."""
    waits = Waits(lambda: 0.0)
    for event, fields in events:
        assert set(fields) <= set(EVENTS[event].fields) | {"peer", "why"}
        waits.hear(event, fields)
    joins = next((cause.joins for cause in CAUSES for event, _ in events[:1] if event in cause.begins), False)
    state = NODE_STATE_JOINING if joins else NODE_STATE_TRAINING
    found = waits.now(Place(state, tokens_per_second=100.0))
    told = [Wait(cause=one.cause.name, says=one.says, can_do=one.cause.do, stops=one.cause.stops) for one in found]
    return StatusReply(run_name="one", stages=1, state=state, waits=told)


ROWS: dict[str, tuple[str, dict[str, object], str]] = {
    "meeting point": (
        "bootstrap.unreachable",
        {"peer": "abcd", "why": "refused"},
        "meeting point abcd does not answer",
    ),
    "network program": ("p2pd.died", {"exit_code": 2}, "p2pd died"),
    "text": ("data.waiting", {"chunk": 3, "reason": "nobody is known who has it"}, "waits for the run's text"),
    "no text here": ("data.refused", {"reason": "another text"}, "does not feed the run: another text"),
    "queue": ("state.waiting", {"stage": 1, "donors": 2, "reason": "busy"}, "the 2 machines that could give it"),
    "download": ("state.download", {"chunks": 3, "of": 9, "nbytes": 4_000_000}, "3 of 9 chunks of 4.0 MB"),
    "lost stage": ("recovery.waiting", {"stage": 1, "reason": "12D3…abcd comes back"}, "not here yet: 12D3…abcd"),
    "next stage": ("microbatch.lost", {"reason": "all are busy", "block": 1}, "took its work (all are busy)"),
    "line": ("round.stride", {"stride": 4, "before": 1, "reason": "12 MB each 3 s"}, "takes part in one of 4 (12 MB"),
    "processor": ("processor.taken", {"share": 97}, "have this machine's processor: it waits for 97 %"),
    "disk": ("state.unsaved", {"reason": "no space left"}, "does not take what this machine keeps (no space left)"),
}
OVER: dict[str, Happening] = {
    "meeting point": ("bootstrap.connected", {"peer": "abcd"}),
    "network program": ("p2pd.restarted", {"p2pd": 1}),
    "text": ("data.block", {"block": 1}),
    "no text here": ("data.opened", {}),
    "queue": ("state.donor", {"peer": "abcd"}),
    "download": ("state.downloaded", {"peer": "abcd"}),
    "lost stage": ("recovery.done", {"stage": 1}),
    "line": ("round.stride", {"stride": 1, "before": 4, "reason": "faster"}),
    "processor": ("processor.given", {}),
    "disk": ("state.saved", {}),
}


@pytest.mark.parametrize("cause", ROWS)
def test_a_cause_of_this_machine_is_on_the_panel_until_it_is_over(cause: str) -> None:
    event, fields, words = ROWS[cause]
    status = heard((event, fields))
    assert words in shown(status) and "What helps: " in shown(status)
    assert trains(status) is not next(one for one in CAUSES if one.name == cause).stops
    if cause in OVER:
        assert words not in shown(heard((event, fields), OVER[cause]))


async def test_a_port_that_is_shut_and_no_relay() -> None:
    for reach, words in ((Reachability.RELAYED, "reached through a relay"), (Reachability.PRIVATE, "no meeting point")):
        quiet = Quiet()
        reachability._tell(reach, "2 of 2 could not connect", quiet)
        assert "(2 of 2 could not connect)" in (text := shown(heard(*quiet.events))) and words in text
        reachability._tell(Reachability.PUBLIC, "2 of 2 connected", quiet)
        assert "What helps" not in shown(heard(*quiet.events))


def test_two_meeting_points_are_away_until_both_are_back() -> None:
    away: list[Happening] = [("bootstrap.unreachable", {"peer": one, "why": "refused"}) for one in ("a", "b")]
    one_back: Happening = ("bootstrap.connected", {"peer": "a"})
    assert "meeting point" in shown(heard(*away, one_back))
    assert "meeting point" not in shown(heard(*away, one_back, ("bootstrap.connected", {"peer": "b"})))


def test_what_comes_and_goes_is_one_line_that_stays() -> None:
    now = [0.0]
    waits = Waits(lambda: now[0])
    place = Place(NODE_STATE_TRAINING, tokens_per_second=1.0)
    for _ in range(5):
        waits.hear("bootstrap.unreachable", {"peer": "a", "why": "refused"})
        assert [one.cause.name for one in waits.now(place)] == ["meeting point"]
        now[0] += 2.0
        waits.hear("bootstrap.connected", {"peer": "a"})
        now[0] += 2.0
    (one,) = waits.now(place)
    assert one.since_s == 0.0 and one.says.endswith("(5 times in 20 s)"), "it does not blink"
    now[0] += CALM_S
    assert not waits.now(place)
    now[0] += FLAP_S
    waits.hear("bootstrap.unreachable", {"peer": "a", "why": "refused"})
    assert "times" not in waits.now(place)[0].says, "that was long ago"


@pytest.mark.parametrize("state", [NODE_STATE_JOINING, NODE_STATE_SYNCING, NODE_STATE_PAUSED])
def test_what_stops_a_node_comes_first(state: NodeState) -> None:
    waits = Waits(lambda: 0.0)
    waits.hear("state.unsaved", {"reason": "full"})
    waits.hear("recovery.waiting", {"stage": 1, "reason": "its machine sleeps"})
    found = [one.cause.stops for one in waits.now(Place(state, [1]))]
    assert found == sorted(found, reverse=True) and len(found) >= 2


def test_a_machine_that_trains_does_not_wait_for_what_it_fetches_for_its_neighbours() -> None:
    waits = Waits(lambda: 0.0)
    waits.hear("state.download", {"stage": 1, "chunks": 1, "of": 3, "nbytes": 4_000_000})
    waits.hear("state.waiting", {"stage": 1, "donors": 2, "reason": "busy"})
    assert not waits.now(Place(NODE_STATE_TRAINING, tokens_per_second=1.0))
    found = {one.cause.name for one in waits.now(Place(NODE_STATE_JOINING))}
    assert found == {"download", "queue"}


def test_others_are_told_of_no_folder_of_this_machine() -> None:
    told = {name: BY_NAME[name].public for name in PRIVATE}
    assert told["disk"] == "the disk does not take what this machine keeps: it trains on"
    assert told["no text here"] == "this machine does not feed the run"


def test_the_table_is_whole() -> None:
    assert len({cause.name for cause in CAUSES}) == len(CAUSES)
    for cause in CAUSES:
        assert cause.do and cause.says
        for event in (*cause.begins, *cause.ends):
            assert event in EVENTS, f"{cause.name}: {event}"
        named = {part for _, part, _, _ in string.Formatter().parse(cause.says) if part} - {"size", "stages"}
        known = [set(EVENTS[event].fields) for event in cause.begins]
        assert not named or all(named <= fields for fields in known), f"{cause.name} names {named} of {known}"
        assert not cause.panel or cause.begins or cause.name in DERIVED
    assert set(ROWS) | DERIVED | {"port", "no relay"} == {cause.name for cause in CAUSES if cause.panel}


DERIVED = {"weights", "round", "stage", "asleep", "work", "first work"}

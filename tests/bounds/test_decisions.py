"""No message that passes its check makes a decision raise, loop or allocate beyond a bound, whatever its numbers.

Messages are made from the table of bounds. Work is counted in lines of ours that run, not in time.
"""

import contextlib
import json
import math
import sys
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from types import FrameType
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.memory_network import MemoryNetwork, MemoryTransport
from swarmnode.app.dashboard import alarm, view
from swarmnode.app.dashboard.board import Board
from swarmnode.base import bounds
from swarmnode.base.errors import RemoteFault
from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId, RunId, seeded
from swarmnode.base.wire import call_pb2, record_pb2, report_pb2
from swarmnode.data.blocks import AHEAD_MAX, BlockLedger
from swarmnode.keep.recovery.neighbour_backup import renewal
from swarmnode.keep.recovery.recovery_source import (
    RecoveryClaims,
    RecoverySource,
    RecoveryView,
    StateSource,
    choose_source,
    donors_of,
    first_builder,
    keeps,
    latest,
    overdue,
    quiet,
    silent,
)
from swarmnode.keep.transfer.snapshot import StateSlice, check_offer
from swarmnode.model.optimizer import learning_rate
from swarmnode.model.split import costs
from swarmnode.net.membership.clock import RunClock
from swarmnode.net.membership.peer_table import PeerTable
from swarmnode.net.membership.progress import Progress
from swarmnode.net.membership.swarm import Member, Swarm
from swarmnode.run.manifest import Manifest, ModelSpec, PipelineSpec
from swarmnode.train.gossip.acceptance import Acceptance
from swarmnode.train.gossip.final_delta import FinalDeltas
from swarmnode.train.gossip.pairing import partners
from swarmnode.train.gossip.round import RoundPace, Rounds
from swarmnode.train.node.stage_catch_up import ready_to_serve
from swarmnode.train.pipeline.believed_rate import allowed_samples_per_s
from swarmnode.train.pipeline.microbatch_size import window_limit
from swarmnode.train.pipeline.rebalance import (
    RebalanceRules,
    choose_stage,
    load,
    on_the_way,
    plan_move,
    staying,
    still_good,
)
from swarmnode.train.pipeline.route import Router
from tests.support.fake_telemetry import Quiet
from tests.support.messages import messages
from tests.support.stage_context import stage_context

RUN = RunId("ab" * 32)
NOW = 1.75e9
STAGES = 4
TINY = ModelSpec(layers=4, width=32, heads=4, kv_heads=2, ffn=48, context=16, vocabulary=50)
MANIFEST = Manifest(model=TINY, pipeline=PipelineSpec(stages=STAGES))
LINES_MAX = 200_000  # of ours, for all decisions about a dozen members; typical: a tenth
NBYTES_MAX = 4 << 20
ME = PeerId("member00")
SETTINGS = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


@contextlib.contextmanager
def within_bounds() -> Iterator[None]:
    """AssertionError for more than LINES_MAX lines of ours, or NBYTES_MAX bytes at once."""
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if "/swarmnode/" not in frame.f_code.co_filename:
            return None
        lines += 1
        assert lines < LINES_MAX, f"no end in {frame.f_code.co_name}"
        return trace

    before = sys.gettrace()
    tracemalloc.start()
    sys.settrace(trace)
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < NBYTES_MAX
    finally:
        sys.settrace(before)
        tracemalloc.stop()


@st.composite
def fleets(draw: st.DrawFn) -> list[record_pb2.Record]:
    """Records of up to a dozen members, mostly of stages that there are."""
    found = draw(st.lists(messages(record_pb2.Record), min_size=1, max_size=12))
    for number, record in enumerate(found):
        record.peer_id = f"member{number:02}"
        record.stage = draw(st.sampled_from([0, 1, 2, 3, record.stage]))
        record.state = draw(st.sampled_from([3, 3, 3, 1, 2, 4, 10]))  # type: ignore[assignment]
        if record.moving_to >= STAGES and draw(st.booleans()):
            record.moving_to %= STAGES
        del record.progress.feeders[:], record.progress.samples[:]
        bounds.check(record)
    return found


def members_of(records: Sequence[record_pb2.Record]) -> list[Member]:
    return [Member.of(record) for record in records]


@given(fleets(), st.integers(0, 2**53))
@SETTINGS
def test_decisions_about_members(records: list[record_pb2.Record], total: int) -> None:
    members = members_of(records)
    rules = RebalanceRules(1.1, 2)
    shares = costs(MANIFEST)
    with within_bounds():
        peer_table = PeerTable(STAGES)
        peer_table.attend(1)
        for record in records:
            peer_table.learn(record)
        peer_table.swarm(), peer_table.expire(NOW), peer_table.serving(), peer_table.counts()
        swarm = Swarm.of(members, STAGES)
        now = load(swarm, shares)
        assert all(math.isfinite(value) for value in now.capacity)
        choose_stage(staying(swarm, NOW), shares, rules, seeded("choose"), members[0].unable)
        move, _ = plan_move(swarm, shares, rules, ME)
        if move is not None:
            still_good(swarm, shares, move, rules)
            assert math.isfinite(move.worth)
        on_the_way(swarm)
        window_limit(MANIFEST, swarm.sizes, len(swarm.feeders()), 8)
        for stage in range(STAGES):
            here = swarm.stages[stage]
            peers = [m.peer for m in here]
            keeps(swarm, stage, RUN, 2, ME), donors_of(swarm, stage, ME), first_builder(here, peers, ME)
            RecoveryClaims(MANIFEST.limits, 0).builder(here, peers, ME, NOW)
            overdue(here, NOW, MANIFEST.limits), quiet(here, NOW, MANIFEST.limits)
            silent(here, (), NOW, MANIFEST.limits)
            renewal(swarm, stage, ME, RUN, MANIFEST.recovery, total // 64)
            ready_to_serve(swarm, stage, ME, received=False, waited_s=1.0, round_in_s=1.0)
            meeting = [m.peer for m in here if not (total // 64) % m.round_stride]
            partners(RUN, stage, total // 64, meeting, ME, 2), partners(RUN, stage, total // 64, meeting, ME, 4)
            kept = [(m.kept_samples / 64, m.peer) for m in here if m.kept_round is not None]
            snapshots = tuple(latest(kept, total // 64 + 1))
            assert all(at <= total // 64 + 1 for at, _ in snapshots)
            copies = tuple(StateSource(RecoverySource.RING, at, peer) for at, peer in snapshots)
            choose_source(
                RecoveryView(stage, STAGES, total, total // 64, sources=copies, waited_s=5.0), MANIFEST.recovery
            )
        clock = RunClock(256, 4.0)
        own = replace(members[0], stage=members[0].stage % STAGES)
        clock.suppose(swarm, [m.peer for m in members])
        for member in members:
            clock.history.record_work(member.peer)
        known = {m.peer: m for m in members}
        for step in range(3):
            found = clock.look(NOW + step, total, {**known, ME: own}.get, STAGES, ME)
            assert math.isfinite(found.top) and found.top >= total
            assert found.top < 2**80


@given(fleets(), st.lists(st.floats(0.0, 1e5), max_size=20))
@SETTINGS
def test_routing(records: list[record_pb2.Record], seconds: list[float]) -> None:
    serving = [m for m in members_of(records) if m.state == record_pb2.NODE_STATE_TRAINING]
    with within_bounds():
        router = Router(seeded("route"), 0.1, 8)
        router.update(serving)
        for at, took in enumerate(seconds):
            peer, _ = router.choose(float(at), 8)
            if peer is None:
                router.ready_in_s(float(at))
                continue
            router.record_answer(peer, 8, took, took / 2)
            assert math.isfinite(router.seconds(peer, 8)) and math.isfinite(router.runtime(peer))
            if at % 5 == 4:
                router.ban(peer, float(at))
                router.overdue(float(at) + 1e6)
        router.due(0.0, 8), router.pausing(0.0, 8)


@given(messages(record_pb2.Progress), messages(record_pb2.Progress), st.integers(0, 2**53))
@SETTINGS
def test_counting(one: record_pb2.Progress, other: record_pb2.Progress, top: int) -> None:
    for message in (one, other):  # of feeders; the floor is a word of its own
        del message.samples[len(message.feeders) :], message.feeders[len(message.samples) :]
    with within_bounds():
        ours = Progress(entries_max=64)
        ours.believe_up_to(top)
        for message in (one, other, one):
            with contextlib.suppress(RemoteFault):
                ours.merge_wire(message)
            assert ours.total <= top
        ours.news(0), ours.to_wire(), ours.entry(ME)


@given(st.lists(messages(record_pb2.Blocks), max_size=4), st.integers(0, 2**53))
@SETTINGS
def test_blocks(told: list[record_pb2.Blocks], most: int) -> None:
    others = [PeerId(f"feeder{number}") for number in range(len(told))]
    with within_bounds():
        ledger = BlockLedger(ME, 7)
        ledger.merge_all(dict(zip(others, told, strict=True)), most)
        assert ledger.frontier <= most + 1024
        for _ in range(3):
            block, _ = ledger.take(others)
            assert block < most + 1024 + 64 * AHEAD_MAX
            ledger.finish(block)
        ledger.record(), ledger.finished()


@given(st.integers(0, 2**53), st.integers(0, 2**53), st.sampled_from([1, 2, 64, 1024]), st.floats(0.0, 1e9))
@SETTINGS
def test_rounds(total: int, sent: int, stride: int, rate: float) -> None:
    with within_bounds():
        rounds = Rounds(MANIFEST.gossip.round_samples)
        inner = MANIFEST.inner
        rounds.left(total, stride), rounds.newest(total, stride)
        found, _ = rounds.stride(rate, 1.0, stride)
        assert 1 <= found <= bounds.STRIDE_MAX
        assert math.isfinite(learning_rate(inner, total))
        pace = RoundPace()
        for at in range(4):
            pace.boundary(float(at), total * at, sent)
            pace.exchanged(1.0, sent)
        pace.needed_s(0.5), pace.seconds(total)


@given(messages(record_pb2.Allowance), messages(call_pb2.SnapshotRequest), messages(call_pb2.Snapshot))
@SETTINGS
def test_limits_and_snapshots(
    allowance: record_pb2.Allowance, asked: call_pb2.SnapshotRequest, offer: call_pb2.Snapshot
) -> None:
    with within_bounds():
        assert allowed_samples_per_s(MANIFEST, 1, 10.0, allowance) <= 10.0
        with contextlib.suppress(RemoteFault):
            StateSlice.of(asked).sizes({"phi": 10_000})
        with contextlib.suppress(RemoteFault):
            check_offer(offer, stage=offer.stage, sizes={"phi": 10_000}, nbytes_max=1 << 36)


@given(messages(call_pb2.FinalDelta), st.integers(0, 2**53))
@SETTINGS
def test_final_deltas_of_any_form(said: call_pb2.FinalDelta, due: int) -> None:
    with within_bounds():
        identity = Identity.of_seed(b"1" * 32)
        quiet = Quiet()
        transport = MemoryTransport(MemoryNetwork(), identity.peer_id, RUN, telemetry=quiet)
        here = stage_context(MANIFEST, 1, RUN, transport=transport, identity=identity, telemetry=quiet)
        acceptance = Acceptance(here)
        final_deltas = FinalDeltas(here, lambda: due, acceptance)
        final_deltas.take(said.round, said.samples)


@given(fleets(), messages(report_pb2.Report))
@SETTINGS
def test_the_page(records: list[record_pb2.Record], report: report_pb2.Report) -> None:
    bounds.check(report)
    with within_bounds():
        board = Board(MANIFEST, RUN)
        for record in records:
            board.observe_record(record, NOW)
        board.reported(ME, report, NOW, 0.01)
        board.settle(NOW)
        board.expire(NOW)
        board.take_changes()
        shown = [view.summary(board, NOW), view.contributors(board), view.links(board), view.recent_rounds(board)]
        shown += [view.node_detail(board, node, NOW, private=True) for node in board.nodes.values()]
        shown += [[asdict(one) for one in alarm.alarms(view.health(board, [], NOW))]]
        assert len(json.dumps(shown, allow_nan=False)) < 1 << 20

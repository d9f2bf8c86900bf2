"""`swarmnode plan --search`: the settings found are the best by the formula of `swarmnode plan`."""

import dataclasses
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from swarmnode.app.cli.main import main
from swarmnode.app.planner.fitted import fitted, rate_factor, steps_compared
from swarmnode.app.planner.fleet import MachineKind, read_fleet
from swarmnode.app.planner.geography import Address
from swarmnode.app.planner.learning_efficiency import LAW_B, LAW_BETA, boundary_nats, of_delay, worth
from swarmnode.app.planner.plan import ALIKE, in_flight_needed, plan, step_exchange_s
from swarmnode.app.planner.plan_search import limit_of, search, together, with_values
from swarmnode.app.planner.stage_memory import fit_of
from swarmnode.base.errors import UsageError
from swarmnode.run.manifest import DataSpec, InnerSpec, Manifest, ModelSpec, PipelineSpec, template
from swarmnode.run.manifest.cross_field import ACROSS
from swarmnode.run.manifest.recipe import PRESETS, fit

RUN = Manifest(
    model=ModelSpec(layers=4, width=1024, heads=8, kv_heads=4, ffn=2816, context=128),
    pipeline=PipelineSpec(stages=2),
    inner=InnerSpec(inner_batch=32),
    gossip=replace(Manifest().gossip, round_samples=64),
)
PLENTY = replace(  # the samples in flight are no limit
    RUN, inner=replace(RUN.inner, inner_batch=1024), gossip=replace(RUN.gossip, round_samples=1024)
)
SMALL_GB = 1.1
LARGE_GB = 8.0
TOKENS = 1e9
DAY_LOST_H = 0.5
BILLION = ModelSpec(layers=8, width=4096, heads=32, kv_heads=8, ffn=14336, context=2048, vocabulary=256)


def card(
    name: str = "card",
    count: int = 8,
    *,
    memory_gb: float = LARGE_GB,
    flops: float = 1e12,
    mbps: float = 1000.0,
    price: float = 0.0,
    egress_price: float = 0.0,
    life_h: float = 1e6,
) -> MachineKind:
    line = mbps * 1e6 / 8
    return MachineKind(
        name,
        count,
        flops,
        line,
        line,
        Address("eu", 0.0),
        life_h=life_h,
        memory_gb=memory_gb,
        host_gb=16.0,
        price=price,
        egress_price=egress_price,
    )


def cut(stages: int, manifest: Manifest = RUN) -> Manifest:
    return replace(manifest, pipeline=replace(manifest.pipeline, stages=stages))


FLEETS = {
    "fast lines": (card(),),
    "slow lines": (card(mbps=2.0),),
    "small": (card(memory_gb=SMALL_GB),),
    "mixed": (card("large", 3, mbps=50.0), card("small", 6, memory_gb=SMALL_GB, mbps=20.0, flops=3e11)),
    "few": (card(count=3),),
    "far": (replace(card(mbps=1e4), address=Address("asia", 0.5)), card("near", 4, flops=2e12)),
    "dying": (card(count=12, mbps=20.0, life_h=DAY_LOST_H),),
}


# Each push has fleets whose limits differ: lines, memory, machines unlike each other, machines that go.
EACH_PUSH = ("slow lines", "small", "mixed", "dying")
FLEET_NAMES = [name if name in EACH_PUSH else pytest.param(name, marks=pytest.mark.nightly) for name in FLEETS]


@pytest.mark.parametrize("name", FLEET_NAMES)
def test_no_setting_by_hand_is_better_than_the_one_found(name: str) -> None:
    """Against every combination, tried without the search's shortcuts."""
    fleet = FLEETS[name]
    best = search(RUN, fleet, TOKENS).best
    assert best.plan == plan(best.manifest, fleet, TOKENS)
    scores: dict[int, float] = {}
    for stages, boundary, microbatch, batch, (steps, group) in itertools.product(
        (1, 2, 3, 4),
        ("bf16", "int8", "int4", "int4_int2"),
        (1, 2, 4, 8),
        (32, 512, 4096),
        ((8, 4), (60, 4), (60, 2), (250, 2)),
    ):
        made = replace(
            RUN,
            pipeline=replace(RUN.pipeline, stages=stages, boundary=boundary),
            inner=replace(RUN.inner, microbatch=microbatch, inner_batch=batch),
            gossip=replace(RUN.gossip, round_samples=batch * steps, group=group),
        )
        assert all(across.holds(made) for across in ACROSS)
        try:
            found = plan(made, fleet, TOKENS)
        except UsageError:
            continue
        if found.tokens_per_s:
            twice = found.replicas_min >= 2
            frailty = (0 if found.survival >= 0.9 else 1) if twice else 2
            scores[frailty] = max(found.learned_per_s, scores.get(frailty, 0.0))
    assert best.frailty == min(scores)
    assert best.score >= (1.0 - ALIKE) * scores[best.frailty]


def test_lines_that_limit_the_run_get_no_more_in_flight_than_they_carry() -> None:
    """More in flight is a larger batch, of which less is learned."""
    fleet = (card(count=64, mbps=2.0, memory_gb=SMALL_GB),)
    best = search(RUN, fleet, TOKENS, stages=4).best
    most = best.manifest.inner.inner_batch_max
    half = plan(replace(best.manifest, inner=replace(best.manifest.inner, inner_batch_max=most // 2)), fleet, TOKENS)
    assert not most or best.score >= (1.0 - ALIKE) * half.learned_per_s


@pytest.mark.parametrize("name", FLEET_NAMES)
@pytest.mark.parametrize(
    "stages", [pytest.param(1, marks=pytest.mark.nightly), 2, pytest.param(4, marks=pytest.mark.nightly)]
)
def test_the_best_is_at_least_as_good_as_the_manifest(name: str, stages: int) -> None:
    found = search(cut(stages), FLEETS[name], TOKENS)
    assert found.own is not None or found.own_fault
    if found.own is not None:
        assert found.own.plan == plan(cut(stages), FLEETS[name], TOKENS)
        assert (found.best.frailty, -found.best.score) <= (found.own.frailty, -found.own.score)
    assert all(row.order >= found.best.order or row.score < found.best.score * 1.02 for row in found.rows)


def test_each_row_is_another_choice() -> None:
    """One stage sends nothing to another, so there is no choice of a boundary."""
    rows = search(RUN, FLEETS["fast lines"], TOKENS).rows
    assert [one.manifest.pipeline.stages for one in rows].count(1) == 1
    assert len({one.group for one in rows}) == len(rows) > 1


def test_settings_that_are_the_best_stay() -> None:
    best = search(RUN, FLEETS["slow lines"], TOKENS).best
    assert best.changes
    again = search(best.manifest, FLEETS["slow lines"], TOKENS).best
    assert again.changes == () and again.manifest == best.manifest


def test_small_cards_force_as_many_stages_as_they_need() -> None:
    small = card(memory_gb=SMALL_GB)
    assert fit_of(cut(3), small).unable == {1} and not fit_of(cut(4), small).unable
    found = search(RUN, [small], TOKENS)
    assert found.best.manifest.pipeline.stages == 4
    assert found.own is None and "bytes" in found.own_fault
    some = (card(count=2, mbps=1e5), card("small", 6, memory_gb=SMALL_GB, mbps=1e5))
    best = search(RUN, some, TOKENS).best
    assert best.manifest.pipeline.stages == 4 and sum(stage.replicas for stage in best.plan.stages) == 8


def test_layers_are_cut_by_size_where_a_large_table_does_not_fit() -> None:
    """The first stage has the token table, which is no arithmetic: with fewer layers a smaller card holds it."""
    run = replace(
        RUN,
        model=replace(RUN.model, layers=8, vocabulary=32768),
        pipeline=PipelineSpec(stages=3),
        data=DataSpec(tokenizer="tokenizer.json"),
        inner=replace(RUN.inner, average_share=0.0, microbatch=1, replica_batch_min=1),
        gossip=replace(RUN.gossip, fragments=5),
    )
    small = card(count=3, memory_gb=1.6)
    assert fit_of(run, small).unable == {0}
    found = search(run, [small], TOKENS)
    assert found.own is None and found.best.manifest.pipeline.stages == 3
    assert ("pipeline", "memory_weight", 1.0) in found.best.changes
    assert search(run, [card(count=3)], TOKENS).best.manifest.pipeline.memory_weight == 0.0


def test_machines_that_cannot_be_used_are_named_with_bytes() -> None:
    fleet = (card(mbps=2.0), card("tiny", 2, memory_gb=0.8))
    best = search(RUN, fleet, TOKENS).best
    (line,) = best.plan.idle
    assert "2 machines 'tiny'" in line and " bytes)" in line


def test_memory_is_named_as_the_limit_where_more_of_it_would_be_faster() -> None:
    fleet = (card(count=4), card("small", 8, memory_gb=SMALL_GB))
    own = search(PLENTY, fleet, TOKENS).own
    assert own is not None and limit_of(own, TOKENS) == "arithmetic, memory"
    assert "8 machines 'small'" in own.plan.idle[0]
    thin = search(PLENTY, [card(mbps=2.0)], TOKENS).own
    assert thin is not None and limit_of(thin, TOKENS) == "uplink"
    assert limit_of(search(PLENTY, [card(mbps=1e6)], TOKENS).best, TOKENS) == "arithmetic"


@pytest.mark.parametrize("memory_gb", [1.6, 2.2, 80.0])
def test_the_memory_of_a_plan_is_that_of_the_plan_that_is_served(memory_gb: float) -> None:
    """A card too small for a microbatch at once computes it in passes; the column says what these take."""
    kind = card(memory_gb=memory_gb, mbps=1e6)
    run = replace(RUN, pipeline=replace(RUN.pipeline, memory_weight=1.0))
    fit_here = fit_of(run, kind)
    for stage in plan(run, [kind], TOKENS).stages:
        assert stage.need == fit_here.needed[stage.part.stage] and fit_here.memory.shortage(stage.need) is None


def test_the_memory_of_unlike_machines_is_the_most_that_one_needs() -> None:
    without = replace(card("processor", 8, memory_gb=64.0), host_gb=0.0)
    needs = [plan(RUN, [kind], TOKENS).stages[0].need for kind in (card(), without)]
    both = plan(RUN, [card(), without], TOKENS).stages[0]
    assert needs[0].device > 0 == needs[1].device
    assert (both.need.device, both.need.host) == (needs[0].device, max(need.host for need in needs))


def test_forwards_that_memory_makes_a_card_do_again_count() -> None:
    run = replace(cut(4, PLENTY), inner=replace(PLENTY.inner, microbatch=32), model=replace(RUN.model, context=2048))
    tight = card(memory_gb=2.2, mbps=1e6)
    ample = card(memory_gb=80.0, mbps=1e6)
    assert fit_of(run, tight).repeated == (1, 1, 1, 0) and fit_of(run, ample).repeated == (0, 0, 0, 0)
    slow, fast = (plan(run, [one], TOKENS) for one in (tight, ample))
    assert 0.74 < slow.tokens_per_s / fast.tokens_per_s < 0.85  # 3/4, and in the last stage nothing is done again


def test_a_price_flips_the_choice() -> None:
    """By speed one stage on fast cards; by money four on slow ones."""
    fleet = (card("dear", 4, flops=1e14, price=50.0), card("cheap", 8, memory_gb=SMALL_GB, flops=1e12, price=0.01))
    speed = search(RUN, fleet, TOKENS, by_money=False).best
    money = search(RUN, fleet, TOKENS).best
    assert speed.manifest.pipeline.stages == 1 and money.manifest.pipeline.stages == 4
    assert money.left_out == ("dear",) and not speed.left_out
    assert money.plan.tokens_per_money > speed.plan.tokens_per_money
    assert money.plan.tokens_per_s < speed.plan.tokens_per_s


def test_money_counts_machines_that_serve_and_what_they_send() -> None:
    fleet = (card(count=4, price=2.0, egress_price=0.05), card("tiny", 2, memory_gb=0.8, price=100.0))
    found = plan(RUN, fleet, TOKENS)
    sent = sum(stage.egress * stage.replicas for stage in found.stages) * 3600 / 1e9
    assert sent > 1.0
    assert found.per_hour == pytest.approx(4 * 2.0 + 0.05 * sent)
    assert found.tokens_per_money == pytest.approx(found.tokens_per_s * 3600 / found.per_hour)


def test_a_price_of_bytes_sent_makes_boundaries_smaller() -> None:
    """With lines that carry anything, int8 is no faster; it sends half."""
    free, paid = (
        search(RUN, [card(memory_gb=SMALL_GB, mbps=1e6, price=0.01, egress_price=price)], TOKENS).best
        for price in (0.0, 1.0)
    )
    assert free.manifest.pipeline.boundary == "bf16" and paid.manifest.pipeline.boundary in (
        "int8",
        "int4",
        "int4_int2",
    )


def test_thin_lines_are_met_with_fewer_bits() -> None:
    wide, thin = (search(RUN, [card(memory_gb=SMALL_GB, mbps=mbps)], TOKENS, stages=4).best for mbps in (1e6, 2.0))
    assert wide.manifest.pipeline.boundary == "bf16" and wide.nats == 0.0
    assert thin.manifest.pipeline.boundary == "int4_int2" and 0.0 < thin.nats < 0.05


def test_above_a_billion_parameters_a_subspace_is_tried_and_its_cost_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = replace(RUN, model=BILLION)
    rows = "count,flops,up_mbps,down_mbps,memory_gb,host_gb\n16,1e14,20,200,24,64\n"
    code, out = ran(tmp_path, capsys, run, rows, "--search", "--tokens", "1e9")
    assert code == 0 and 'boundary = "subspace" with rank' in out and "measured on a small model" in out
    assert "Without: " in out
    _, told = ran(tmp_path, capsys, run, rows, "--search", "--tokens", "1e12", "--json")
    dear = json.loads(told)  # the longer the run, the more tokens a nat is worth
    assert dear["best"]["boundary"] != "subspace" and dear["subspace"]["nats"] > 0.09
    assert search(RUN, [card(mbps=2.0)], TOKENS).subspace is None


def test_ranks_that_the_manifest_does_not_allow_are_refused() -> None:
    assert search(RUN, [card(memory_gb=2.0)], TOKENS, ranks=[64]).subspace is not None
    with pytest.raises(UsageError, match=r"--rank 64: .*model.tied"):
        search(replace(RUN, model=replace(RUN.model, tied=True)), [card()], TOKENS, ranks=[64])
    with pytest.raises(UsageError, match="--rank 2000: pipeline.boundary_rank: allowed is 1 to"):
        search(RUN, [card()], TOKENS, ranks=[2000])


def test_nats_are_those_measured_and_worth_what_the_law_says() -> None:
    for rank, nats in ((48, 0.041), (24, 0.097), (12, 0.191), (6, 0.382), (96, 0.041)):
        spec = PipelineSpec(boundary="subspace", boundary_rank=rank)
        assert boundary_nats(Manifest(model=ModelSpec(width=96), pipeline=spec)) == pytest.approx(nats)
    assert boundary_nats(cut(1)) == 0.0 == boundary_nats(cut(4))
    assert 0.0 < boundary_nats(replace(RUN, pipeline=PipelineSpec(boundary="int8"))) < 0.01
    for stages, nats in ((1, 0.0), (3, 0.013), (8, 0.0455)):  # each boundary costs
        run = replace(RUN, pipeline=PipelineSpec(stages=stages, boundary="int4"))
        assert boundary_nats(run) == pytest.approx(nats)
    assert worth(0.0, TOKENS) == 1.0
    less = worth(0.1, TOKENS) * TOKENS
    assert LAW_B / less**LAW_BETA == pytest.approx(LAW_B / TOKENS**LAW_BETA + 0.1)


def ran(
    folder: Path, capsys: pytest.CaptureFixture[str], manifest: Manifest, rows: str, *options: str
) -> tuple[int, str]:
    (folder / "m.toml").write_text(template(manifest))
    (folder / "f.csv").write_text(rows)
    code = main(["plan", str(folder / "m.toml"), str(folder / "f.csv"), *options])
    told = capsys.readouterr()
    return code, told.out or told.err


def test_nothing_that_fits_is_one_line_with_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "name,count,flops,up_mbps,down_mbps,memory_gb,host_gb\ntiny,4,1e12,10,10,0.8,16\n"
    code, said = ran(tmp_path, capsys, RUN, rows, "--search")
    assert code != 0 and said.count("\n") == 1
    assert "no split fits the fleet: even with 4 stages" in said and " bytes) are free by memory_gb" in said
    assert ran(tmp_path, capsys, RUN, rows.replace(",0.8,", ",1.1,").replace(",4,", ",3,"), "--search")[1] == (
        "swarmnode: no split fits the fleet: with 4 stages each fits some machine, but the 3 machines cannot fill them"
        " all\n"
    )


def test_json_and_table_carry_the_same_and_its_changes_are_the_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "name,count,flops,up_mbps,down_mbps,memory_gb,host_gb,price\nhome,8,1e12,2,20,8,16,0.1\n"
    code, out = ran(tmp_path, capsys, RUN, rows, "--search", "--by", "speed", "--json")
    told = json.loads(out)
    (tmp_path / "same.csv").write_text(rows)
    fleet = read_fleet(tmp_path / "same.csv")
    tokens = 20.0 * sum(stage.part.parameters for stage in plan(RUN, fleet, 1.0).stages)
    found = search(RUN, fleet, tokens, by_money=False)
    assert code == 0 and told["by"] == "speed"
    assert [row["tokens_per_s"] for row in told["rows"]] == [row.plan.tokens_per_s for row in found.rows]
    assert told["manifest"]["tokens_per_s"] == plan(RUN, fleet, TOKENS).tokens_per_s
    assert told["best"]["changes"] == {f"{table}.{key}": value for table, key, value in found.best.changes}
    made = RUN
    for name, value in told["best"]["changes"].items():
        table, key = name.split(".")
        made = dataclasses.replace(made, **{table: dataclasses.replace(getattr(made, table), **{key: value})})
    code, plain = ran(tmp_path, capsys, made, rows, "--json")
    assert json.loads(plain)["tokens_per_s"] == told["best"]["tokens_per_s"]
    code, table = ran(tmp_path, capsys, RUN, rows, "--search", "--by", "speed")
    best = next(line for line in table.splitlines() if line.strip().startswith("best "))
    assert f"{told['best']['tokens_per_s']:,.0f}" in best
    for name, value in told["best"]["changes"].items():
        assert f"{name.partition('.')[2]} = {json.dumps(value)}" in table.splitlines()


def test_options_that_do_not_go_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "count,flops,up_mbps,down_mbps\n4,1e12,10,10\n"
    for options in (("--search", "--stages", "2"), ("--by", "money"), ("--rank", "8")):
        code, said = ran(tmp_path, capsys, RUN, rows, *options)
        assert code == 2 and said.count("\n") == 1, said


def test_short_memory_means_rounds_of_fragments_and_no_running_mean() -> None:
    run = replace(cut(1), inner=replace(RUN.inner, microbatch=1, replica_batch_min=1))
    sparing = with_values(run, fragments=5, average_share=0.0)
    hosts = (replace(card(mbps=20.0), host_gb=gb / 10) for gb in range(31, 80))
    tight = next(kind for kind in hosts if not fit_of(sparing, kind).unable)
    assert fit_of(run, tight).unable
    best = search(run, [tight], TOKENS).best.manifest
    assert (best.pipeline.stages, best.gossip.fragments, best.inner.average_share) == (1, 5, 0.0)


def test_a_fleet_that_waits_for_lines_gets_a_batch_slots_and_patience() -> None:
    fleet = [card(memory_gb=SMALL_GB, count=200)]
    best = search(cut(4), fleet, TOKENS, stages=4).best
    made = best.manifest
    rate = best.plan.samples_per_s
    batch = max(made.inner.inner_batch, made.inner.inner_batch_max)
    assert batch >= 0.5 * in_flight_needed(made, fleet) > 4 * RUN.inner.inner_batch
    assert made.limits.microbatch_timeout_s >= batch / rate and made.limits.in_flight_max >= 8
    rare = search(cut(1), [card(mbps=1.0)], TOKENS).best.manifest
    assert rare.gossip.round_samples > 8 * rare.inner.inner_batch
    assert rare.recovery.snapshot_rounds_max < RUN.recovery.snapshot_rounds_max
    assert rare.limits.exchange_timeout_s > RUN.limits.exchange_timeout_s


def test_records_are_rarer_in_a_larger_swarm() -> None:
    few, many = (search(RUN, [card(count=count)], TOKENS).best.manifest.limits for count in (4, 400))
    assert few.announce_period_s == 2.0 and many.announce_period_s >= 30.0
    assert many.record_ttl_s >= 2 * many.announce_period_s


def test_gradients_are_averaged_before_each_step_where_lines_carry_that() -> None:
    """On a local network a step waits for its exchange; over a home's line local steps are sooner at the loss."""
    run = fit(PRESETS["demo"], samples=20_000).manifest

    def found(up: float, rtt_s: float) -> Manifest:
        kind = MachineKind("laptop", 8, 2e9, up, up, Address("local", rtt_s), memory_gb=16.0)
        return search(run, [kind], 20_000.0 * run.model.context, stages=1).best.manifest

    near = found(1.25e8, 0.0005)
    far = found(5e4, 0.1)
    assert (near.gossip.method, near.gossip.group, near.pipeline.stages) == ("gradient", 0, 1)
    assert near.gossip.round_samples == near.inner.inner_batch
    assert near.recovery.snapshot_rounds_max > far.recovery.snapshot_rounds_max, "a snapshot may be as many steps old"
    assert far.gossip.method == "average"


def test_steps_are_larger_on_thinner_lines_and_the_reason_is_said() -> None:
    """A larger step covers its packets, and learns less from a sample: what pays depends on the line."""
    run = fit(PRESETS["demo"], samples=100_000)
    batches = []
    for up, rtt_s in ((1.25e8, 0.0005), (1.25e7, 0.01), (2.5e6, 0.025)):
        kind = MachineKind("laptop", 8, 2e10, up, up, Address("local", rtt_s), memory_gb=16.0)
        found = fitted(run, [kind], stages=1)
        batches.append(found.best.manifest.inner.inner_batch)
        assert found.best.manifest.gossip.method == "gradient"
        validated = found.recipe.manifest.pipeline.validation_every_samples
        due = max(1024, min(16 * batches[-1], 100_000 / 24))  # who validates misses a step; a run has a curve
        assert validated == pytest.approx(due, abs=1)
        assert found.best.score == max(one.score for one in found.steps if one.frailty == found.best.frailty)
        assert f"why steps of {batches[-1]} samples" in steps_compared(found)
        assert rate_factor(batches[-1] * 128.0, run.manifest.inner.inner_batch * 128.0, 1.28e7) >= 1.0
    assert batches[0] < batches[1] < batches[2]


def test_packets_that_travel_while_the_next_step_is_trained_hide_behind_it_or_it_behind_them() -> None:
    run = replace(fit(PRESETS["demo"], samples=100_000).manifest, pipeline=PipelineSpec(stages=1))
    plain = together(run, butterfly=True)
    late = with_values(plain, delay=1)
    quick = MachineKind("laptop", 8, 1e11, 1e8, 1e8, Address("local", 0.001), memory_gb=16.0)
    for kind in (quick, replace(quick, up=1e5, down=1e5)):
        one, other = (plan(made, [kind], 1e6) for made in (late, plain))
        exchange_s = step_exchange_s(plain, other.stages[0].part, [kind] * 8)
        trained_s = run.inner.inner_batch / other.samples_per_s - exchange_s
        assert run.inner.inner_batch / one.samples_per_s == pytest.approx(max(trained_s, exchange_s))
        assert one.efficiency < other.efficiency


def test_a_delay_costs_less_the_longer_the_run_and_more_by_rows_in_turn() -> None:
    """By nats of the demo's model and of the replica bench: docs/measurements/wide-area.md."""
    assert of_delay(1, 224) == pytest.approx(1 / 1.27, abs=0.03)
    assert of_delay(1, 480) <= 1 / 1.07 and of_delay(1, 4800) > 0.98
    assert of_delay(3, 480) == pytest.approx(0.69, abs=0.03) and of_delay(3, 240) < of_delay(1, 240)


def test_a_step_whose_members_wait_for_each_other_takes_its_work_and_its_exchange() -> None:
    run = together(replace(fit(PRESETS["demo"], samples=20_000).manifest, pipeline=PipelineSpec(stages=1)))
    kind = MachineKind("laptop", 8, 1e11, 1e8, 1e8, Address("local", 0.001), memory_gb=16.0)
    slower = replace(kind, up=1e6, down=1e6)
    quick, slow = (plan(run, [one], 1e6) for one in (kind, slower))
    part = quick.stages[0].part
    longer_s = step_exchange_s(run, part, [slower] * 8) - step_exchange_s(run, part, [kind] * 8)
    batch = run.inner.inner_batch
    assert batch / slow.samples_per_s - batch / quick.samples_per_s == pytest.approx(longer_s)
    assert slow.limit_kind == "uplink" and quick.efficiency == slow.efficiency > 0.8

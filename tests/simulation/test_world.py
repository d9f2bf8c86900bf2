"""Whole lives: they repeat everywhere, they hold the laws, and a broken law says how to see it again."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import pytest

from swarmnode.app.cli.main import main
from swarmnode.base.errors import UsageError
from swarmnode.model.section import section_sizes, snapshot_nbytes
from swarmnode.model.split import split
from swarmnode.train.pipeline.backlog import Backlog
from swarmsim import event_queue
from swarmsim.life import simulate
from swarmsim.report import page
from swarmsim.scenario import find, parse_scenario, read_scenario, shorter
from swarmsim.sweep import SweepTotals, sweep
from swarmsim.world import World

from .golden import FILE, LIVES, life

FAULTS_MIN = 200  # a life; how many strike depends on what the nodes do meanwhile
FLEET = [{"count": 3, "flops": 1e10, "up_mbps": 100, "down_mbps": 100}]


@pytest.mark.parametrize("index", range(len(LIVES)))
def test_golden_traces(index: int) -> None:
    golden = json.loads(FILE.read_text())[index]
    assert life(*LIVES[index]) == golden, "decisions changed; on purpose? then: python -m tests.simulation.golden"


def test_a_life_is_the_same_without_c() -> None:
    with event_queue.unused():
        assert life(*LIVES[0]) == json.loads(FILE.read_text())[0]


def test_a_life_is_the_same_in_every_process() -> None:
    program = "import json; from tests.simulation.golden import LIVES, life; print(json.dumps(life(*LIVES[1])))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONHASHSEED": "77", "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(FILE.read_text())[1]


def trace_of_rounds_in_pieces() -> str:
    """The trace of a few steps of twelve machines that average gradients in pieces."""
    scenario = shorter(read_scenario(find("numbered-steps"), {"gossip.butterfly": True}), 6.0)
    return simulate(dataclasses.replace(scenario, bounds=dataclasses.replace(scenario.bounds, throughput=0.0)), 1).trace


def test_rounds_in_pieces_are_the_same_in_every_process() -> None:
    program = "from tests.simulation.test_world import trace_of_rounds_in_pieces as trace; print(trace())"
    traces = set[str]()
    for hashes in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": hashes, "PYTHONPATH": "."},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        traces.add(done.stdout)
    assert len(traces) == 1


@pytest.mark.timeout(600)
@pytest.mark.parametrize("lives", [1, pytest.param(4, marks=pytest.mark.nightly)])
def test_a_sweep_of_storms_breaks_no_law(lives: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Always the same lives; `make soak` lives others for an hour."""
    scenario = read_scenario(find("everything"))
    failures: list[tuple[int, object]] = []

    def going_on(swept: SweepTotals) -> bool:
        return swept.lives < lives

    swept = sweep(scenario, 100, going_on, lambda outcome: failures.append((outcome.seed, outcome.failures)))
    with capsys.disabled():
        print(f"\nsweep: {swept.lives} lives, {swept.faults} faults, {swept.laws_checked} checks of laws", end="")
    assert not failures, f"replay: swarmnode simulate --scenario everything --seed {failures[0][0]}"
    assert swept.lives == lives and swept.faults >= lives * FAULTS_MIN


def test_a_bug_of_the_node_is_found_and_can_be_replayed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without its memory of what was counted, a replica counts repeated microbatches twice."""
    monkeypatch.setattr(Backlog, "_keep", lambda self, key, held, answer: None)

    def life(seed: int) -> str:
        code = main(["simulate", "--scenario", "everything", "--seed", str(seed), "--for", "120s"])
        said = capsys.readouterr().err
        return said if code == 70 and "broken: a microbatch is counted once" in said else ""

    seed, said = next((seed, said) for seed in range(1, 9) if (said := life(seed)))
    assert f"replay: swarmnode simulate --seed {seed} --scenario everything --for 120s" in said
    assert life(seed) == said


def test_replicas_that_wait_for_each_others_gradients_go_on_when_some_die() -> None:
    """One dies and comes back, one dies for good, one becomes slow: no step waits for long, and all are equal again."""
    tree = {
        "tensors": "torch",
        "seconds": 100,
        "fleet": [{"count": 4, "flops": 1e7, "up_mbps": 100, "down_mbps": 100}],
        "manifest": {
            "model": {"layers": 1, "width": 32, "heads": 2, "kv_heads": 1, "ffn": 48, "context": 16},
            "pipeline": {"stages": 1, "validation_samples": 16, "validation_every_samples": 256},
            "inner": {"learning_rate": 0.01, "warmup_samples": 64, "microbatch": 4, "inner_batch": 16},
            "gossip": {"method": "gradient", "codec": "int8", "group": 0, "round_samples": 16},
        },
        "faults": {
            "crash": {"at_s": [30.0], "back_s": 10},
            "gone": {"at_s": [70.0]},
            "slow": {"at_s": [50.0], "factor": 4.0},
        },
        "bounds": {"window_s": 20, "throughput": 0.1},
    }
    waited = list[float]()

    def look(world: World) -> None:
        lines = [line for line in world.trace.lines or () if " exchange.paired " in line]
        waited.extend(float(line.partition(" seconds=")[2].partition(" ")[0]) for line in lines)

    outcome = simulate(parse_scenario(tree, "test", find("calm").parent, "real"), 1, keep=True, look=look)
    assert not outcome.failures, outcome.failures
    assert outcome.struck["crash"] == outcome.struck["gone"] == 1
    losses = [loss for _, loss, _ in outcome.validations]
    assert losses[-1] < losses[0] - 0.5, losses
    assert len(waited) > 100, "they meet after each step"
    waited.sort()
    assert waited[len(waited) // 2] < 1.0 and waited[-1] < 15.0, "a step takes 1.1 s of work"


@pytest.mark.parametrize("text", [pytest.param("pattern", marks=pytest.mark.nightly), "data"])
def test_real_tensors_learn_in_the_storm(text: str) -> None:
    tree = {
        "tensors": "torch",
        "text": text,
        "seconds": 60,
        "fleet": [{"count": 6, "flops": 1e7, "up_mbps": 100, "down_mbps": 100}],
        "manifest": {
            "model": {"layers": 2, "width": 32, "heads": 2, "kv_heads": 1, "ffn": 48, "context": 16},
            "pipeline": {"stages": 2, "validation_samples": 16, "validation_every_samples": 1},
            "inner": {"learning_rate": 0.01, "warmup_samples": 64, "microbatch": 4, "inner_batch": 16},
            "gossip": {"round_samples": 256},
        },
        "faults": {"crash": {"at_s": [30.0], "back_s": 10}, "slow": {"at_s": [20.0], "factor": 4.0}},
        "bounds": {"window_s": 20, "throughput": 0.1},
    }
    outcome = simulate(parse_scenario(tree, "test", find("calm").parent, "real"), 1)
    assert not outcome.failures, outcome.failures
    assert outcome.struck["crash"] == 1
    losses = [loss for _, loss, _ in outcome.validations]
    assert losses[-1] < losses[0] - 0.5, losses
    most = max(samples for _, _, samples in outcome.validations)
    assert min(losses) <= outcome.history().loss_towards(most) <= losses[0], "a mean over the last tenth of the way"  # type: ignore[operator]
    assert outcome.history().loss_towards(most + 1) is None, "nothing is known beyond"


def test_a_dead_peer_is_dropped_before_its_record_expires() -> None:
    """One of four replicas goes without a word; after three announce periods the others ask, and forget it."""
    tree = {
        "seconds": 40,
        "fleet": [FLEET[0] | {"count": 8}],
        "manifest": {
            "pipeline": {"stages": 2},
            "inner": {"inner_batch": 32},
            "limits": {"announce_period_s": 4.0, "record_ttl_s": 60.0},
        },
        "faults": {"gone": {"at_s": [20.0], "back_s": 300}},
        "bounds": {"window_s": 5, "throughput": 0.0},
    }
    lines: list[str] = []
    scenario = parse_scenario(tree, "test", find("calm").parent, "gone")
    outcome = simulate(scenario, 3, keep=True, look=lambda world: lines.extend(world.trace.lines or ()))
    assert not outcome.failures, outcome.failures
    went_s = next(float(line.split()[0]) for line in lines if "fault.gone" in line)
    buried = [float(line.split()[0]) - went_s for line in lines if "peer.gone" in line and "answers no ping" in line]
    assert len(buried) >= 7 and sorted(buried)[6] < 4 * 4.0, "by all others, long before the record runs out"


def test_states_of_gigabytes_come_over_thin_lines() -> None:
    """A chunk that stands for hundreds of megabytes has the time of all of them, and its donor keeps the snapshot."""
    tree = {
        "seconds": 900,
        "state_share": 1e-3,
        "fleet": [FLEET[0] | {"count": 8, "flops": 1e12, "up_mbps": 50}],
        "manifest": {
            "model": {"layers": 24, "width": 2048, "heads": 16, "kv_heads": 4, "ffn": 8192, "context": 512},
            "pipeline": {"stages": 2, "boundary": "int8", "weight_prediction": "off"},
            "inner": {"microbatch": 1},  # 513 tokens: no whole number of the marks that fake tensors are made of
            "limits": {"hop_timeout_min_s": 120.0, "announce_period_s": 30.0, "record_ttl_s": 90.0},
        },
        "faults": {"crash": {"at_s": [600.0], "back_s": 10}},
        "bounds": {"window_s": 60, "throughput": 0.0, "training_s": 7200.0},
    }
    scenario = parse_scenario(tree, "test", find("calm").parent, "thin")
    outcome = simulate(scenario, 1)
    assert not outcome.failures, outcome.failures
    state_nbytes = snapshot_nbytes(section_sizes(scenario.manifest, split(scenario.manifest.model, 2)[0]))
    assert outcome.total.bytes["state"] >= 0.99 * state_nbytes > 5e9
    one_s = state_nbytes / (50e6 / 8)
    assert 600.0 + one_s / 4 < outcome.virtual_s < 600.0 + one_s, "sooner than one donor's line, not than four carry it"


def test_reports(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = simulate(shorter(read_scenario(find("calm")), 60), 0)
    for text in (page([outcome]), page([outcome, outcome])):
        assert text.startswith("<!doctype html>") and "<svg" in text and "http" not in text
    assert main(["simulate", "--for", "60s", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["trace"] == outcome.trace and found["failures"] == []
    assert 0 < found["share_of_optimum"] <= 1.05


def test_nodes_that_move_are_placed_better(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Eight machines crowd one stage; only where they may move do they spread, and the command says how well."""
    file = tmp_path / "crowded.toml"
    file.write_text(
        """
        seconds = 240
        join_s = 2
        bounds = { window_s = 5.0, throughput = 0.0 }
        manifest.pipeline = { stages = 2, window_max = 16 }
        manifest.inner = { inner_batch = 128 }
        manifest.gossip = { round_samples = 1024 }
        manifest.limits = { announce_period_s = 5.0, record_ttl_s = 20.0 }
        [[fleet]]
        count = 8
        flops = 1e9
        up_mbps = 100
        down_mbps = 100
        stage = 0
        [[fleet]]
        count = 2
        flops = 1e9
        up_mbps = 100
        down_mbps = 100
        stage = 1
        """
    )
    assert main(["simulate", "--scenario", str(file), "--rebalance", "0,20", "--json"]) == 0
    never, often = json.loads(capsys.readouterr().out)
    assert never["storm"]["moves"] == 0 and 2 <= often["storm"]["moves"] <= 6
    assert often["share_placed"] > never["share_placed"] + 0.2
    assert often["curve"][-1]["stages"] in ([5, 5], [4, 6], [6, 4]), "they came to rest"


def test_mistakes_in_scenarios_are_named() -> None:
    fleet = FLEET
    for tree, says in (
        ({}, "fleet is missing"),
        (
            {"fleet": fleet, "manifest": {"gossip": {"method": "partial_average", "codec": "topk", "group": 0}}},
            "gossip.method = 'partial_average' with tensors = \"fake\"; these only support noloco, average, none",
        ),
        ({"fleet": fleet, "faults": {"meteor": {}}}, "unknown fault 'meteor'; faults are"),
        ({"fleet": fleet, "faults": {"crash": {"rate": 1}}}, "faults.crash: unknown key 'rate'"),
        ({"fleet": fleet, "second": 5}, "unknown key 'second'"),
        ({"fleet": fleet, "text": "poem"}, 'text = \'poem\'; expected "pattern" or "data"'),
        ({"fleet": fleet, "seconds": "long"}, "seconds = 'long'"),
        ({"fleet": fleet[:1], "manifest": {"pipeline": {"stages": 4}}}, "3 machines for 4 stages"),
    ):
        with pytest.raises(UsageError, match=says):
            parse_scenario(tree, "s.toml", find("calm").parent, "s")
    with pytest.raises(UsageError, match="unknown scenario 'clam'; |unknown scenario 'clam': .*calm"):
        find("clam")

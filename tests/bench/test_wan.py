"""`swarmnode bench wan`: its options, its figures, and one small swarm behind lines."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from swarmnode.app.bench import wan
from swarmnode.app.bench.line_proxy import LineProxies, LineSpec
from swarmnode.app.cli.bench import command
from swarmnode.app.local.child import NodePlan
from swarmnode.app.machine.device_pace import device_pace
from swarmnode.app.planner.geography import rtt_s
from swarmnode.base.errors import ManifestError, UsageError
from swarmnode.base.ports import Priority

LINE = LineSpec(20e6, 100e6, 0.05, 0.01)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--loss", "1"], "such as 1%"),
        (["--loss", "30%"], "0% to 20%"),
        (["--leave", "16%"], "such as 16%/h"),
        (["--up", "20"], "20Mbit"),
        (["--stages", "1,"], "such as 1,3"),
        (["--stages", "0"], "such as 1,3"),
        (["--nodes", "1"], "2<=x<=64"),
        (["--flops", "0"], "1000.0<=x"),
    ],
)
def test_bad_options_say_what_to_give(words: list[str], says: str) -> None:
    done = CliRunner().invoke(command, ["wan", *words])
    assert done.exit_code == 2 and says in done.output, done.output


@pytest.mark.parametrize(
    ("nodes", "flops", "stages", "says"),
    [
        (12, 1e13, 1, r"--flops 1e\+13: a sample would take"),
        (12, math.nan, 1, "--flops nan"),
        (2, 1e9, 3, "3 stages need at least as many nodes"),
    ],
)
def test_a_fleet_that_cannot_be_shown_here_is_refused(nodes: int, flops: float, stages: int, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        wan.check(wan.WanSpec(nodes, LINE, flops, 0.0, 60.0), wan.manifest_of(None, stages, ()))


def test_values_of_the_manifest_can_be_set(tmp_path: Path) -> None:
    manifest = wan.manifest_of(None, 2, ["gossip.codec=int8", "inner.inner_batch=16"])
    assert manifest.gossip.codec == "int8" and manifest.inner.inner_batch == 16 and manifest.pipeline.stages == 2
    with pytest.raises(UsageError, match="give KEY=VALUE"):
        wan.manifest_of(None, 1, ["gossip.codec"])
    with pytest.raises(ManifestError, match="gossip.codec"):
        wan.manifest_of(None, 1, ["gossip.codec=abacus"])
    with pytest.raises(ManifestError, match="pipeline.stages = 7"):
        wan.manifest_of(None, 7, [])
    with pytest.raises(UsageError, match="swarmnode init"):
        wan.manifest_of(tmp_path, 1, [])


def test_settings_fit_the_lines_and_those_given_stand() -> None:
    fleet = wan.WanSpec(12, LINE, 1e9, 0.0, 60.0)
    thin = wan.WanSpec(12, LineSpec(1e6, 5e6, 0.1, 0.01), 1e9, 0.0, 60.0)
    made = wan.manifest_of(None, 1, ["inner.muon_momentum=0.8"], fleet)
    plain = wan.manifest_of(None, 1, ())
    assert made.inner.inner_batch > plain.inner.inner_batch and made.inner.muon_momentum == 0.8
    assert made.gossip.method == "gradient"
    assert wan.manifest_of(None, 3, (), fleet).pipeline.stages == 3
    more = wan.manifest_of(None, 1, (), thin)
    assert more.inner.inner_batch > made.inner.inner_batch or more.gossip.codec != made.gossip.codec
    kind = wan.machines_of(fleet)
    assert rtt_s(kind.address, kind.address) == pytest.approx(2 * LINE.delay_s, rel=0.1)


@pytest.mark.parametrize("stages", [1, 3])
def test_a_sample_takes_a_device_as_long_in_any_number_of_stages(stages: int) -> None:
    manifest = wan.manifest_of(None, stages, ())
    took_s = 0.0
    for stage in range(stages):
        pace = device_pace(manifest, 1e9, lambda stage=stage: stage)
        kinds = [Priority.BACKWARD] if stage == stages - 1 else [Priority.FORWARD, Priority.BACKWARD]
        took_s += sum(pace(kind, 2) for kind in kinds)
    assert took_s == pytest.approx(2 * wan.sample_s(manifest, 1e9))
    assert device_pace(manifest, 1e9, lambda: None)(Priority.FORWARD, 2) == 0.0
    assert device_pace(manifest, 1e9, lambda: 0)(Priority.OUTER, 0) == 0.0


def test_learning_is_the_samples_that_loopback_needed() -> None:
    loopback = {0: 5.0, 100: 4.0, 200: 3.0, 400: 2.5}
    assert wan.learning(loopback, loopback) == 1.0
    assert wan.learning({0: 5.0, 200: 4.0, 400: 3.0}, loopback) == pytest.approx(0.5)
    assert math.isnan(wan.learning({}, loopback))
    assert math.isnan(wan.learning({100: 1.0}, loopback)), "a loss that loopback never had says nothing"


async def test_a_node_listens_behind_its_line(tmp_path: Path) -> None:
    proxies = LineProxies(1)
    spec = wan.WanSpec(2, LINE, 1e9, 0.0, 60.0)
    plan = NodePlan("node-00", tmp_path, tmp_path / "m", tmp_path / "c", ("/ip4/127.0.0.1/tcp/1/p2p/x",))
    words = wan.node_line(plan, spec, proxies)
    node = proxies.nodes["node-00"]
    assert words[words.index("--listen") + 1] == f"/ip4/127.0.0.1/tcp/{node.port}"
    assert words[words.index("--announce") + 1] == f"/ip4/127.0.0.1/tcp/{node.announced}"
    assert words[words.index("--device-flops") + 1] == "1000000000.0"
    assert "--announce" not in wan.node_line(plan, spec, None)
    await proxies.close()


LIVE = ["--nodes", "2", "--stages", "1", "--for", "20s", "--set", "inner.microbatch=2", "--set", "inner.inner_batch=4"]
LIVE += ["--set", "gossip.round_samples=8", "--loss", "0%", "--leave", "0%/h"]


@pytest.mark.nightly
def test_a_swarm_behind_lines_is_measured_beside_loopback() -> None:
    begin = [sys.executable, "-m", "swarmnode.app.cli.main", "bench", "wan", *LIVE, "--json"]
    done = subprocess.run(begin, capture_output=True, text=True, timeout=570, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    figures = found["1 stage"]
    assert figures["samples trained"] > 0 and figures["rounds met of rounds tried"] > 0.0
    assert 0.0 < figures["busy"] <= 1.1 and figures["Mbit/s up a node, gossip"] > 0.0
    assert figures["callers of no known line"] == 0
    assert figures["tokens/s over loopback's"] > 0.0


@pytest.mark.nightly
def test_a_signal_ends_every_process() -> None:
    begin = [sys.executable, "-m", "swarmnode.app.cli.main", "bench", "wan", *LIVE]
    with subprocess.Popen(begin, stderr=subprocess.PIPE, text=True, env={**os.environ, "NO_COLOR": "1"}) as bench:
        assert bench.stderr is not None
        for line in bench.stderr:
            if "nodes are ready" in line:
                break
        started = psutil.Process(bench.pid).children(recursive=True)
        assert len(started) >= 3
        bench.send_signal(signal.SIGTERM)
        bench.stderr.read()
        assert bench.wait(120) == 130
    _, alive = psutil.wait_procs(started, timeout=60)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]

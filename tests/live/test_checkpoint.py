"""A whole swarm of real processes stops, and goes on elsewhere: through a bucket, with other stages, after mistakes."""

import json
import logging
import math
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swarmnode.app.local.child import environment
from swarmnode.app.local.spawn import NODE
from swarmnode.run.manifest import CheckpointSpec
from swarmnode.run.manifest.folder import init
from swarmnode.run.manifest.recipe import PRESETS

BOUND_S = 240.0
BUCKET = "swarm"


@pytest.fixture
def bucket() -> Iterator[dict[str, str]]:
    """What a process needs in its environment to reach an S3 of our own that is not on the internet."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    host, port = server.get_host_and_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "no_proxy": host,
    }
    try:
        botocore = pytest.importorskip("botocore.session").get_session()
        client = botocore.create_client(
            "s3",
            "us-east-1",
            endpoint_url=variables["AWS_ENDPOINT_URL"],
            aws_access_key_id="key",
            aws_secret_access_key="s",
        )
        client.create_bucket(Bucket=BUCKET)
        yield variables
    finally:
        server.stop()


def up(folder: Path, variables: dict[str, str], *arguments: str) -> dict[str, Any]:
    common = ["--json", "--no-dashboard", "--cache", str(folder / "cache")]
    done = subprocess.run(
        [*NODE, "up", *arguments, *common],
        cwd=folder,
        env={**environment(), **variables},
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["failure"] is None and set(found["exit_reasons"].values()) == {"left"}, found
    return found


def events(folder: Path, event: str) -> list[dict[str, Any]]:
    found = []
    for path in folder.rglob("events.jsonl"):
        rows = map(json.loads, path.read_text().splitlines())
        found += [row["fields"] for row in rows if row["event"] == event]
    return found


def test_a_swarm_stops_and_goes_on_from_a_bucket_with_other_stages(tmp_path: Path, bucket: dict[str, str]) -> None:
    preset = PRESETS["tiny"]
    gossip = replace(preset.gossip, round_samples=128, round_seconds_min=0.0)
    run = tmp_path / "run"
    init(run, replace(preset, gossip=gossip, checkpoint=CheckpointSpec(f"s3://{BUCKET}/all", 1, 2)))
    first = up(tmp_path, bucket, str(run), "--nodes", "3", "--samples", "640", "--use-bucket")
    assert first["checkpoint"].startswith(f"s3://{BUCKET}/all/{first['run'][:16]}/round-")
    assert first["checkpoint"].endswith("-final") and not (run / "checkpoints").exists()
    assert events(Path(tmp_path / first["folder"]), "checkpoint.pruned"), "the budget is kept"
    assert not events(Path(tmp_path / first["folder"]), "checkpoint.failed")

    layers = preset.model.layers
    size = ("--nodes", str(layers), "--stages", str(layers), "--samples", str(first["samples"] + 128))
    second = up(tmp_path, bucket, "--resume", f"s3://{BUCKET}/all", *size)
    loaded = events(tmp_path / second["folder"], "checkpoint.loaded")
    assert sorted(row["stage"] for row in loaded) == list(range(layers)) != list(range(preset.pipeline.stages))
    counted = {row["samples_total"] for row in loaded}
    assert len(counted) == 1 and counted.pop() >= first["samples"] >= 640
    assert second["samples"] >= first["samples"] + 128 and second["run"] != first["run"]
    # The curve goes on: where it stood, not at the beginning (which is above 5), and further down.
    assert second["loss_validation_first"] < math.log(256) - 1.0
    assert second["loss_validation_first"] < first["loss_validation_last"] + 0.3

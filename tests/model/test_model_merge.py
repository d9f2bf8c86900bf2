"""The mean of several models: what transformers loads, and that it joins what branches learned apart."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from swarmnode.cli.main import cli
from swarmnode.errors import DataError, NotPermitted, UsageError
from swarmnode.machine.replica import TorchReplica
from swarmnode.model.export import read_tensors, stage_state_dict, write_model
from swarmnode.model.huggingface import source_names
from swarmnode.model.model_merge import INDEX_FILE, merge_models
from swarmnode.ports import WireTensor
from tests.support.tiny_model import TINY, manifest, token_wire

BATCH = 8


def trained(replica: TorchReplica, halves: list[int], steps: int) -> None:
    """Steps on text of these halves of the vocabulary in turn."""
    for step in range(steps):
        tokens = text(halves[step % len(halves)], step)
        replica.loss(tokens, tokens, BATCH, train=True)
        replica.step(10_000)


def text(half: int, first: int) -> WireTensor:
    """Text that counts, in one half of the vocabulary."""
    size = TINY.vocabulary // 2
    rows = torch.arange(BATCH)[:, None] * 5 + first + torch.arange(TINY.context + 1)[None, :]
    return token_wire(rows % size + half * size)


def loss(replica: TorchReplica, half: int) -> float:
    tokens = text(half, 1000)
    return replica.loss(tokens, tokens, BATCH, train=True, accumulate=False).loss_sum / (BATCH * TINY.context)


def whole() -> TorchReplica:
    return TorchReplica(manifest(TINY, stages=1), 0)


def export(replica: TorchReplica, folder: Path) -> Path:
    write_model(stage_state_dict(replica.stage), replica.stage.manifest, folder)
    return folder


def test_branches_that_never_met_are_merged(tmp_path: Path) -> None:
    """Branch-Train-Merge: two branches of one seed model each forget the other's text; their mean knows both."""
    seed = whole()
    trained(seed, [0, 1], 40)
    state, folders, losses = seed.snapshot(), [], []
    for half in (0, 1):
        branch = whole()
        branch.load(state)
        trained(branch, [half], 60)
        folders.append(export(branch, tmp_path / str(half)))
        losses.append(max(loss(branch, 0), loss(branch, 1)))
    parameters = merge_models(tmp_path / "merged", folders, [1.0, 1.0])
    mean = whole()
    ours = stage_state_dict(mean.stage)
    merged = read_tensors(tmp_path / "merged" / "model.safetensors")
    assert parameters == sum(tensor.numel() for tensor in ours.values())
    names = source_names(mean.stage.manifest.model, tied=False)
    with torch.no_grad():
        for name, view in mean.stage.named(mean.stage.theta).items():
            view.copy_(merged[names[name]])
    mean.stage.touched()
    together = max(loss(mean, 0), loss(mean, 1))
    assert together < 0.5 * min(losses), "each branch forgets the other's text"
    assert together < 0.5 * min(loss(seed, 0), loss(seed, 1)), "and learned its own"


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    found = []
    for seed in (1, 2):
        replica = TorchReplica(replace(manifest(TINY, stages=1), seed=seed), 0)
        found.append(export(replica, tmp_path / f"model-{seed}"))
    return found


def test_weights_count_by_their_share_and_the_rest_is_the_first_ones(models: list[Path], tmp_path: Path) -> None:
    done = CliRunner().invoke(
        cli, ["merge", str(models[0]), str(models[1]), "--out", str(tmp_path / "out"), "--weights", "3,1"]
    )
    assert done.exit_code == 0, done.output
    assert "the mean of 2 models" in done.output
    one, two, mean = (read_tensors(folder / "model.safetensors") for folder in (*models, tmp_path / "out"))
    for name, tensor in mean.items():
        torch.testing.assert_close(tensor, 0.75 * one[name] + 0.25 * two[name])
    for name in ("config.json", "tokenizer.json", "manifest.toml"):
        assert (tmp_path / "out" / name).read_bytes() == (models[0] / name).read_bytes()
    assert sorted(tmp_path.iterdir()) == [*models, tmp_path / "out"], "nothing else is left"


def test_a_model_in_several_files_is_merged_with_one_in_one(models: list[Path], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    whole = transformers.AutoModelForCausalLM.from_pretrained(models[0])
    whole.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert (tmp_path / "sharded" / INDEX_FILE).exists()
    merge_models(tmp_path / "out", [tmp_path / "sharded", models[1]], [1.0, 1.0])
    mean = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    two = read_tensors(models[1] / "model.safetensors")
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(mean[name], (tensor + two[name]) / 2)


def test_models_that_do_not_match_are_refused_in_a_line(models: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(UsageError, match="a weight for each"):
        merge_models(out, models, [1.0])
    with pytest.raises(NotPermitted, match="exists"):
        merge_models(models[0], models, [1.0, 1.0])
    with pytest.raises(DataError, match=r"nowhere.*cannot be read"):
        merge_models(out, [models[0], tmp_path / "nowhere"], [1.0, 1.0])
    config = models[1] / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"hidden_size": 64}))
    with pytest.raises(DataError, match=r"has hidden_size 64, .* only models that began as one"):
        merge_models(out, models, [1.0, 1.0])
    config.write_bytes((models[0] / "config.json").read_bytes())
    (models[1] / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(DataError, match="not a safetensors file"):
        merge_models(out, models, [1.0, 1.0])
    done = CliRunner().invoke(cli, ["merge", *map(str, models), "--out", str(out), "--weights", "a,b"])
    assert done.exit_code != 0
    assert not out.exists()

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from swarmnode.base.errors import DataError
from swarmnode.model.export import StageLabel, load_stage, save_stage, stage_state_dict, write_model
from swarmnode.model.gather import Gathered, chains, merged, of_stage_files, spread
from swarmnode.model.running_mean import weight_of
from swarmnode.model.stage import StageReplica
from swarmnode.run.manifest import DataSpec, Manifest
from tests.support.tiny_model import TINY, manifest, stages_of, token_batch, train_on

pytestmark = pytest.mark.node  # some seconds


def export(files: list[Path], run: Manifest, out: Path, *, run_id: str = "", tokenizer: Path | None = None) -> Gathered:
    found = of_stage_files(files, run, run_id)
    write_model(merged(found), run, out, tokenizer)
    return found


def trained(run: Manifest) -> list[StageReplica]:
    chain = stages_of(run)
    for step in range(3):
        train_on(chain, token_batch(run.model, seed=step))
        for stage in chain:
            stage.step(8 * (step + 1))
    return chain


def save(folder: Path, stage: StageReplica, peer: str = "peerA", run_id: str = "r" * 64, rounds: int = 3) -> Path:
    path = folder / f"{stage.part.stage}-{peer}.safetensors"
    save_stage(path, stage_state_dict(stage), StageLabel(run_id, stage.part.stage, rounds, 1000, peer))
    return path


def test_a_tokenizer_file_is_copied_and_a_wrong_one_refused(tmp_path):
    run = replace(manifest(), data=DataSpec(tokenizer="tok.json"))
    files = [save(tmp_path, stage) for stage in stages_of(run)]
    given = tmp_path / "tok.json"
    given.write_text('{"any": "file"}')
    export(files, run, tmp_path / "out", tokenizer=given)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"any": "file"}'
    export(files, run, tmp_path / "bare")
    assert not (tmp_path / "bare" / "tokenizer.json").exists()
    with pytest.raises(DataError, match=r"gone.json: cannot be read as a tokenizer"):
        export(files, run, tmp_path / "out", tokenizer=tmp_path / "gone.json")


def test_a_stage_file_comes_back_with_its_label(tmp_path):
    stage = stages_of(manifest())[1]
    label, tensors, average = load_stage(save(tmp_path, stage))
    assert label == StageLabel("r" * 64, 1, 3, 1000, "peerA") and average == {}
    assert {name: tuple(value.shape) for name, value in tensors.items()} == stage.shapes
    assert all(torch.equal(value, tensors[name]) for name, value in stage.named(stage.theta).items())
    slow = stage_state_dict(stage, stage.theta * 2)
    assert torch.equal(slow["model.layers.2.mlp.up_proj.weight"], 2 * tensors["model.layers.2.mlp.up_proj.weight"])


def test_replicas_of_a_stage_are_averaged(tmp_path):
    run = manifest()
    chain = stages_of(run)
    files = [save(tmp_path, stage) for stage in chain]
    moved = StageReplica(run, 1)
    for factor, peer in ((2.0, "peerB"), (6.0, "peerC")):
        moved.theta.copy_(chain[1].theta * factor)
        files.append(save(tmp_path, moved, peer, rounds=4))
    report = export(files, run, tmp_path / "out")
    assert sorted(copy.peer for copy in report.copies) == ["peerA", "peerA", "peerA", "peerB", "peerC"]
    mean = merged(report)
    for name, value in chain[1].named(chain[1].theta).items():
        torch.testing.assert_close(mean[name], 3 * value)
    for name, value in chain[0].named(chain[0].theta).items():
        assert torch.equal(mean[name], value)
    assert report.replicas == 3 and report.round == 4
    whole = chains(report)
    assert [names.count("peerA") for names, _ in whole] == [3, 2, 2], "each replica of stage 1 between the others"
    for (_, tensors), factor in zip(whole, (1.0, 2.0, 6.0), strict=True):
        for name, value in chain[1].named(chain[1].theta).items():
            torch.testing.assert_close(tensors[name], factor * value)
    assert spread(report) > 0.1 and spread(of_stage_files(files[:3], run)) == 0.0


def test_running_means_are_merged_by_how_much_of_their_window_they_have_seen(tmp_path):
    run = manifest()
    assert run.inner.average_share > 0.0
    half, few = (weight_of(run.inner.average_share, span, 1000) for span in (40, 0))
    most = weight_of(run.inner.average_share, 900, 1000)
    files = []
    for stage in stages_of(run):
        for factor, averaged, peer in ((2.0, 900, "peerA"), (5.0, 40, "peerB"), (11.0, 0, "peerC")):
            weights = stage_state_dict(stage)
            mean = {name: factor * value for name, value in weights.items()} if averaged else {}
            scaled = weights if averaged else {name: factor * value for name, value in weights.items()}
            label = StageLabel("r" * 64, stage.part.stage, 3, 1000, peer, averaged)
            files.append(tmp_path / f"{stage.part.stage}-{peer}.safetensors")
            save_stage(files[-1], scaled, label, mean)
    mean = merged(of_stage_files(files, run))
    last = merged(of_stage_files(files, run, last=True))
    plain = merged(of_stage_files(files, replace(run, inner=replace(run.inner, average_share=0.0))))
    for stage in stages_of(run):
        for name, value in stage.named(stage.theta).items():
            torch.testing.assert_close(mean[name], value * (2.0 * most + 5.0 * half + 11.0 * few) / (most + half + few))
            torch.testing.assert_close(last[name], value * (1.0 + 1.0 + 11.0) / 3.0)
            assert torch.equal(last[name], plain[name])


def test_files_that_do_not_make_a_model_are_refused(tmp_path):
    run = manifest()
    chain = stages_of(run)
    files = [save(tmp_path, stage) for stage in chain]
    with pytest.raises(
        DataError, match=r"no copy of model.layers.2.* parameters are missing\): a model needs a replica"
    ):
        export([files[0], files[2]], run, tmp_path / "out")
    with pytest.raises(DataError, match="no copy of model.embed_tokens.weight"):
        export([], run, tmp_path / "out")
    other = save(tmp_path, chain[1], "peerX", run_id="s" * 64)
    with pytest.raises(DataError, match=r"peerX.safetensors: belongs to run ssssssssssss, not to run rrrrrrrrrrrr"):
        export([*files, other], run, tmp_path / "out")
    with pytest.raises(DataError, match="belongs to run rrrrrrrrrrrr, not to run tttttttttttt"):
        export(files, run, tmp_path / "out", run_id="t" * 64)
    wider = replace(run, model=replace(TINY, ffn=64))
    with pytest.raises(DataError, match=r"has shape \(.*48.*\) where the manifest asks for \(.*64.*\)"):
        export(files, wider, tmp_path / "out")
    chain[0].theta[5] = torch.nan
    with pytest.raises(DataError, match="is not finite"):
        export([save(tmp_path, chain[0], "peerN")], run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_files_that_are_no_stage_files_are_refused(tmp_path):
    garbage = tmp_path / "garbage.safetensors"
    garbage.write_bytes(b"\xff" * 100)
    with pytest.raises(DataError, match=r"garbage.safetensors: not a stage file of swarmnode"):
        load_stage(garbage)
    with pytest.raises(DataError, match=r"gone.safetensors: cannot be read"):
        load_stage(tmp_path / "gone.safetensors")
    whole = save(tmp_path, stages_of(manifest())[0])
    whole.write_bytes(whole.read_bytes()[:-10])
    with pytest.raises(DataError, match="not a stage file"):
        load_stage(whole)
    import safetensors.torch

    safetensors.torch.save_file({"a": torch.zeros(1)}, tmp_path / "bare.safetensors")
    with pytest.raises(DataError, match=r"not a stage file of swarmnode .*run_id"):
        load_stage(tmp_path / "bare.safetensors")

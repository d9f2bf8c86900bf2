import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from swarmnode.app.local.model_source import WeightChoice, gather
from swarmnode.base.errors import DataError, UsageError
from swarmnode.model.export import stage_state_dict, write_model
from swarmnode.model.gather import Gathered, chains, merged, spread
from swarmnode.model.running_mean import weight_of
from swarmnode.model.stage import StageReplica
from swarmnode.run.manifest import DataSpec, Manifest, template
from swarmnode.run.manifest.folder import MANIFEST_FILE
from tests.support.saved_stage import save_left
from tests.support.tiny_model import TINY, manifest, stages_of, token_batch, train_on

pytestmark = pytest.mark.node  # some seconds

BYTES = replace(TINY, vocabulary=256)


def gathered(folder: Path, run: Manifest, *, last: bool = False) -> Gathered:
    """The stages that nodes with homes in `folder`, the folder of `run`, saved as they left."""
    (folder / MANIFEST_FILE).write_text(template(run))
    return gather(str(folder), "stages", lambda line: None, weights=WeightChoice(last))[0]


def trained(run: Manifest) -> list[StageReplica]:
    chain = stages_of(run)
    for step in range(3):
        train_on(chain, token_batch(run.model, seed=step))
        for stage in chain:
            stage.step(8 * (step + 1))
    return chain


def save(folder: Path, stage: StageReplica, peer: str = "peerA", **told: object) -> Path:
    return save_left(folder / peer, stage.part.stage, stage_state_dict(stage), peer, **told)  # type: ignore[arg-type]


def test_a_tokenizer_file_is_copied_and_a_wrong_one_refused(tmp_path):
    run = replace(manifest(BYTES), data=DataSpec(tokenizer="tok.json"))
    given = tmp_path / "tok.json"
    given.write_text('{"any": "file"}')
    tensors = {name: value for stage in stages_of(run) for name, value in stage_state_dict(stage).items()}
    write_model(tensors, run, tmp_path / "out", given)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"any": "file"}'
    write_model(tensors, run, tmp_path / "bare")
    assert not (tmp_path / "bare" / "tokenizer.json").exists()
    with pytest.raises(DataError, match=r"gone.json: cannot be read as a tokenizer"):
        write_model(tensors, run, tmp_path / "out", tmp_path / "gone.json")


def test_replicas_of_a_stage_are_averaged(tmp_path):
    run = manifest(BYTES)
    chain = trained(run)
    for stage in chain:
        save(tmp_path, stage)
    alone = gathered(tmp_path, run)
    moved = StageReplica(run, 1)
    for factor, peer in ((2.0, "peerB"), (6.0, "peerC")):
        moved.theta.copy_(chain[1].theta * factor)
        save(tmp_path, moved, peer, rounds=4)
    report = gathered(tmp_path, run)
    assert sorted(copy.peer for copy in report.copies) == ["peerA", "peerA", "peerA", "peerB", "peerC"]
    mean = merged(report)
    for name, value in chain[1].named(chain[1].theta).items():
        torch.testing.assert_close(mean[name], 3 * value)
    for name, value in chain[0].named(chain[0].theta).items():
        assert torch.equal(mean[name], value)
    assert report.replicas == 3 and report.round == 4 and report.samples == 1000 and report.run_id == "r" * 64
    whole = chains(report)
    assert [names.count("peerA") for names, _ in whole] == [3, 2, 2], "each replica of stage 1 between the others"
    for (_, tensors), factor in zip(whole, (1.0, 2.0, 6.0), strict=True):
        for name, value in chain[1].named(chain[1].theta).items():
            torch.testing.assert_close(tensors[name], factor * value)
    assert spread(report) > 0.1 and spread(alone) == 0.0


def test_a_stage_that_was_saved_under_way_is_no_part_of_the_model(tmp_path):
    """Its node was killed: it may be many rounds behind those that left."""
    run = manifest(BYTES)
    chain = stages_of(run)
    for stage in chain:
        save(tmp_path, stage)
    save(tmp_path, chain[1], "peerB", rounds=1, samples=10, left=False)
    assert {copy.peer for copy in gathered(tmp_path, run).copies} == {"peerA"}
    save(tmp_path, chain[1], "peerB", rounds=5, samples=2000)
    save(tmp_path, chain[1], "peerA", rounds=6, samples=3000, left=False)
    assert [copy.peer for copy in gathered(tmp_path, run).copies] == ["peerA", "peerA", "peerB"]


def test_running_means_are_merged_by_how_much_of_their_window_they_have_seen(tmp_path):
    run = manifest(BYTES)
    assert run.inner.average_share > 0.0
    half, few = (weight_of(run.inner.average_share, span, 1000) for span in (40, 0))
    most = weight_of(run.inner.average_share, 900, 1000)
    for stage in stages_of(run):
        for factor, averaged, peer in ((2.0, 900, "peerA"), (5.0, 40, "peerB"), (11.0, 0, "peerC")):
            weights = stage_state_dict(stage)
            mean = {name: factor * value for name, value in weights.items()} if averaged else None
            scaled = weights if averaged else {name: factor * value for name, value in weights.items()}
            save_left(tmp_path / peer, stage.part.stage, scaled, peer, mean=mean, span=averaged)
    mean = merged(gathered(tmp_path, run))
    last = merged(gathered(tmp_path, run, last=True))
    plain = merged(gathered(tmp_path, replace(run, inner=replace(run.inner, average_share=0.0))))
    for stage in stages_of(run):
        for name, value in stage.named(stage.theta).items():
            torch.testing.assert_close(mean[name], value * (2.0 * most + 5.0 * half + 11.0 * few) / (most + half + few))
            torch.testing.assert_close(last[name], value * (1.0 + 1.0 + 11.0) / 3.0)
            assert torch.equal(last[name], plain[name])


def test_saved_stages_that_do_not_make_a_model_are_refused(tmp_path):
    run = manifest(BYTES)
    chain = stages_of(run)
    for stage in (chain[0], chain[2]):
        save(tmp_path, stage)
    with pytest.raises(
        DataError, match=r"no copy of model.layers.2.* parameters are missing\): a model needs a replica"
    ):
        gathered(tmp_path, run)
    save(tmp_path, chain[1])
    with pytest.raises(DataError, match=r"has shape \(.*48.*\) where the manifest asks for \(.*64.*\)"):
        gathered(tmp_path, replace(run, model=replace(BYTES, ffn=64)))
    save(tmp_path, chain[1], "peerX", run_id="s" * 64)
    with pytest.raises(DataError, match=r"peerX/.*: belongs to run ssssssssssss, not to run rrrrrrrrrrrr; leave"):
        gathered(tmp_path, run)
    chain[0].theta[5] = torch.nan
    (tmp_path / "nan").mkdir()
    save(tmp_path / "nan", chain[0], "peerN")
    with pytest.raises(DataError, match="is not finite"):
        gathered(tmp_path / "nan", run)


def test_a_damaged_saved_stage_is_told_and_another_machines_is_taken(tmp_path):
    run = manifest(BYTES)
    chain = stages_of(run)
    for stage in chain:
        save(tmp_path, stage)
    (place,) = tmp_path.rglob("round-*-stage-1")
    part = json.loads((place / "stage-1.json").read_text())
    weights = place / part["files"][0]["name"]
    whole = weights.read_bytes()
    weights.write_bytes(b"\xff" + whole[1:])
    with pytest.raises(DataError, match=rf"{weights.name}: damaged: its SHA-256"):
        gathered(tmp_path, run)
    weights.write_bytes(whole[:-10])
    with pytest.raises(DataError, match="no copy of model.layers"):
        gathered(tmp_path, run)
    save(tmp_path, chain[1], "peerB")
    assert "peerB" in {copy.peer for copy in gathered(tmp_path, run).copies}
    (place / "stage-1.json").write_bytes(b"{")
    told: list[str] = []
    gather(str(tmp_path), "stages", told.append)
    assert [line for line in told if "stage-1.json is damaged (" in line]
    (tmp_path / "bare").mkdir()
    with pytest.raises(UsageError, match="no saved stage below"):
        gathered(tmp_path / "bare", run)


def test_a_home_of_an_earlier_version_gives_its_last_weights(tmp_path):
    """Its stages say neither their run nor whether the node left, and have no running mean."""
    run = manifest(BYTES)
    chain = trained(run)
    for stage in chain:
        place = save(tmp_path, stage)
        part = json.loads((path := place / f"stage-{stage.part.stage}.json").read_text())
        for field in ("run_id", "left", "averaged"):
            del part[field]
        path.write_text(json.dumps(part))
    found = gathered(tmp_path, run)
    assert found.run_id == "r" * 16
    last = merged(found)
    assert all(torch.equal(last[name], value) for stage in chain for name, value in stage_state_dict(stage).items())

"""What a run may use of a machine: files and buckets its user allowed, memory that is there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from swarmnode.app.daemon.preflight import checkpoints, usable_stages
from swarmnode.app.machine.stage_fit import FreeMemory, MachineMemory, free_memory, of_groups
from swarmnode.base.errors import HardwareFault, NotPermitted, UsageError
from swarmnode.model.device import autocasts
from swarmnode.model.memory_budget import CARD, Passes, memory_need, mode_of
from swarmnode.model.split import split, stages_of
from swarmnode.run.manifest import CheckpointSpec, DataSpec, Manifest, ModelSpec, PipelineSpec
from swarmnode.run.manifest.recipe import PRESETS
from swarmnode.train.node.limits import NodeRole
from tests.support.options import options

FILES = replace(PRESETS["tiny"], data=DataSpec(tokenizer="books.json"))
BUCKET = replace(PRESETS["tiny"], checkpoint=CheckpointSpec("s3://theirs/run"))
GIANT = Manifest(
    model=ModelSpec(layers=2, width=1 << 16, heads=512, kv_heads=512, ffn=1 << 18), pipeline=PipelineSpec(stages=2)
)


@pytest.mark.node
def test_a_run_on_files_is_fed_only_where_a_folder_is_open(capsys: pytest.CaptureFixture[str]) -> None:
    assert not usable_stages(options(), PRESETS["tiny"]).no_files
    found = usable_stages(options(), FILES)
    assert found.no_files and not found.unable
    assert "--data-root" in capsys.readouterr().err
    assert usable_stages(options(stage=1), FILES).no_files
    assert not usable_stages(options(data_root=Path("books")), FILES).no_files
    assert usable_stages(options(role=NodeRole.REPLICA), FILES)
    with pytest.raises(UsageError, match="--role replica"):
        usable_stages(options(stage=0, role=NodeRole.REPLICA), PRESETS["tiny"])
    with pytest.raises(NotPermitted, match=r"reads books\.json.*--data-root"):
        usable_stages(options(stage=0), FILES)
    with pytest.raises(NotPermitted, match="--data-root"):
        usable_stages(options(), replace(FILES, pipeline=replace(FILES.pipeline, stages=1)))


def test_a_bucket_is_used_only_when_the_user_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert checkpoints(options(), BUCKET) == ""
    assert "--use-bucket" in capsys.readouterr().err
    assert checkpoints(options(use_bucket=True), BUCKET) == "s3://theirs/run"
    assert checkpoints(options(checkpoints="/mine"), BUCKET) == "/mine"
    assert checkpoints(options(checkpoints="s3://mine/x", use_bucket=True), BUCKET) == "s3://mine/x"
    assert checkpoints(options(), PRESETS["tiny"]) == ""
    with pytest.raises(UsageError, match="names no bucket"):
        checkpoints(options(use_bucket=True), PRESETS["tiny"])


@pytest.mark.parametrize("stage", [None, 0, 1])
def test_a_stage_too_large_is_refused_with_bytes(stage: int | None) -> None:
    needed = min(memory_need(GIANT, part).host for part in split(GIANT.model, 2))
    assert needed > 1e12
    with pytest.raises(HardwareFault, match=r"needs .* GB of memory \(\d+ bytes\), and .* \(\d+ bytes\) are free by"):
        usable_stages(options(stage=stage), GIANT)


def test_a_smaller_stage_is_left_where_the_choice_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    run = replace(PRESETS["demo"], model=replace(PRESETS["demo"].model, vocabulary=100_000))
    mode = mode_of("cpu", autocast=autocasts("cpu"))
    needed = [memory_need(run, part, mode).host for part in stages_of(run)]
    allowed = free_memory().nbytes  # the machine has more than this little run needs
    assert max(needed) < allowed
    small, middle, large = sorted(range(3), key=needed.__getitem__)
    assert needed[small] < needed[middle] < needed[large]
    held = free_memory(1 << 50)
    assert held.bound != "--max-memory"
    for bound, unable in ((needed[small], {middle, large}), (needed[middle], {large}), (needed[large], set())):
        monkeypatch.setattr(
            "swarmnode.app.daemon.preflight.machine_memory",
            lambda device, most, n=bound: MachineMemory(replace(held, nbytes=n)),
        )
        assert usable_stages(options(), run).unable == unable
    monkeypatch.setattr(
        "swarmnode.app.daemon.preflight.machine_memory",
        lambda device, most: MachineMemory(replace(held, nbytes=needed[small] - 1)),
    )
    with pytest.raises(HardwareFault, match="no stage of this run fits"):
        usable_stages(options(), run)


def test_a_card_and_its_host_are_refused_each_with_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    run = PRESETS["small"]
    card = replace(CARD, optimizer_state="device")
    least_passes = Passes(1, by_layer=True)
    needs = [memory_need(run, part, card, least_passes) for part in stages_of(run)]
    device = max(need.device for need in needs)
    host = max(need.host for need in needs)
    monkeypatch.setattr("swarmnode.app.daemon.preflight.autocasts", lambda device, precision: True)

    def unable(device: int, host: int) -> frozenset[int]:
        memory = MachineMemory(FreeMemory(host, "the host"), FreeMemory(device, "the card"))
        monkeypatch.setattr("swarmnode.app.daemon.preflight.machine_memory", lambda where, most: memory)
        return usable_stages(options(device="cuda", optimizer_state="device"), run).unable

    assert unable(device, host) == frozenset()
    assert unable(device - 1, host) == {stage for stage, need in enumerate(needs) if need.device == device}
    least = min(need.device for need in needs)
    with pytest.raises(HardwareFault, match=rf"\({least} bytes\), and .* \({least - 1} bytes\) are free by the card"):
        unable(least - 1, host)
    least = min(need.host for need in needs)
    with pytest.raises(HardwareFault, match=rf"\({least} bytes\), and .* \({least - 1} bytes\) are free by the host"):
        unable(device, least - 1)


def test_the_users_own_limit_counts() -> None:
    free = free_memory(1)
    assert (free.nbytes, free.bound) == (0, "--max-memory")
    with pytest.raises(HardwareFault, match="--max-memory"):
        usable_stages(options(limits={"max-memory": "1MB"}), PRESETS["tiny"])


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    def group(place: Path, limit: str, used: int, cache: int) -> None:
        place.mkdir(parents=True, exist_ok=True)
        (place / "memory.max").write_text(limit)
        (place / "memory.current").write_text(f"{used}\n")
        (place / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")

    group(tmp_path / "a" / "b", "1000\n", 700, 50)
    group(tmp_path / "a", "max\n", 900, 0)
    assert list(of_groups(tmp_path, "/a/b")) == [(str(tmp_path / "a" / "b"), 350)]
    group(tmp_path / "a", "950\n", 900, 0)
    assert min(nbytes for _, nbytes in of_groups(tmp_path, "/a/b")) == 50, "of a group above"
    old = tmp_path / "memory" / "c"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text(str((1 << 63) - 4096))
    (old / "memory.usage_in_bytes").write_text("5")
    assert list(of_groups(tmp_path, "/c")) == [], "no limit"
    (old / "memory.limit_in_bytes").write_text("105")
    assert list(of_groups(tmp_path, "/c")) == [(str(old), 100)]
    assert list(of_groups(tmp_path / "nothing", "")) == []

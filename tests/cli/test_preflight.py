"""A node that cannot work says so before anything is announced: data, tokenizer, disk."""

import asyncio
from dataclasses import replace
from pathlib import Path

from swarmnode.app.daemon.options import NodeOptions
from swarmnode.app.daemon.preflight import check_can_work
from swarmnode.app.machine.stage_fit import FreeMemory, MachineMemory, StageFit
from swarmnode.base.errors import DataError, DiskFull, LocalFault, NotPermitted, SwarmnodeError
from swarmnode.model.memory_budget import CPU
from swarmnode.run.manifest import DataSpec, Manifest, ModelSpec
from swarmnode.run.manifest.recipe import PRESETS
from tests.support.options import options as node_options

TINY = PRESETS["tiny"]
VAST = replace(TINY, model=ModelSpec(layers=64, width=1 << 17, heads=64, kv_heads=64, ffn=1 << 19, vocabulary=256))


def options(folder: Path, **more: object) -> NodeOptions:
    return node_options(folder, **({"data_root": folder} | more))


def fails(manifest: Manifest, asked: NodeOptions, unable: frozenset[int] = frozenset()) -> SwarmnodeError | None:
    try:
        fit = StageFit(unable, (), MachineMemory(FreeMemory(0, "test")), no_files=False, mode=CPU)
        asyncio.run(check_can_work(asked, manifest, fit))
    except SwarmnodeError as error:
        return error
    return None


def test_the_tokenizer_is_opened_by_whoever_may_feed(tmp_path: Path) -> None:
    run = replace(TINY, data=DataSpec(tokenizer="none.json"))
    found = fails(run, options(tmp_path))
    assert isinstance(found, DataError) and "none.json" in str(found)
    assert fails(run, options(tmp_path, stage=1)) is None, "it never reads the text"
    assert fails(run, options(tmp_path), frozenset({0})) is None
    assert isinstance(fails(run, options(tmp_path, stage=0, data_root=None)), NotPermitted)


def test_a_disk_that_is_too_small_is_told_with_path_and_bytes(tmp_path: Path) -> None:
    found = fails(VAST, options(tmp_path, stage=1))
    assert isinstance(found, DiskFull) and found.exit_code == 74
    assert str(tmp_path / "home") in str(found) and " bytes (" in str(found) and "--home" in str(found)
    saving = fails(replace(TINY, model=VAST.model), options(tmp_path, stage=1, checkpoints=str(tmp_path / "saved")))
    assert isinstance(saving, DiskFull)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    found = fails(TINY, options(tmp_path, stage=1))
    assert isinstance(found, LocalFault) and str(tmp_path / "home") in str(found)
    (tmp_path / "file").write_text("a file")
    found = fails(TINY, options(tmp_path, stage=1, home=tmp_path / "h", checkpoints=str(tmp_path / "file" / "x")))
    assert isinstance(found, LocalFault) and "--checkpoints" in str(found)


def test_nothing_is_wrong_where_all_is_there(tmp_path: Path) -> None:
    assert fails(TINY, options(tmp_path, checkpoints=str(tmp_path / "saved"))) is None
    assert not any((tmp_path / "saved").iterdir()) and list((tmp_path / "cache").iterdir()), "the text is tokenised"

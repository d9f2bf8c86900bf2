"""Folders that an earlier version wrote are read: kept_before.zip is a home and a checkpoint of commit d9c92553."""

import zipfile
from pathlib import Path

import numpy as np
import pytest

from swarmnode.app.machine.checkup import find_resumptions
from swarmnode.app.machine.folder_store import FolderStore
from swarmnode.base.ports import State
from swarmnode.keep.recovery import checkpoint_io
from swarmnode.keep.recovery.checkpoint import Origin
from swarmnode.keep.recovery.resumption import SavedStages
from swarmnode.net.membership.state_line import StateLine
from tests.recovery.test_checkpoint import PEERS, RUN, run_of
from tests.support.fake_telemetry import Quiet

SECTIONS = ("theta", "phi", "momentum", "exp_avg", "exp_avg_sq")
NAMES = (("model.embed_tokens.weight", "model.layers.0.w"), ("model.layers.1.w", "lm_head.weight"))
Shapes = dict[str, dict[str, tuple[int, ...]]]


def shapes_of(*names: str) -> Shapes:
    return {section: dict.fromkeys(names, (2, 3)) for section in SECTIONS}


def numbers(state: State, section: str) -> list[float]:
    return [float(one) for one in np.frombuffer(state.sections[section], "<f4")]


def of(section: str, *stages: int) -> list[float]:
    """The numbers that it wrote: 0 to 11, and more by section and stage."""
    return [at + 100.0 * SECTIONS.index(section) + 1000.0 * stage for stage in stages for at in range(12)]


@pytest.fixture
def before(tmp_path: Path) -> Path:
    with zipfile.ZipFile(Path(__file__).parent / "kept_before.zip") as kept:
        kept.extractall(tmp_path)
    return tmp_path


async def test_a_node_goes_on_from_the_stages_that_an_earlier_version_saved(before: Path) -> None:
    saved = SavedStages(FolderStore(before / "saved"), Origin.of(run_of(2), RUN))
    await saved.look()
    for stage in (0, 1):
        newest = saved.newest(stage)
        assert newest is not None and newest.checkpoint.samples == 704 and newest.line(stage) == StateLine(3, 500)
        state = await newest.load(shapes_of(*NAMES[stage]), Quiet(), stage)
        assert all(numbers(state, section) == of(section, stage) for section in SECTIONS) and state.inner_steps == 7


async def test_a_run_goes_on_from_a_checkpoint_of_an_earlier_version_with_its_stages_cut_anew(before: Path) -> None:
    (found,) = await find_resumptions(str(before / "checkpoints"), RUN)
    assert found.checkpoint.round == 12 and dict(found.checkpoint.progress) == {PEERS[0]: 640, PEERS[1]: 64}
    await checkpoint_io.verify(found.store, found.base, found.checkpoint)
    state = await found.load(shapes_of(*NAMES[0], *NAMES[1]), Quiet(), 0)
    assert all(numbers(state, section) == of(section, 0, 1) for section in SECTIONS)
    blocks = found.blocks(run_of(2))
    assert (blocks.finished_below, list(blocks.finished)) == (9, [11, 12])

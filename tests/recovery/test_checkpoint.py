"""Checkpoints without nodes: what is decided, what is written, what is refused."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.app.machine.folder_store import FolderStore
from swarmnode.base.errors import DataError, LocalFault
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.ports import State
from swarmnode.base.wire import record_pb2
from swarmnode.keep.recovery import checkpoint as form
from swarmnode.keep.recovery import checkpoint_io, tensorfile
from swarmnode.keep.recovery.checkpoint import Checkpoint, Origin
from swarmnode.keep.recovery.checkpoint_io import ReplicaHoldings
from swarmnode.keep.recovery.resumption import EarlierCut, SavedStages
from swarmnode.model.section import section_shapes
from swarmnode.model.split import split
from swarmnode.net.membership.progress import to_message
from swarmnode.run.manifest import DataSpec, GossipSpec, InnerSpec, Manifest, ModelSpec, PipelineSpec

pytestmark = pytest.mark.node  # some seconds

RUN = RunId("ab" * 32)
Make = tuple[str, str]  # inner.optimizer, gossip.method
FULL: Make = ("adamw", "noloco")  # has every section whole
LEAN: Make = ("muon", "average")
MODEL = ModelSpec(layers=5, width=32, heads=4, kv_heads=2, ffn=48, context=16, vocabulary=50)
PEERS = [PeerId(f"12D3KooWpeer{i:08d}") for i in range(6)]


def run_of(stages: int, make: Make = FULL) -> Manifest:
    inner = InnerSpec(optimizer=make[0])
    gossip = GossipSpec(method=make[1], codec="bf16")
    return Manifest(model=MODEL, pipeline=PipelineSpec(stages=stages), inner=inner, gossip=gossip)


def shapes_of(stages: int, stage: int, make: Make = FULL) -> dict[str, dict[str, tuple[int, ...]]]:
    return section_shapes(run_of(stages, make), split(MODEL, stages)[stage])


def numbers(section: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    seed = int.from_bytes(hashlib.sha256(f"{section} {name}".encode()).digest()[:4], "big")
    return np.random.default_rng(seed).random(shape, dtype=np.float32)


def state_of(stages: int, stage: int, steps: int = 7, make: Make = FULL) -> State:
    """A state in which every parameter has numbers of its own, wherever it lies."""
    sections = {
        section: memoryview(np.concatenate([numbers(section, n, s).ravel() for n, s in shapes.items()])).cast("B")  # type: ignore[arg-type]
        for section, shapes in shapes_of(stages, stage, make).items()
    }
    return State(sections, inner_steps=steps, gradient_norm=1.5)


def holding(stage: int, samples: int = 640) -> ReplicaHoldings:
    progress = to_message({PEERS[0]: samples, PEERS[1]: 64})
    blocks = record_pb2.Blocks(finished_below=9, finished=[11, 12]) if stage == 0 else record_pb2.Blocks()
    return ReplicaHoldings(stage, 12, PEERS[stage], progress, blocks)


async def save(
    store: FolderStore, stages: int, label: str = "round-000000012", shard_nbytes: int = 1 << 16, make: Make = FULL
) -> Checkpoint:
    origin = Origin.of(run_of(stages, make), RUN)
    made = None
    for stage in range(stages):
        assert made is None, "not complete before the last stage"
        state = state_of(stages, stage, make=make)
        shapes = shapes_of(stages, stage, make)
        await checkpoint_io.save_stage(
            store, form.place(RUN, label), state, shapes, holding(stage), shard_nbytes=shard_nbytes
        )
        made = await checkpoint_io.complete(store, origin, label)
    assert made is not None
    return made


async def test_a_home_keeps_one_state_of_a_stage_unless_an_older_one_has_more_samples(tmp_path: Path) -> None:
    """Members save every few minutes: what is superseded takes no disk."""
    saved = SavedStages(FolderStore(tmp_path), Origin.of(run_of(2), RUN))

    async def samples_kept(stage: int, round_index: int, samples: int) -> list[tuple[int, int]]:
        await saved.save(
            state_of(2, stage),
            shapes_of(2, stage),
            stage=stage,
            round_index=round_index,
            peer=PEERS[0],
            progress=to_message({PEERS[0]: samples}),
        )
        await saved.look()
        return [(one.checkpoint.parts[0].stage, one.checkpoint.samples) for one in saved.found]

    assert await samples_kept(0, 1, 100) == [(0, 100)]
    assert await samples_kept(0, 2, 200) == [(0, 200)]
    assert await samples_kept(1, 3, 300) == [(1, 300), (0, 200)]
    assert await samples_kept(1, 1, 50) == [(1, 300), (0, 200), (1, 50)], "a run that began again"
    assert await samples_kept(1, 2, 60) == [(1, 300), (0, 200), (1, 60)]


async def test_a_home_is_rid_of_former_cuts_and_of_what_was_half_written(tmp_path: Path) -> None:
    async def saved_in(cut: int, round_index: int, earlier: int | None = None) -> list[str]:
        before = None if earlier is None else EarlierCut(earlier, run_of(2), 0)
        stages = SavedStages(FolderStore(tmp_path), Origin.of(run_of(2), RUN), cut, before)
        state = state_of(2, 1)
        shapes = shapes_of(2, 1)
        progress = to_message({PEERS[0]: 100 * round_index})
        await stages.save(state, shapes, stage=1, round_index=round_index, peer=PEERS[0], progress=progress)
        return sorted(path.name for path in tmp_path.glob("*/*"))

    first = await saved_in(0, 1)
    (path,) = tmp_path.rglob("stage-1.json")
    path.unlink()
    assert await saved_in(0, 2) == ["round-000000002-stage-1"] != first, "what was half written is gone"
    both = ["round-000000002-stage-1", "round-000000003-cut-1-stage-1"]
    assert await saved_in(1, 3, earlier=0) == both, "the cut before is read again"
    assert await saved_in(2, 4, earlier=1) == ["round-000000003-cut-1-stage-1", "round-000000004-cut-2-stage-1"]
    assert len(await saved_in(1, 3, earlier=0)) == 2, "a later cut, of which this process has not heard, stays"


class Killed(Exception):
    pass


class UntilKilled(FolderStore):
    """A process that is killed after `writes` writes: it deletes nothing any more."""

    def __init__(self, folder: Path, writes: int) -> None:
        super().__init__(folder)
        self.writes = writes

    async def write(self, name: str, parts: Sequence[bytes | memoryview]) -> str:
        self.writes -= 1
        if self.writes < 0:
            raise Killed
        return self._write(name, parts)  # no thread that would outlive the process

    async def delete(self, name: str) -> None:
        if self.writes >= 0:
            await super().delete(name)


@pytest.mark.parametrize("writes", range(6))
async def test_a_node_killed_while_it_saves_a_stage_again_in_a_round_has_the_one_before(
    tmp_path: Path, writes: int
) -> None:
    """As a machine that is taken away while its node leaves: its last periodic save is often of the same round."""

    async def save(store: FolderStore, steps: int, samples: int, *, left: bool = False) -> None:
        saved = SavedStages(store, Origin.of(run_of(2), RUN))
        await saved.look()
        state = state_of(2, 1, steps)
        for name, section in state.sections.items():
            state.sections[name] = (np.frombuffer(section, "<f4") + np.float32(steps)).data.cast("B")  # type: ignore[index]
        progress = to_message({PEERS[0]: samples})
        kept = {"stage": 1, "round_index": 3, "peer": PEERS[0], "progress": progress, "left": left}
        await saved.save(state, shapes_of(2, 1), **kept)  # type: ignore[arg-type]

    async def newest() -> tuple[int, int]:
        saved = SavedStages(FolderStore(tmp_path), Origin.of(run_of(2), RUN))
        await saved.look()
        (one,) = saved.found
        await checkpoint_io.verify(one.store, one.base, one.checkpoint)
        return one.checkpoint.samples, one.checkpoint.parts[0].inner_steps

    await save(FolderStore(tmp_path), 7, 300)
    with pytest.raises(Killed):
        await save(UntilKilled(tmp_path, writes), 8, 310, left=True)
    assert await newest() == (300, 7)
    await save(FolderStore(tmp_path), 9, 310, left=True)
    assert await newest() == (310, 9)
    await save(FolderStore(tmp_path), 9, 310, left=True)
    assert await newest() == (310, 9), "at equal samples the later one stays"


@pytest.mark.parametrize("raw", [b"", b"{", b"[" * 3000, b'{"stage": 1e999, "round": []}', b"\xff" * 100, None])
async def test_a_damaged_saved_state_is_told_once_and_left_out(
    raw: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = SavedStages(FolderStore(tmp_path), Origin.of(run_of(2), RUN))
    for stage in (0, 1):
        await saved.save(
            state_of(2, stage),
            shapes_of(2, stage),
            stage=stage,
            round_index=1,
            peer=PEERS[0],
            progress=to_message({PEERS[0]: 100}),
        )
    (path,) = tmp_path.rglob("stage-1.json")
    path.unlink()
    if raw is not None:
        path.write_bytes(raw)
    await saved.look()
    await saved.look()
    assert [one.checkpoint.parts[0].stage for one in saved.found] == [0]
    told = capsys.readouterr().err
    assert told.count("stage-1.json is damaged (") == (raw is not None), told


# ---- decisions


@given(st.integers(0, 200), st.integers(0, 200), st.integers(1, 50))
def test_a_checkpoint_is_due_at_the_newest_multiple_after_the_last(done: int, saved: int, every: int) -> None:
    due = form.due(done, saved, every)
    multiples = [r for r in range(saved + 1, done + 1) if r % every == 0]
    assert due == (multiples[-1] if multiples else None)


@given(st.sets(st.sampled_from(PEERS), min_size=1), st.integers(0, 40), st.permutations(PEERS))
def test_everybody_names_the_same_saver(able: set[PeerId], number: int, shuffled: Sequence[PeerId]) -> None:
    label = form.label(number)
    order = form.order(RUN, 1, label, able)
    assert order == form.order(RUN, 1, label, [peer for peer in shuffled if peer in able]) and set(order) == able
    at_once = [peer for peer in order if form.turn(order, peer, able, 0.0, 10.0)[0]]
    assert at_once == order[:1], "one saves, the others wait"
    for rank, peer in enumerate(order):
        assert form.turn(order, peer, able, 10.0 * rank, 10.0)[0], "each one's time comes"
        assert form.turn(order, peer, able - set(order[:rank]), 0.0, 10.0)[0], "at once when those before are gone"


def test_the_work_goes_round() -> None:
    first = {form.order(RUN, 0, form.label(number), PEERS)[0] for number in range(100)}
    assert first == set(PEERS)


@given(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)), st.integers(1, 5))
def test_the_budget_keeps_the_newest_and_never_what_is_under_way(whole: set[int], torn: set[int], keep: int) -> None:
    complete = [form.label(n) for n in whole]
    present = [form.label(n) for n in whole | torn]
    gone = form.expired(complete, present, keep)
    kept = sorted(set(present) - set(gone))
    assert sorted(complete)[-keep:] == [label for label in kept if label in complete]
    newest = max(complete, default="")
    assert all(label > newest for label in kept if label not in complete) or not complete


def test_labels_are_in_the_order_of_rounds() -> None:
    labels = [form.label(2), form.label(10), form.label(10, final=True), form.label(11)]
    assert labels == sorted(labels)


# ---- there and back


@pytest.mark.parametrize(("saved", "loaded"), [(3, 3), (3, 1), (1, 5), (2, 3), (5, 2)])
async def test_any_cut_loads_any_other(tmp_path: Path, saved: int, loaded: int) -> None:
    store = FolderStore(tmp_path)
    await save(store, saved)
    (base, checkpoint), *rest = checkpoint_io.usable(await checkpoint_io.find(store), "here")
    assert not rest and checkpoint.samples == 704 and checkpoint.round == 12
    for stage in range(loaded):
        state = await checkpoint_io.load_stage(store, base, checkpoint, shapes_of(loaded, stage))
        wanted = state_of(loaded, stage)
        assert {k: bytes(v) for k, v in state.sections.items()} == {k: bytes(v) for k, v in wanted.sections.items()}
        assert state.inner_steps == 7 and state.gradient_norm == 1.5


@pytest.mark.parametrize(
    ("saved", "loaded", "zero"),
    [
        (FULL, LEAN, set()),
        (LEAN, LEAN, set()),
        (LEAN, FULL, {"momentum", "exp_avg", "exp_avg_sq"}),
        (("adamw", "average"), FULL, {"momentum"}),
        (("muon", "noloco"), FULL, {"exp_avg", "exp_avg_sq"}),
    ],
)
async def test_another_optimizer_begins_with_what_was_kept_for_it(
    tmp_path: Path, saved: Make, loaded: Make, zero: set[str]
) -> None:
    """Steps are counted anew where both moments are, or the correction for their bias would be missing."""
    store = FolderStore(tmp_path)
    checkpoint = await save(store, 2, make=saved)
    for stages, stage in ((2, 1), (1, 0)):
        shapes = shapes_of(stages, stage, loaded)
        assert form.anew(checkpoint, shapes) == zero
        state = await checkpoint_io.load_stage(store, f"{checkpoint.place}/", checkpoint, shapes)
        wanted = state_of(stages, stage, make=loaded)
        assert list(state.sections) == list(wanted.sections)
        for name, section in state.sections.items():
            expected = bytes(section.nbytes) if name in zero else bytes(wanted.sections[name])
            assert bytes(section) == expected, name
        assert state.inner_steps == (0 if "exp_avg" in zero else 7)


async def test_the_files_are_safetensors_to_others(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    checkpoint = await save(FolderStore(tmp_path), 2, shard_nbytes=8192)
    seen: dict[str, np.ndarray] = {}
    for path in tmp_path.rglob("theta-*.safetensors"):
        seen |= safetensors.load_file(path)
    shapes = shapes_of(1, 0)["theta"]
    assert {name: value.shape for name, value in seen.items()} == shapes
    assert all(np.array_equal(value, numbers("theta", name, value.shape)) for name, value in seen.items())
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors")) == checkpoint.nbytes
    assert max(file.nbytes for file in checkpoint.files if len(file.tensors) > 1) < 8192 + 2048, "shards are bounded"
    assert not list(tmp_path.rglob("*.part"))


async def test_aligned_tensors_are_read_in_place(tmp_path: Path) -> None:
    """Any fault of the file is named as when it is read in one piece."""
    store = FolderStore(tmp_path)
    sha256 = await store.write("a", [b"head", b"data"])
    head = bytearray(4)
    data = bytearray(4)
    assert await store.fill("a", [memoryview(head), memoryview(data)], sha256)
    assert (head, data) == (b"head", b"data")
    assert not await store.fill("b", [memoryview(head)], sha256)
    with pytest.raises(DataError, match="8 bytes; expected 4"):
        await store.fill("a", [memoryview(head)], sha256)
    with pytest.raises(DataError, match="damaged"):
        await store.fill("a", [memoryview(head), memoryview(data)], "0" * 64)
    tensors = {"x": (2, 3), "y": (5,)}
    good = tensorfile.header(tensors, {"format": "pt"})
    tensorfile.check_head(good, tensors, "here")
    for bad, said in ((good[:-3], tensors), (good, {"x": (3, 2), "y": (5,)}), (good, {"x": (2, 3)}), (b"", tensors)):
        with pytest.raises(DataError, match="here: its header"):
            tensorfile.check_head(bad, said, "here")


async def test_blocks_and_samples_go_on(tmp_path: Path) -> None:
    checkpoint = await save(FolderStore(tmp_path), 2)
    same = checkpoint_io.blocks_of(checkpoint, checkpoint.origin.block_samples)
    assert same.finished_below == 9 and list(same.finished) == [11, 12]
    halves = checkpoint_io.blocks_of(checkpoint, checkpoint.origin.block_samples // 2)
    assert halves.finished_below == 18 and not halves.finished
    assert checkpoint_io.progress_of(checkpoint).total == 704


async def test_old_ones_go_and_the_newest_stay(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    for number in (10, 20, 30, 40):
        await save(store, 2, form.label(number))
    await store.write(f"{form.place(RUN, form.label(15))}/stage-0.json", [b"never finished"])
    await store.write(f"{form.place(RUN, form.label(50))}/stage-0.json", [b"under way"])
    assert await checkpoint_io.prune(store, RUN, 2) == [form.label(10), form.label(15), form.label(20)]
    left = {name.split("/")[1] for name in await store.names()}
    assert left == {form.label(30), form.label(40), form.label(50)}
    good = checkpoint_io.usable(await checkpoint_io.find(store), "here")
    assert [checkpoint.label for _, checkpoint in good] == [form.label(40), form.label(30)]


async def test_the_final_checkpoint_is_the_newest_of_as_many_samples(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    labels = [form.label(8), form.label(8, final=True)]
    for label in labels:
        await save(store, 2, label)
    good = checkpoint_io.usable(await checkpoint_io.find(store), "here")
    assert [checkpoint.label for _, checkpoint in good] == labels[::-1]
    assert len({checkpoint.samples for _, checkpoint in good}) == 1


# ---- what goes wrong


class Failing(FolderStore):
    """A disk that is full after `room` bytes, or loses and tears what it said it had written."""

    room = 1 << 40

    async def write(self, name: str, parts: Sequence[bytes | memoryview]) -> str:
        nbytes = sum(memoryview(part).nbytes for part in parts)
        if nbytes > self.room:
            raise LocalFault(f"cannot write {name}: No space left on device; free space or save elsewhere")
        self.room -= nbytes
        return self._write(name, parts)  # no thread that would outlive the process


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
async def test_a_full_disk_leaves_the_one_before(tmp_path: Path, share: float) -> None:
    store = Failing(tmp_path)
    before = await save(store, 1, form.label(10))
    store.room = int(share * before.nbytes)
    place = form.place(RUN, form.label(20))
    with pytest.raises(LocalFault, match="No space left on device"):
        await checkpoint_io.save_stage(store, place, state_of(1, 0), shapes_of(1, 0), holding(0), shard_nbytes=8192)
    assert not [name for name in await store.names() if form.label(20) in name], "what was written is gone again"
    _, good = checkpoint_io.usable(await checkpoint_io.find(store), "here")[0]
    assert good == before
    await checkpoint_io.verify(store, f"{before.place}/", before)


def tree(root: Path, **changed: object) -> None:
    root.write_text(json.dumps(json.loads(root.read_text()) | changed))


TORN: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "a shard is cut off": (lambda root, shard: shard.write_bytes(shard.read_bytes()[:-5]), "{shard} has"),
    "a shard is lost": (lambda root, shard: shard.unlink(), "{shard} is missing"),
    "the manifest is cut off": (lambda root, shard: root.write_bytes(root.read_bytes()[:-20]), "not JSON"),
    "the manifest is of another format": (lambda root, shard: tree(root, format=99), "format 99"),
    "the manifest lacks a stage": (
        lambda root, shard: tree(root, parts=json.loads(root.read_text())["parts"][:1]),
        "holds stages",
    ),
}


@pytest.mark.parametrize("what", TORN)
async def test_a_torn_one_is_passed_over_for_the_one_before(tmp_path: Path, what: str) -> None:
    store = FolderStore(tmp_path)
    await save(store, 2, form.label(10))
    await save(store, 2, form.label(20))
    folder = tmp_path / form.place(RUN, form.label(20))
    harm, complaint = TORN[what]
    shard = sorted(folder.glob("exp_avg-*.safetensors"))[0]
    harm(folder / form.ROOT, shard)
    found = await checkpoint_io.find(store)
    assert any(each.fault is not None and complaint.format(shard=shard.name) in each.fault for each in found)
    assert checkpoint_io.usable(found, "here")[0][1].label == form.label(10)


async def test_one_flipped_bit_is_found(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    checkpoint = await save(store, 2)
    path = sorted(tmp_path.rglob("momentum-*.safetensors"))[-1]
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 4
    path.write_bytes(raw)
    for work in (
        checkpoint_io.verify(store, f"{checkpoint.place}/", checkpoint),
        checkpoint_io.load_stage(store, f"{checkpoint.place}/", checkpoint, shapes_of(1, 0)),
    ):
        with pytest.raises(DataError, match=rf"{path.name}: damaged: its SHA-256 is"):
            await work


async def test_another_model_is_refused_in_one_line(tmp_path: Path) -> None:
    checkpoint = await save(FolderStore(tmp_path), 2)
    form.check_fits(checkpoint, run_of(5), "here")
    wider = replace(run_of(2), model=replace(MODEL, ffn=64))
    with pytest.raises(DataError, match=r"here: a checkpoint of another model: model.ffn is 48 there and 64 in"):
        form.check_fits(checkpoint, wider, "here")
    with pytest.raises(DataError, match="another language"):
        form.check_fits(checkpoint, replace(run_of(2), data=DataSpec(tokenizer="other.json")), "here")
    narrow = replace(run_of(2).pipeline, boundary="subspace", boundary_rank=8)
    with pytest.raises(DataError, match=r"not kept in the subspace of this manifest \(rank 8 of seed \d+; there: none"):
        form.check_fits(checkpoint, replace(run_of(2), pipeline=narrow), "here")
    kept = replace(checkpoint, origin=form.Origin.of(replace(run_of(2), pipeline=narrow), RUN))
    form.check_fits(kept, replace(run_of(2), pipeline=narrow), "here")
    form.check_fits(kept, run_of(2), "here")  # the way out: an ordinary model
    assert form.checkpoint_of(form.to_text(kept), "here") == kept
    with pytest.raises(DataError, match="another model"):
        form.sources(checkpoint, {"model.layers.9.mlp.up_proj.weight": (48, 32)}, "theta")
    with pytest.raises(DataError, match="another model"):
        form.sources(checkpoint, {"model.layers.1.mlp.up_proj.weight": (64, 32)}, "theta")


async def test_nothing_there_and_several_runs_are_said(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    with pytest.raises(DataError, match="here: no checkpoint there"):
        checkpoint_io.usable(await checkpoint_io.find(store), "here")
    await save(store, 2)
    other = RunId("cd" * 32)
    for path in list((tmp_path / RUN[:16]).rglob("*")):
        if path.is_file():
            to = tmp_path / other[:16] / path.relative_to(tmp_path / RUN[:16])
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(path.read_bytes().replace(RUN.encode(), other.encode()))
    found = await checkpoint_io.find(store)
    with pytest.raises(DataError, match="checkpoints of 2 runs; give the folder of one of them: abab"):
        checkpoint_io.usable(found, "here")
    assert checkpoint_io.usable(found, "here", other)[0][1].origin.run_id == other


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("samples", -1),
        ("round", 1.5),
        ("label", None),
        ("progress", {"a": "b"}),
        ("parts", [{"files": 3}]),
        ("origin", {"model": {"layers": "many"}}),
    ],
)
async def test_each_field_is_checked(tmp_path: Path, key: str, value: object) -> None:
    checkpoint = await save(FolderStore(tmp_path), 1)
    tree = json.loads(form.to_text(checkpoint))
    assert form.checkpoint_of(json.dumps(tree).encode(), "x") == checkpoint
    with pytest.raises(DataError, match="x: "):
        form.checkpoint_of(json.dumps(tree | {key: value}).encode(), "x")


def test_a_tensor_that_lies_about_its_place_is_refused() -> None:
    good = tensorfile.header({"a": (2, 3)}, {}) + bytes(24)
    assert tensorfile.read(good, "x")[0]["a"][0] == (2, 3)
    with pytest.raises(DataError, match="cut off"):
        tensorfile.read(good[:-1], "x")
    with pytest.raises(DataError, match="not float32"):
        tensorfile.read(good.replace(b'"F32"', b'"F16"'), "x")
    with pytest.raises(DataError, match="a header of"):
        tensorfile.read(b"\xff" * 7 + b"\0" + bytes(100), "x")


async def test_names_lead_nowhere_else(tmp_path: Path) -> None:
    for name in ("../x", "/etc/x", "a//b", "a/../b"):
        with pytest.raises(AssertionError, match="bad blob name"):
            await FolderStore(tmp_path).write(name, [b""])

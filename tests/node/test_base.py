"""A run that starts from a pretrained model: each node reads its own stage's part of it, and the swarm goes on from
there."""

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from benchmarks.memory_network import MemoryTransport
from swarmnode.app.local.pretrained import Pretrained, lay_out
from swarmnode.base.errors import DataError, Unavailable
from swarmnode.base.identity import Identity
from swarmnode.data.base_index import BaseIndex
from swarmnode.data.chunk_store import ChunkCache
from swarmnode.keep.transfer.chunk_set import ChunkServer, ServeLimits, SetPorts, base_set_of
from swarmnode.model.split import parameter_shapes, stages_of
from swarmnode.net.transport.web import AddressRules, HttpRangeReader
from swarmnode.run.manifest import Manifest, ModelSpec
from tests.support.fake_telemetry import Quiet
from tests.support.published_model import llama, start_from
from tests.support.village import RUN, Numbers, Village, Villager, cause, manifest, told, village
from tests.support.web_folder import web_folder

POINT = Identity.of_seed(b"p" * 32).peer_id


def run_of(model: ModelSpec, index: BaseIndex, stages: int) -> Manifest:
    made = manifest(stages=stages, method="average", window_max=2, round_samples=32)
    return replace(made, model=model, base=replace(made.base, index=index.digest.hex()))


def published(folder: Path, **ways: Any) -> tuple[LlamaForCausalLM, Pretrained, Manifest, Path]:
    """(a model as it is published in `folder`, what `init --from` makes of it, the run, where the run's files are)."""
    model = llama(folder / "model", **ways)
    made = start_from(folder / "model", manifest())
    return model, made, run_of(made.recipe.manifest.model, made.index, 3), lay_out(folder / "run", made)


def meeting_point(v: Village, folder: Path, cache: Path) -> MemoryTransport:
    """A member that trains nothing and gives the chunks of the model in `folder`."""
    transport = MemoryTransport(v.network, POINT, RUN)
    quiet = Quiet()
    base = base_set_of(v.run, ChunkCache(cache), folder, quiet)
    asyncio.get_running_loop().create_task(base.open())
    ChunkServer([base], transport, quiet, ServeLimits(yields=False)).serve()
    return transport


def volunteer(
    v: Village, cache: Path, folder: Path | None = None, *, knows: bool = True, web: HttpRangeReader | None = None
) -> Callable[[Quiet], SetPorts[BaseIndex]]:
    def made(quiet: Quiet) -> SetPorts[BaseIndex]:
        return SetPorts(base_set_of(v.run, ChunkCache(cache), folder, quiet), web, lambda: [POINT] if knows else [])

    return made


def received(person: Villager) -> float:
    return person.quiet.total("swarmnode_base_bytes_total", source="peer")


def held_out_loss(model: LlamaForCausalLM, run: Manifest) -> float:
    """Nats a token of transformers' model on the village's held-out samples."""
    tokens = torch.from_numpy(Numbers(run).tokens(range(10_000, 10_000 + run.inner.microbatch)).astype(np.int64))
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits
    return float(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))


def slice_nbytes(index: BaseIndex, run: Manifest, stage: int) -> int:
    """Bytes of the numbers of a stage's parameters as they were published."""
    shapes = parameter_shapes(run.model, stages_of(run)[stage])
    return sum(chunk.nbytes for chunk in map(index.chunk, index.spans(shapes)))


@pytest.mark.parametrize(("tied", "shard"), [(True, "5GB"), (False, "40KB")])
async def test_a_swarm_goes_on_where_the_model_was(tmp_path: Path, tied: bool, shard: str) -> None:
    model, made, run, place = published(tmp_path, tied=tied, shard=shard)
    async with village(run) as v:
        meeting_point(v, place, tmp_path / "cache")
        people = [v.add(stage, base=volunteer(v, tmp_path / f"cache-{stage}")) for stage in range(3)]
        feeder = people[0]
        await v.until(lambda: bool(told(feeder, "validation.done")), "the first validation")
        first = float(str(told(feeder, "validation.done")[0]["loss"]))
        assert abs(first - held_out_loss(model, run)) < 1e-4
        index_nbytes = len(made.index.canonical())
        for stage, person in enumerate(people):
            assert received(person) == slice_nbytes(made.index, run, stage) + index_nbytes
        whole = sum(parameter.numel() for parameter in model.parameters()) * 4
        slices = sum(slice_nbytes(made.index, run, stage) for stage in range(3))
        assert slices == whole + (model.lm_head.weight.numel() * 4 if tied else 0), "each number travels once"

        # A joiner has its state from a donor, as ever; nothing of the base model.
        await v.heard(64)
        late = v.add(1, base=volunteer(v, tmp_path / "cache-late"))
        await v.until(lambda: late.node.state == 3 and bool(told(late, "recovery.done")), "the joiner trains")
        assert told(late, "recovery.done")[0]["method"] == "replica" and received(late) == 0
        await v.until(lambda: len(told(feeder, "validation.done")) > 2, "validated again")
        assert float(str(told(feeder, "validation.done")[-1]["loss"])) < first


async def test_a_lost_stage_that_nobody_kept_is_brought_back_from_the_model(tmp_path: Path) -> None:
    """Its own layers before training are nearer to what was lost than the layers of other stages."""
    _, _, run, place = published(tmp_path)
    run = replace(run, recovery=replace(run.recovery, keepers=0))
    async with village(run) as v:
        people = [v.add(stage, base=volunteer(v, tmp_path / f"cache-{stage}", place)) for stage in range(3)]
        await v.heard(96)
        await people[2].die()
        v.people.remove(people[2])
        back = v.add(2, base=volunteer(v, tmp_path / "cache-back", place))
        await v.until(lambda: bool(told(back, "recovery.done")), "the stage is back")
        assert told(back, "recovery.done")[0]["method"] == "base"
        assert [fields["stage"] for fields in told(back, "base.loaded")] == [2]
        await v.trains(64, "it trains on")


async def test_members_of_a_stage_give_each_other_the_model(tmp_path: Path) -> None:
    _, made, run, place = published(tmp_path)
    async with village(run) as v:
        first = v.add(1, base=volunteer(v, tmp_path / "cache-1", place))
        await v.until(lambda: bool(told(first, "base.loaded")), "the first has a folder")
        second = v.add(1, base=volunteer(v, tmp_path / "cache-2", knows=False))
        await v.until(lambda: bool(told(second, "base.loaded")), "the second has it from the first")
        assert received(first) == 0
        assert received(second) == slice_nbytes(made.index, run, 1) + len(made.index.canonical())


@pytest.mark.loop("asyncio")
async def test_a_folder_with_other_bytes_is_not_believed_and_the_web_is(tmp_path: Path) -> None:
    _, made, run, place = published(tmp_path)
    spoilt = tmp_path / "spoilt"
    spoilt.mkdir()
    raw = bytearray((place / "model.safetensors").read_bytes())
    chunk = made.index.chunk(next(iter(made.index.spans(["model.layers.1.self_attn.q_proj.weight"]))))
    raw[chunk.offset + 100] ^= 1
    (spoilt / "model.safetensors").write_bytes(raw)
    (spoilt / "base.json").write_bytes(made.index.canonical())
    with web_folder(tmp_path) as (url, asked):
        located = replace(run, base=replace(run.base, locations=(f"{url}/model",)))
        reader = HttpRangeReader(AddressRules(private=True))
        async with village(located) as v:
            base = volunteer(v, tmp_path / "cache", spoilt, knows=False, web=reader)
            person = v.add(1, base=base)
            await v.until(lambda: bool(told(person, "base.loaded")), "the web gives what the folder has not")
        await reader.close()
    assert asked == [("model.safetensors", chunk.nbytes)], "the one chunk, and nothing else"


async def test_a_model_that_is_not_to_be_had_or_does_not_fit_ends_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmnode.train.node.base_fetcher.WAIT_S", 0.2)
    _, _, run, place = published(tmp_path)
    other = replace(run, model=replace(run.model, ffn=64))
    for spec, folder, error, says in (
        (run, None, Unavailable, "the base model's weights"),
        (other, place, DataError, r"is \[48, 32\], in the manifest's model it is \[64, 32\]"),
    ):
        async with village(spec) as v:
            person = v.add(1, base=volunteer(v, tmp_path / f"cache-{folder is None}", folder, knows=False))
            assert person.task is not None
            with pytest.raises(BaseExceptionGroup) as found:
                await person.task
            leaf = cause(found.value)
            assert isinstance(leaf, error) and re.search(says, str(leaf)), leaf
            assert person.node.state != 3, "it never served"

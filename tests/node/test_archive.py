"""The owner's archive beside whole nodes: complete and correct checkpoints, whoever lies and whenever it is killed."""

import asyncio
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.app.machine.checkup import find_resumptions, intact
from swarmnode.app.machine.folder_store import FolderStore
from swarmnode.app.machine.run_archive import Measured
from swarmnode.base.concurrency import background_tasks
from swarmnode.base.errors import Busy, RemoteFault, Unavailable
from swarmnode.base.identity import Identity
from swarmnode.base.ports import Call
from swarmnode.base.wire import call_pb2
from swarmnode.keep.recovery import checkpoint as form
from swarmnode.keep.recovery import checkpoint_io
from swarmnode.keep.recovery.archive import ABOUT, ArchiveEntry, ArchiveNotes
from swarmnode.keep.recovery.checkpoint import CopyAgreement
from swarmnode.keep.recovery.resumption import CheckpointOptions
from swarmnode.keep.transfer.snapshot import SLOW, WHOLE
from swarmnode.keep.transfer.state_slices import APART_MAX, apart
from swarmnode.model.section import section_shapes
from swarmnode.model.split import stages_of
from swarmnode.train.node.notice import GRACE_S, Notice, NoticeKind
from tests.support.archiving import MACHINE, RUN_OF, archive_of, trained, warrant
from tests.support.village import RUN, Recording, Village, manifest, told, village


def near(folder: Path, v: Village) -> None:
    """Every stage in the archive's newest checkpoint is about what an honest replica of it has."""
    for stage in range(v.run.pipeline.stages):
        saved = weights(folder, stage)
        honest = [p.replica for p in v.people if p.node.stage == stage and type(p.replica) is Recording]
        live = [
            np.frombuffer(replica.snapshot(packed=True, only=("phi",)).sections["phi"], "<f4")
            for replica in honest
            if replica
        ]
        assert min(apart(saved.tobytes(), one.tobytes()) for one in live) < APART_MAX, f"stage {stage}"


def weights(folder: Path, stage: int) -> np.ndarray:
    """The slow weights of `stage` in the newest checkpoint, every byte of which is verified."""

    async def read() -> np.ndarray:
        newest = await intact(await find_resumptions(str(folder), RUN), print)
        tensors = await checkpoint_io.load_tensors(
            newest.store, newest.base, form.holding(newest.checkpoint.files, "theta")
        )
        shapes = section_shapes(RUN_OF, stages_of(RUN_OF)[stage])["phi"]
        return np.concatenate([np.frombuffer(tensors[name][1], "<f4") for name in shapes])

    with ThreadPoolExecutor(1) as pool:  # with a loop of its own: the test's is running
        return pool.submit(lambda: asyncio.run(read())).result()


async def test_an_archive_holds_the_run_and_a_liars_copy_does_not_get_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: list[tuple[Path, str, str, str]] = []

    def push_folder(*given: Any) -> str:
        pushed.append(given)
        if len(pushed) == 1:
            raise Unavailable("the Hub is away")
        return "https://hub/commit/1"

    monkeypatch.setattr("swarmnode.app.machine.archive_push.push_folder", push_folder)
    async with village(RUN_OF) as v:
        people = await trained(v, (0, 1, 1, 1), liar=2)
        kept = archive_of(v, tmp_path, hub="ada/model")
        entry = await kept.archive.once()
        assert entry.notes.measured == "later" and not pushed, "it can be used before it is measured"
        await kept.archive.measure()
        entry = kept.archive.catalog.entries[entry.label]
        folder = kept.archive.catalog.folder_of(entry)
        await kept.archive.push.to_hub(entry, folder)
        await kept.archive.push.to_hub(entry, folder)
        message = f"round {entry.checkpoint.round}, {entry.checkpoint.samples:,} samples"
        assert pushed == [(kept.archive.catalog.folder_of(entry), "ada/model", entry.label, message)] * 2, (
            "again, then not"
        )
        assert kept.told("archive.push_failed") == [{"where": "ada/model", "reason": "the Hub is away"}]
        assert kept.told("archive.pushed") == [{"label": entry.label, "where": "https://hub/commit/1"}]
        assert "README.md" in entry.files
        near(tmp_path, v)
        liar = people[2].node.me
        assert [word.liars for word in agreements(entry)] == [(), (liar,)]
        assert entry.checkpoint.parts[1].peer != liar and agreements(entry)[1].agree == 1
        assert [f["peer"] for f in kept.told("archive.refused")] == [liar]
        assert 0 < entry.checkpoint.samples <= v.total() and not any((tmp_path / "scratch").iterdir())
        names = entry.files.keys()
        assert {"config.json", "model.safetensors.index.json", "checkpoint.json", "tokenizer.json"} <= names
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) <= names
        # The one before decides where only two are left, of whom one lies.
        await people[3].die()
        table = people[0].node.presence.peer_table
        await v.until(lambda: len(table.swarm().serving(1)) == 2, "the dead one is forgotten")
        for _ in range(20):  # on a slow machine the next round can be far off
            fed = v.total()
            await v.until(lambda fed=fed: v.total() > fed + 128, "it trains on")  # type: ignore[misc]
            if (later := await archive_of(v, tmp_path).archive.once()).checkpoint.round > entry.checkpoint.round:
                break
        assert later.checkpoint.samples > entry.checkpoint.samples
        assert later.checkpoint.parts[1].peer == people[1].node.me and agreements(later)[1].liars == (liar,)


async def test_two_that_contradict_each_other_make_no_checkpoint(tmp_path: Path) -> None:
    async with village(RUN_OF) as v:
        await trained(v, (0, 1, 1), liar=2)
        kept = archive_of(v, tmp_path)
        with pytest.raises(Unavailable, match="contradict each other"):
            await kept.archive.once()
        assert not kept.archive.catalog.entries and "contradict" in kept.archive.status
        assert not list(tmp_path.rglob("checkpoint.json"))


async def test_strangers_get_nothing_and_the_owner_gets_slow_weights_within_a_budget(tmp_path: Path) -> None:
    async with village(RUN_OF) as v:
        people = await trained(v, (0, 1))
        donor = people[1]
        other = Ed25519PrivateKey.from_private_bytes(bytes([8]) * 32)
        thief = Identity.of_seed(bytes([151]) * 32)
        for shown, identity, why in (
            (warrant(signer=other), MACHINE, "not signed by the owner"),
            (warrant(), thief, "another machine's"),
            (warrant(days=-1), MACHINE, "expired"),
        ):
            stranger = archive_of(v, tmp_path, shown=shown, identity=identity)
            with pytest.raises(Unavailable, match=why):
                await stranger.archive.once()

        kept = archive_of(v, tmp_path)

        async def ask(cut: object, stage: int = 1) -> None:
            request = cut.request(stage, 0, nobody_waits=True)  # type: ignore[attr-defined]
            request.warrant.CopyFrom(warrant())
            call = Call(call_pb2.Request(run_id=RUN, snapshot=request))
            await kept.sources.transport.call(donor.node.me, call, timeout_s=60.0, reply_bytes_max=0)

        for cut, stage in ((WHOLE, 1), (SLOW, 0)):
            with pytest.raises(RemoteFault, match="slow weights of stage 2"):
                await ask(cut, stage)
        await ask(SLOW)
        donor.served.held.donor._next_s = asyncio.get_running_loop().time() + 30.0
        with pytest.raises(Busy, match="a moment ago") as busy:
            await ask(SLOW)
        assert 0.0 < busy.value.retry_after_s <= 30.1


async def test_a_run_that_lost_everybody_goes_on_from_its_archive_and_the_folder_pushed_to(tmp_path: Path) -> None:
    """Slow weights are both weights, moments begin at zero; what was fed is not fed again."""
    async with village(RUN_OF) as v:
        await trained(v, (0, 1), samples=640)
        losses = iter([2.0, 1.0, 3.0, 4.0, 5.0])

        async def measured(folder: Path, samples: int) -> Measured:
            assert (folder / "checkpoint.json").is_file()
            return Measured(next(losses), "archive")

        kept = archive_of(v, tmp_path / "archive", measured, push=FolderStore(tmp_path / "pushed"), keep=1)
        made = []
        for _ in range(3):
            total = v.total()
            await v.until(lambda total=total: v.total() >= total + 128, "it trains on")  # type: ignore[misc]
            made.append(await kept.archive.once())
            assert made[-1].notes.loss is None and noted(tmp_path / "pushed", made[-1].label).loss is None
            await kept.archive.measure()
        assert kept.archive.catalog.entries[made[2].label].notes.loss == 3.0
        assert noted(tmp_path / "pushed", made[2].label) == kept.archive.catalog.entries[made[2].label].notes
        assert kept.archive.catalog.entries.keys() == {made[1].label, made[2].label}, "the newest, and the best"
        assert kept.archive.catalog.best is not None and kept.archive.catalog.best.label == made[1].label
    here = await find_resumptions(str(tmp_path / "archive"), RUN)
    there = await find_resumptions(str(tmp_path / "pushed"), RUN)
    newest = await intact(there, print)
    assert [each.checkpoint for each in here] == [each.checkpoint for each in there] and newest is there[0]
    async with village(manifest(stages=3)) as v:
        v.saving = CheckpointOptions(FolderStore(tmp_path / "later"), newest)
        for stage in range(3):
            v.add(stage)
        person = v.people[0]
        await v.until(lambda: bool(person.node.served and person.served.parts.feeder), "a feeder")
        feeder = person.served.parts.feeder
        validator = person.served.parts.validator
        assert feeder is not None and validator is not None
        await v.until(lambda: validator.last is not None, "a validation")
        assert validator.first is not None
        assert validator.first < 2.5, "a model that had learnt nothing stands at log(50) = 3.9"
        assert feeder.ledger.finished().finished_below >= newest.blocks(v.run).finished_below > 0
        await v.until(lambda: v.total() > 64, "it trains on")


def noted(folder: Path, label: str) -> ArchiveNotes:
    """What is noted of the checkpoint `label` in `folder`."""
    return ArchiveNotes.of_text((folder / RUN[:16] / label / ABOUT).read_bytes(), label)


def round_of(entry: ArchiveEntry | None) -> int:
    return -1 if entry is None else entry.checkpoint.round


def agreements(entry: ArchiveEntry) -> list[CopyAgreement]:
    """What other replicas said of each stage's copy."""
    return [part.agreement for part in entry.checkpoint.parts]


async def test_when_all_leave_the_newest_model_is_of_the_last_round(tmp_path: Path) -> None:
    """Each stage's last replica gives its slow weights as it leaves. The checkpoint is there before it is measured."""
    async with village(RUN_OF) as v:
        kept = archive_of(v, tmp_path)
        archive = kept.archive
        kept.sources.transport.serve("handover", archive.serve_handover, tensor_bytes_max=0)
        v.saving = CheckpointOptions(archives=(MACHINE.peer_id,))
        people = await trained(v, (0, 1, 1))
        first = await archive.once()
        await v.until(lambda: people[1].node.stage_status().round_index >= first.checkpoint.round + 3, "it trains on")
        async with background_tasks() as tasks:
            tasks.create_task(archive._copying())
            for person in people:
                person.notices.give(Notice("test", NoticeKind.LEAVE, GRACE_S, "told to go"))
            await v.until(lambda: all(p.task is not None and p.task.done() for p in people), "all have left")
            reports = [person.task.result() for person in people if person.task is not None]
            cut = [line for report in reports for line in report.cut]
            assert not [line for line in cut if line.startswith("archive")], cut
            rounds = [int(str(told(person, "state.saved")[-1]["round"])) for person in people]
            last = min(rounds[0], max(rounds[1:]))
            await v.until(lambda: round_of(archive.catalog.newest) >= last, "the last word is kept")
        entry = archive.catalog.newest
        assert entry is not None and entry.notes.measured == "later"
        assert round_of(entry) > round_of(first)
        assert {fields["stage"] for fields in kept.told("archive.handed")} == {0, 1}
        near(tmp_path, v)
        newest = await intact(await find_resumptions(str(tmp_path), RUN), print)
        assert newest.blocks(RUN_OF).finished_below > 0, "what was fed is not fed again"
        # An export does not wait for a swarm that is gone.
        assert not archive.ask(0.0)
        assert await archive.once() == archive.catalog.newest and archive.ask(60.0)


async def test_a_goodbye_is_taken_of_the_last_replica_alone(tmp_path: Path) -> None:
    async with village(RUN_OF) as v:
        kept = archive_of(v, tmp_path)
        people = await trained(v, (0, 1, 1))
        with pytest.raises(Unavailable, match="who stays"):
            await kept.sources.take_over(people[1].node.me, 1)
        with pytest.raises(RemoteFault, match="does not serve stage 1"):
            await kept.sources.take_over(people[1].node.me, 0)
        for run_id, stage in ((RUN, 2), ("another", 0)):
            call = Call(call_pb2.Request(run_id=run_id, handover=call_pb2.Handover(stage=stage)))
            with pytest.raises(RemoteFault, match="another run's archive"):
                await kept.archive.serve_handover(people[0].node.me, call)
        assert not kept.sources.parting.stages and not list(tmp_path.rglob("stage-*"))


COPIED_UNIX_S = 1e9


class Killed(BaseException):
    """As SIGKILL: nothing that would tidy up runs after it."""


async def test_killed_at_any_moment_it_leaves_complete_checkpoints_and_goes_on(tmp_path: Path, monkeypatch) -> None:
    """Killed in a write of the midst and in the last; each time a fresh archive makes a whole one."""
    async with village(RUN_OF) as v:
        await trained(v, (0, 1, 1))
        first = archive_of(v, tmp_path)
        await first.archive.once()
        count = 0
        real = FolderStore._write

        def counted(self: FolderStore, name: str, parts: object) -> str:
            nonlocal count
            count += 1
            return real(self, name, parts)  # type: ignore[arg-type]

        monkeypatch.setattr(FolderStore, "_write", counted)
        await v.until(
            lambda: v.total() > max(e.checkpoint.samples for e in first.archive.catalog.entries.values()) + 256, "on"
        )
        await archive_of(v, tmp_path).archive.once()
        writes = count
        real_delete = FolderStore._delete
        assert writes > 8
        for moment in (writes // 3, writes - 1):
            left = moment

            def dying(self: FolderStore, name: str, parts: object) -> str:
                nonlocal left
                left -= 1
                if left < 0:  # torn: half of it is there under its temporary name
                    path = self._folder / f"{name}.1.part"
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(b"half")
                    raise Killed
                return real(self, name, parts)  # type: ignore[arg-type]

            monkeypatch.setattr(FolderStore, "_write", dying)
            monkeypatch.setattr(FolderStore, "_delete", lambda self, name: None)  # the dead delete nothing
            total = v.total()
            await v.until(lambda total=total: v.total() > total + 256, "it trains on")  # type: ignore[misc]
            with pytest.raises((Killed, BaseExceptionGroup)):
                await archive_of(v, tmp_path).archive.once()
            monkeypatch.setattr(FolderStore, "_write", real)
            monkeypatch.setattr(FolderStore, "_delete", real_delete)
            for resumption in await find_resumptions(str(tmp_path), RUN):
                await checkpoint_io.verify(resumption.store, resumption.base, resumption.checkpoint)
            again = archive_of(v, tmp_path)
            entry = await again.archive.once()
            near(tmp_path, v)
            assert len(again.archive.catalog.entries) <= 3
            assert not list(tmp_path.rglob("*.part"))
            for path in (tmp_path / RUN[:16]).iterdir():
                assert {"checkpoint.json", "archive.json"} <= {each.name for each in path.iterdir()}
            assert entry.checkpoint.samples > total
        (again.archive.catalog.folder_of(entry) / "archive.json").unlink()  # killed while it measured the copy
        os.utime(again.archive.catalog.folder_of(entry) / "checkpoint.json", (COPIED_UNIX_S, COPIED_UNIX_S))
        later = archive_of(v, tmp_path)
        await later.archive.once()
        assert later.archive.catalog.entries[entry.label].notes.unix_s == COPIED_UNIX_S, "export asks for a newer one"

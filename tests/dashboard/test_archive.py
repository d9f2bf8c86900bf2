"""The page offers the model: numbers to everybody who sees it, files where they may be had, and nothing else."""

import hashlib
from pathlib import Path

import aiohttp
import pytest
import yarl

from benchmarks.swarm.fake_fleet import FakeFleet
from swarmnode.app.dashboard.heartbeat import ModelDownloads
from swarmnode.app.machine.run_archive import Archive
from tests.support.archiving import RUN_OF, archive_of, trained
from tests.support.village import village
from tests.support.watched import DOCUMENT, RUN, TINY, fits, watched


async def made(folder: Path) -> Archive:
    async with village(RUN_OF) as v:
        await trained(v, (0, 1))
        kept = archive_of(v, folder)
        await kept.archive.once()
        return kept.archive


@pytest.mark.parametrize("download", [True, False], ids=["open", "by invitation, on a public page"])
async def test_the_page_offers_the_archives_files_and_no_others(tmp_path: Path, download: bool) -> None:

    archive = await made(tmp_path / "archive")
    (tmp_path / "owner.key").write_text("secret")
    (tmp_path / "archive" / "more.txt").write_text("not of a checkpoint")
    entry = next(iter(archive.catalog.entries.values()))
    async with watched(FakeFleet(TINY, RUN, 2), tmp_path) as w:
        live = w.board.live
        live.offer = ModelDownloads(archive, download=download)
        async with aiohttp.ClientSession(w.board.url) as session:
            async with session.get("/api/v1/archive") as answer:
                told = await answer.json()
            schema = DOCUMENT["paths"]["/api/v1/archive"]["get"]["responses"]["200"]["content"]
            fits(told, schema["application/json"]["schema"])
            async with session.get("/api/v1/picture") as answer:
                fits(await answer.json(), {"$ref": "#/components/schemas/Picture"})
            (row,) = told["entries"]
            assert (row["samples"], row["nbytes"]) == (entry.checkpoint.samples, entry.nbytes)
            for name, (nbytes, sha256) in entry.files.items():
                async with session.get(f"/archive/{entry.label}/{name}") as answer:
                    assert answer.status == (200 if download else 404)
                    data = await answer.read()
                if download:
                    assert (len(data), hashlib.sha256(data).hexdigest()) == (nbytes, sha256)
            if download:
                largest = max(entry.files, key=lambda name: entry.files[name][0])
                ranged = {"Range": "bytes=8-15"}
                async with session.get(f"/archive/{entry.label}/{largest}", headers=ranged) as answer:
                    assert answer.status == 206 and len(await answer.read()) == 8
            others = ("%2e%2e%2fmore.txt", "archive.json", "..%2f..%2f..%2fowner.key", "%2fetc%2fpasswd", "x")
            for name in others:
                for label in (entry.label, "..", "%2e%2e", "scratch"):
                    raw = yarl.URL(f"{w.board.url}archive/{label}/{name}", encoded=True)  # not tidied here
                    async with session.get(raw) as answer:
                        assert answer.status in (403, 404), f"{label}/{name}"
                        assert b"secret" not in await answer.read()

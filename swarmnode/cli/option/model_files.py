"""The model that `init --from` is given: a folder of this machine, or a place on the web."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.errors import DataError, NotPermitted, Unavailable, UsageError

if TYPE_CHECKING:
    from swarmnode.data.base_maker import ModelFiles
    from swarmnode.transport.web import HttpRangeReader

HUB = "https://huggingface.co"
INFO_NBYTES_MAX = 16 << 20
PAUSES_S = (1.0, 2.0, 4.0, 8.0)  # guess: between tries; a content network drops a connection now and then
_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_HUB_MODEL = re.compile(rf"hf://({_NAME}/{_NAME})(?:@({_NAME}))?/?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """`locations`: where volunteers can have the files, besides from members."""

    files: ModelFiles
    name: str
    locations: tuple[str, ...] = ()


class WebFiles:
    """base_maker.ModelFiles below a URL."""

    def __init__(self, reader: HttpRangeReader, runner: asyncio.Runner, url: str) -> None:
        self._reader, self._runner, self._url = reader, runner, url

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        return self._runner.run(self._patiently(f"{self._url}/{name}", offset, nbytes))

    def read_whole(self, name: str, nbytes_max: int) -> bytes | None:
        try:
            return self._runner.run(self._reader.read_whole(f"{self._url}/{name}", nbytes_max))
        except Unavailable as error:
            if "HTTP status 404" in str(error):
                return None
            raise DataError(str(error)) from None

    async def _patiently(self, url: str, offset: int, nbytes: int) -> bytes:
        for pause_s in (*PAUSES_S, None):
            try:
                return await self._reader.read(url, offset, nbytes)
            except Unavailable as error:
                if pause_s is None:
                    raise DataError(str(error)) from None
            await asyncio.sleep(pause_s)
        raise AssertionError("the last try returns or raises")


@contextlib.contextmanager
def open_model(model: str) -> Iterator[OpenedModel]:
    """The model called `model`: a folder, hf://USER/NAME[@REVISION] or https://HOST/FOLDER. Raises UsageError for
    anything else, DataError when the hub does not know it."""
    if "://" not in model:
        folder = Path(model).expanduser()
        if not folder.is_dir():
            raise UsageError(f"--from {model[:200]}: no such folder; or give hf://USER/NAME or https://HOST/FOLDER")
        from swarmnode.local.pretrained import FolderFiles

        yield OpenedModel(FolderFiles(folder.resolve()), folder.resolve().name)
        return
    from swarmnode.manifest.location import MODELS_ALLOWED, base_url, is_model_location
    from swarmnode.transport.web import AddressRules, HttpRangeReader

    if not is_model_location(model):
        raise UsageError(f"--from {model[:200]}: allowed is a folder, {MODELS_ALLOWED}")
    with asyncio.Runner() as runner:
        reader = HttpRangeReader(AddressRules(private=True, named=True))  # the organiser's own words
        try:
            place = _pinned(model, reader, runner)
            url = base_url(place)
            assert url is not None
            name = model.partition("@")[0].rstrip("/").rpartition("/")[2]
            yield OpenedModel(WebFiles(reader, runner, url), name, (place,))
        except NotPermitted as error:
            raise DataError(str(error)) from None
        finally:
            runner.run(reader.close())


def _pinned(model: str, reader: HttpRangeReader, runner: asyncio.Runner) -> str:
    """`model` at the commit that its revision is now, so that the hub gives the same bytes later. Other places are left
    as they are."""
    match = _HUB_MODEL.fullmatch(model)
    if match is None or (match[2] is not None and _COMMIT.fullmatch(match[2])):
        return model
    name, revision = match[1], match[2] or "main"
    try:
        raw = runner.run(reader.read_whole(f"{HUB}/api/models/{name}/revision/{revision}", INFO_NBYTES_MAX))
        commit = json.loads(raw)["sha"]
    except (Unavailable, ValueError, KeyError, TypeError) as error:
        raise DataError(f"hf://{name}@{revision}: the hub does not give it: {str(error)[:150]}") from None
    if type(commit) is not str or not _COMMIT.fullmatch(commit):
        raise DataError(f"hf://{name}@{revision}: the hub names no commit")
    return f"hf://{name}@{commit}"

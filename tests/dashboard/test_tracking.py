"""`--track`: what a tracking library is told of a run. Its stand-in has the interface that trackio and W&B share."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from swarmnode.app import api
from swarmnode.app.cli.main import main
from swarmnode.app.dashboard import start, view
from swarmnode.base.errors import UsageError
from tests.support.watched import RUN, TINY, watched_run


class StandIn(ModuleType):
    """`init` returns a run that keeps what is logged; `broken` fails to log."""

    def __init__(self, name: str, *, broken: bool = False) -> None:
        super().__init__(name)
        self.began: dict[str, Any] = {}
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.finished = False
        self._broken = broken
        self.__spec__ = __spec__  # it is installed

    def init(self, **given: Any) -> StandIn:
        print("view it by running a command")
        self.began = given
        return self

    def log(self, metrics: dict[str, Any], step: int) -> None:
        if self._broken:
            raise ConnectionError("the service is away")
        self.logged.append((step, metrics))

    def finish(self) -> None:
        self.finished = True


@pytest.mark.parametrize("library", ["trackio", "wandb"])
async def test_the_run_is_logged_by_samples(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in = StandIn(library)
    monkeypatch.setitem(sys.modules, library, stand_in)
    monkeypatch.setattr(start, "TRACK_EVERY_S", 0.02)
    async with watched_run(tmp_path, 40) as w:
        fleet = w.fake_fleet
        board = w.board.live.board
        w.board.live.tick()
        facts = view.run(board, RUN, ["swarmnode join SECRET"], "0.1")
        task = asyncio.ensure_future(start.track(library, board, facts, fleet.clock, w.quiet))
        await w.until(lambda: len(stand_in.logged) > 0, "the first row")
        await asyncio.sleep(0.1)
        assert len(stand_in.logged) == 1, "nothing is logged twice"
        task.cancel()
        await asyncio.wait({task})
    step, row = stand_in.logged[0]
    assert step == row["samples"] == fleet.samples and row["machines"] == 4
    assert row["tokens"] == step * TINY.model.context and 0 < row["loss_validation"] < 6 and row["round"] >= 0
    assert stand_in.finished and stand_in.began["project"] == "swarmnode" and stand_in.began["resume"] == "allow"
    assert stand_in.began["name"] == f"tiny-{RUN[:8]}" and ("id" in stand_in.began) == (library == "wandb")
    assert "SECRET" not in str(stand_in.began) and stand_in.began["config"]["run_id"] == RUN
    captured = capsys.readouterr()
    assert captured.out == "" and "view it" in captured.err, "stdout is ours"


async def test_a_library_that_fails_ends_only_the_tracking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", StandIn("trackio", broken=True))
    async with watched_run(tmp_path, 1) as w:
        board = w.board.live.board
        w.board.live.tick()
        await start.track("trackio", board, view.run(board, RUN, [], "0.1"), w.fake_fleet.clock, w.quiet)
        failed = [fields for event, fields in w.quiet.events if event == "dashboard.tracking_failed"]
        assert failed == [{"library": "trackio", "reason": "the service is away"}]


def test_a_missing_library_is_one_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "manifest.toml").touch()
    for verb in ("coordinator", "up"):
        assert main([verb, str(tmp_path), "--track", "wandb"]) == 2
        captured = capsys.readouterr()
        assert captured.err == "swarmnode: --track wandb needs the library wandb: pip install wandb\n"
    with pytest.raises(UsageError, match="--no-dashboard"):
        api.up(track="trackio", dashboard=False)

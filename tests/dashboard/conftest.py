"""A browser, and a page for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from benchmarks.swarm.dashboard import CHROMIUM, FLAGS, no_browser
from tests.support.page import BOUND_MS, Served, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if reason := no_browser():
        pytest.skip(f"a browser is missing: apt-get install chromium ({reason})")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as p:
        opened = p.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS), timeout=BOUND_MS)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def served(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("swarmnode.app.dashboard.heartbeat.TICK_S", 0.25)  # four times as fast: curves have points sooner
        patch.setattr("benchmarks.swarm.dashboard.STEP_S", 0.5)
        with serving(tmp_path_factory.mktemp("page")) as page:
            yield page

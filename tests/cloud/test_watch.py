"""Watchers against metadata services really served over HTTP."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from benchmarks.fake_cloud import FakeMetadata
from swarmnode.app.cloud import watch
from swarmnode.app.cloud.metadata_client import Metadata
from swarmnode.app.cloud.watch import Aws, Azure, Gcp, Watcher
from swarmnode.base.errors import Unavailable
from swarmnode.train.node.notice import Notice, NoticeKind
from tests.support.clock import WallClock
from tests.support.fake_telemetry import Quiet

pytestmark = pytest.mark.node  # services that answer, or do not, in real seconds

BOUND_S = 30.0
PERIOD_S = 0.02


@dataclass
class Scene:
    fake: FakeMetadata
    metadata: Metadata
    quiet: Quiet = field(default_factory=Quiet)
    heard: list[Notice] = field(default_factory=list)

    def watcher(self, cloud: str) -> Watcher:
        match cloud:
            case "aws":
                return Aws(self.metadata, WallClock(), self.quiet, PERIOD_S)
            case "gcp":
                return Gcp(self.metadata, WallClock(), self.quiet, PERIOD_S, hang_s=1.0)
            case _:
                return Azure(self.metadata, WallClock(), self.quiet, PERIOD_S)

    @contextlib.asynccontextmanager
    async def watching(self, cloud: str) -> AsyncIterator[Watcher]:
        watcher = self.watcher(cloud)
        task = asyncio.get_running_loop().create_task(watcher.run(self.heard.append))
        try:
            yield watcher
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(BOUND_S):
            while not condition():
                await asyncio.sleep(0.005)

    def troubles(self) -> list[str]:
        return [str(fields["reason"]) for event, fields in self.quiet.events if event == "notice.unreadable"]


@contextlib.asynccontextmanager
async def scene(notice_s: float = 120.0) -> AsyncIterator[Scene]:
    fake = FakeMetadata(WallClock(), "vm_7", notice_s)
    metadata = Metadata(await fake.start())
    try:
        yield Scene(fake, metadata)
    finally:
        await metadata.close()
        await fake.close()


@pytest.mark.parametrize("cloud", watch.CLOUDS)
async def test_a_preemption_is_heard(cloud: str) -> None:
    async with scene(notice_s=100.0) as s, s.watching(cloud):
        await s.until(lambda: s.fake.played.asked >= 4)
        assert not s.heard
        await s.fake.say("preempt")
        await s.until(lambda: bool(s.heard))
        told = s.heard[0]
        assert (told.source, told.kind) == (cloud, NoticeKind.PREEMPT)
        assert 95.0 < told.deadline_s <= 101.0 or cloud == "gcp"
        assert not s.troubles()


@pytest.mark.parametrize(("cloud", "what"), [("aws", "rebalance"), ("gcp", "migrate"), ("azure", "freeze")])
async def test_advice_is_heard(cloud: str, what: str) -> None:
    async with scene() as s, s.watching(cloud):
        await s.fake.say(what)
        await s.until(lambda: bool(s.heard))
        assert {told.kind for told in s.heard} == {NoticeKind.ADVICE}


async def test_azure_is_told_that_we_are_ready() -> None:
    async with scene() as s, s.watching("azure") as watcher:
        await s.fake.say("preempt")
        await s.until(lambda: bool(s.heard))
        assert await watcher.acknowledge(s.heard[0])
        assert s.fake.played.approved == [s.heard[0].id]
        assert not await s.watcher("aws").acknowledge(s.heard[0])


@pytest.mark.parametrize("cloud", watch.CLOUDS)
@pytest.mark.parametrize("trouble", ["rubbish", "forbid"])
async def test_a_service_that_talks_nonsense_is_told_of_once_and_asked_again(cloud: str, trouble: str) -> None:
    async with scene() as s:
        await s.fake.say(trouble)
        async with s.watching(cloud):
            await s.until(lambda: len(s.troubles()) > 0 and s.fake.played.asked >= 5)
            assert len(s.troubles()) <= 2, "one line a question, not one a second"
            assert not s.heard
            await s.fake.say("recover")
            await s.fake.say("preempt")
            await s.until(lambda: bool(s.heard))


async def test_a_service_that_hangs_is_given_up_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmnode.app.cloud.watch.TIMEOUT_S", 0.1)

    async with scene() as s:
        await s.fake.say("hang")
        async with s.watching("aws"):
            await s.until(lambda: len(s.troubles()) > 0)
            assert "did not answer within" in s.troubles()[0]


async def test_an_expired_token_is_fetched_anew() -> None:
    async with scene() as s, s.watching("aws"):
        await s.until(lambda: s.fake.played.asked >= 4)
        s.fake.played.tokens.clear()
        await s.fake.say("preempt")
        await s.until(lambda: bool(s.heard))
        assert not s.troubles()


async def test_a_proxy_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    async with scene() as s, s.watching("gcp"):
        await s.fake.say("preempt")
        await s.until(lambda: bool(s.heard))


async def test_no_answer_is_unavailable_and_no_cloud() -> None:
    metadata = Metadata("http://127.0.0.1:9")
    with pytest.raises(Unavailable, match="127.0.0.1:9"):
        await metadata.ask("GET", "x", {}, timeout_s=5.0)
    assert await watch.by_asking(metadata) is None
    await metadata.close()


async def test_a_service_is_known_by_its_answers() -> None:
    async with scene() as s:
        assert await watch.by_asking(s.metadata) == "aws"  # the fake plays all three: the first


@pytest.mark.parametrize(
    ("words", "cloud"),
    [
        ({"sys_vendor": "Amazon EC2"}, "aws"),
        ({"sys_vendor": "Xen", "bios_vendor": "Xen", "product_name": "HVM domU"}, None),
        ({"bios_vendor": "Google", "product_name": "Google Compute Engine"}, "gcp"),
        ({"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77"}, "azure"),
        ({"sys_vendor": "Microsoft Corporation", "product_name": "Virtual Machine"}, None),
        ({"sys_vendor": "LENOVO", "product_name": "20QD"}, None),
        ({}, None),
    ],
)
def test_the_firmware_says_whose_machine_it_is(tmp_path: Path, words: dict[str, str], cloud: str | None) -> None:
    for field_name, text in words.items():
        (tmp_path / field_name).write_text(text + "\n")
    assert watch.by_dmi(watch.read_dmi(tmp_path)) == cloud

"""`swarmnode fake-metadata`: imitate a cloud that preempts machines, for rehearsals."""

from __future__ import annotations

import asyncio
import contextlib
import time

import click

from swarmnode.cli.option.param import DURATION, PORT, parse_duration

HOST = "127.0.0.1"


class Saying(click.ParamType[tuple[float, str]]):
    """AT:WHAT, for example 30s:preempt."""

    name = "at:what"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, str]:
        from swarmnode.cloud.fake import SAYINGS

        at, _, what = str(value).partition(":")
        if what not in SAYINGS:
            self.fail(f"{str(value)[:60]!r}: use AT:WHAT, WHAT one of {', '.join(SAYINGS)}", param, ctx)
        try:
            return (0.0 if at in ("0", "0s") else parse_duration(at)), what
        except ValueError as error:
            self.fail(f"{str(value)[:60]!r}: {error}", param, ctx)


@click.command(short_help="imitate a cloud that preempts machines, for rehearsals")
@click.option("--host", default=HOST, show_default=True, help="Address to listen at.")
@click.option("--port", type=PORT, default=1338, show_default=True, help="0: any free one.")
@click.option(
    "--say", "script", type=Saying(), multiple=True, metavar="AT:WHAT", help="Say WHAT after AT; may be repeated."
)
@click.option(
    "--notice", type=DURATION, default=120.0, show_default="2m", help="From a preemption's announcement to its time."
)
@click.option("--machine", default="node-0", show_default=True, help="This machine's name at Azure.")
def command(host: str, port: int, script: tuple[tuple[float, str], ...], notice: float, machine: str) -> None:
    """Serve what the metadata services of AWS, Google and Azure serve about preemption, and announce one on cue.

    \b
    Rehearse a preemption in three terminals:
      swarmnode fake-metadata --say 60s:preempt --notice 30s
      swarmnode join ... --notice aws --notice-url http://127.0.0.1:1338     (or gcp, azure)
      curl -X POST http://127.0.0.1:1338/say/preempt                         (without waiting for the script)

    \b
    WHAT:
      preempt      the machine will be taken away after --notice (AWS, GCP, Azure)
      rebalance    AWS: the spot instance is at elevated risk
      migrate      GCP: the instance moves to another host, live
      maintenance  GCP: the instance is stopped for maintenance
      freeze       Azure: the machine stands still for some seconds
      other        Azure: another machine of the scale set is taken away, not this one
      rubbish, forbid, hang, recover   answer nonsense, 403, nothing; properly again

    The joined node drains and exits with code 30 when everything was brought home, 31 when time was too short. Ctrl-C
    ends the play.
    """
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_play(host, port, sorted(script), notice, machine))


class _WallClock:
    def unix_s(self) -> float:
        return time.time()


async def _play(host: str, port: int, script: list[tuple[float, str]], notice_s: float, machine: str) -> None:
    from swarmnode.cloud.fake import FakeMetadata

    fake = FakeMetadata(_WallClock(), machine, notice_s)
    fake.note = lambda text: click.echo(f"{time.strftime('%H:%M:%S')} {text}", err=True)
    base = await fake.start(host, port)
    click.echo(base)
    click.echo(f"rehearse: swarmnode join ... --notice aws|gcp|azure --notice-url {base}", err=True)
    click.echo(f"say something now: curl -X POST {base}/say/preempt", err=True)
    begun = asyncio.get_running_loop().time()
    try:
        for at_s, what in script:
            await asyncio.sleep(max(0.0, begun + at_s - asyncio.get_running_loop().time()))
            await fake.say(what)
        await asyncio.Event().wait()
    finally:
        await fake.close()

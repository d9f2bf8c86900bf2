"""`swarmnode doctor [INVITE]`: check whether this machine can take part, and in which stages."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import tempfile
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarmnode.app.cli.option.param import home_option
from swarmnode.base.ids import stage_name, stages_name

if TYPE_CHECKING:
    from swarmnode.app.machine.checkup import HealthCheck
    from swarmnode.base.ids import PeerId
    from swarmnode.net.transport.capacity import LinkCapacity
    from swarmnode.net.transport.stream_transport import StreamTransport
    from swarmnode.run.admission.invite import Invite
    from swarmnode.run.manifest import Manifest

PROBE_TIMES = 3
MEASURE_S = 10.0
GONE = "look at this machine's network; then ask the organiser whether the run goes on, and for a new invite"


@click.command(short_help="check whether this machine can take part")
@click.argument("words", metavar="[INVITE | -]", nargs=-1)
@click.option("--invite-file", type=click.Path(dir_okay=False, path_type=Path), help="Read the invite from this file.")
@click.option("--device", default="auto", metavar="auto|cpu|cuda|cuda:1", help="Device to check.")
@home_option
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object: checks, stages, tokens_per_s, up_bps, verdict."
)
def command(words: tuple[str, ...], invite_file: Path | None, device: str, home: Path, as_json: bool) -> int:
    """Check this machine, and with an INVITE its access to the run; print its abilities, and the remedy for each
    failure.

    With an INVITE: whether a meeting point answers, whether this machine may take part, which stages fit into memory,
    how many tokens a second one of them would do here, and how many the link carries (at most 0.9 MB each way to two
    meeting points). Of a node that runs in --home: latency and bandwidth to its peers, and whether they can dial it.
    Exit codes: 0 it can take part, 20 this machine cannot, 21 nobody is reachable, 77 not permitted.
    """
    from swarmnode.app.cli.option.invite import find_invite
    from swarmnode.app.machine.checkup import exit_code, machine
    from swarmnode.model.device import resolve_device

    invite = find_invite(words, invite_file)
    if words and invite is None:
        raise click.UsageError(f"{words[0][:60]!r} is not an invite: one line, as `swarmnode invite` prints it")
    device = resolve_device(device)
    checks = _shown(machine(home, device), quiet=as_json)
    facts: dict[str, object] = {}
    verdict = "this machine can take part"
    if invite is not None:
        checks += _shown(asyncio.run(_of_run(invite, home, device, facts)), quiet=as_json)
        verdict = str(facts.get("verdict", verdict))
    checks += _shown(_of_daemon(home), quiet=as_json)
    code = exit_code(checks)
    if code:
        verdict = "this machine cannot take part yet: " + "; ".join(c.name for c in checks if c.ok is False)
    if as_json:
        rows = [dataclasses.asdict(check) for check in checks]
        click.echo(json.dumps({"checks": rows, **facts, "verdict": verdict, "exit_code": code}))
        return code
    click.echo(verdict)
    return code


def _shown(checks: Iterable[HealthCheck], *, quiet: bool) -> list[HealthCheck]:
    """`checks`, each printed as it comes unless `quiet`."""
    known = []
    for check in checks:
        known.append(check)
        mark = {True: "ok", False: "FAILS", None: "?"}[check.ok]
        fix = f"\n{'':>5}  {'':<10} fix: {check.fix}" if check.fix and check.ok is not True else ""
        if not quiet:
            click.echo(f"{mark:>5}  {check.name:<10} {check.says}{fix}")
    return known


async def _of_run(invite: Invite, home: Path, device: str, found: dict[str, object]) -> list[HealthCheck]:
    """Check reachability, permission, stages and speed. Machine-readable results go into `found`."""
    from swarmnode.app.machine.checkup import HealthCheck

    met = await _met(invite, home)
    if isinstance(met, HealthCheck):
        return [met]
    checks, stages = _fitting(met.manifest, device)
    if stages:
        checks.append(await _speed(met, stages, device, found))
    return [*met.checks, *checks]


@dataclasses.dataclass(frozen=True, slots=True)
class _Met:
    """A run that answered. `capacity`: of the link to its meeting points, None if it could not be measured."""

    manifest: Manifest
    capacity: LinkCapacity | None
    checks: tuple[HealthCheck, ...]


@contextlib.asynccontextmanager
async def _as_node(invite: Invite, home: Path) -> AsyncIterator[StreamTransport]:
    """A transport under the node's own key, so that its own permission is checked. The key is copied: a node may run
    with it already."""
    from swarmnode.app.daemon.admission import pass_of_invite
    from swarmnode.net.transport import key_file
    from swarmnode.net.transport.address import parse_bootstraps
    from swarmnode.net.transport.kind import kind_of, open_transport

    identity = key_file.load_or_create(home / "node.key")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "node.key"
        path.touch(mode=0o600)
        path.write_bytes((home / "node.key").read_bytes())
        named = parse_bootstraps(invite.bootstraps)
        listen = ["/ip4/127.0.0.1/tcp/0"]
        kind = kind_of(invite.bootstraps)
        transport = await open_transport(kind, path, identity, invite.run_id, listen, named=named)
        try:
            transport.own_pass = pass_of_invite(invite, identity.peer_id)
            yield transport
        finally:
            await transport.close()


async def _met(invite: Invite, home: Path) -> _Met | HealthCheck:
    """The run, asked over the network, or the check that failed."""
    from swarmnode.app.daemon.manifest_source import fetch_manifest
    from swarmnode.app.machine.checkup import HealthCheck, rate_text
    from swarmnode.base.errors import NotPermitted, SwarmnodeError
    from swarmnode.net.transport.address import parse_bootstraps
    from swarmnode.run.manifest import verify

    loop = asyncio.get_running_loop()
    bootstraps = parse_bootstraps(invite.bootstraps)
    async with _as_node(invite, home) as transport:
        try:
            begun = loop.time()
            signed = await fetch_manifest(transport, bootstraps, invite.run_id)
            manifest, _ = verify(signed, invite.run_id)
            answered_s = loop.time() - begun
            capacity, why = await _capacity(transport, bootstraps)
        except SwarmnodeError as error:
            name = "permission" if isinstance(error, NotPermitted) else "run"
            fix = "ask the organiser for a new invite" if name == "permission" else GONE
            return HealthCheck(name, False, str(error), fix, error.exit_code)
    if capacity is None:
        link = HealthCheck("bandwidth", None, f"not measured: {why}")
    else:
        says = f"{rate_text(capacity.up_bps)} up, {rate_text(capacity.down_bps)} down, {why}"
        link = HealthCheck("bandwidth", True, says)
    answers = HealthCheck("run", True, f"{manifest.name} answers in {1000 * answered_s:.0f} ms")
    permission = HealthCheck("permission", True, f"{manifest.access.mode}: this machine may take part")
    return _Met(manifest, capacity, (answers, permission, link))


def _fitting(manifest: Manifest, device: str) -> tuple[list[HealthCheck], list[int]]:
    """Checks of what the run asks of this machine, and the stages that fit its memory."""
    from swarmnode.app.machine.checkup import HealthCheck, memory_text
    from swarmnode.app.machine.stage_fit import best_fit, machine_memory
    from swarmnode.base.errors import HardwareFault
    from swarmnode.model.device import autocasts
    from swarmnode.model.memory_budget import mode_of

    mode = mode_of(device, autocast=autocasts(device))
    fits = best_fit(manifest, machine_memory(device), has_data=True, mode=mode)
    stages = [stage for stage in range(len(fits.needed)) if stage not in fits.unable]
    fix = "no stage fits: use a machine with more memory"
    checks = [HealthCheck("stages", bool(stages), memory_text(fits), fix, HardwareFault.exit_code)]
    if manifest.data.names_files:
        says = "only the first stage of this run reads a file"
        checks.append(HealthCheck("data", None, says, "to feed it, give join --data-root with its folder"))
    if manifest.base.index:
        checks.append(HealthCheck("base", None, _base_text(manifest, stages)))
    return checks, stages


async def _speed(met: _Met, stages: list[int], device: str, found: dict[str, object]) -> HealthCheck:
    """Time the middle one of `stages`, and say in `found` what this machine can bring, as its link allows."""
    from swarmnode.app.machine.checkup import HealthCheck, about, link_tokens_per_s

    stage = stages[len(stages) // 2]
    computed = await asyncio.to_thread(_tokens_per_s, met.manifest, stage, device)
    found |= {"stages": stages, "compute_tokens_per_s": computed}
    carried = math.inf
    if met.capacity is not None:
        carried = link_tokens_per_s(met.manifest, stage, met.capacity.up_bps, met.capacity.down_bps)
        found |= {"up_bps": met.capacity.up_bps, "down_bps": met.capacity.down_bps}
        found["link_tokens_per_s"] = carried if carried < math.inf else None  # a single stage sends nothing
    bound = ""
    if carried < computed:
        bound = f" (its link carries no more; alone the machine could do {about(computed)})"
    speed = min(carried, computed)
    verdict = f"you can hold {stages_name(stages)}, about {about(speed)} tokens/s{bound}"
    found |= {"tokens_per_s": speed, "limited_by": "link" if bound else "compute", "verdict": verdict}
    return HealthCheck("speed", True, f"{computed:,.0f} tokens/s on {stage_name(stage)}")


def _base_text(manifest: Manifest, stages: Sequence[int]) -> str:
    """The fetch of the pretrained model that the run starts from, as numbers of two bytes."""
    from swarmnode.model.split import stages_of

    parts = stages_of(manifest)
    most = max((2 * parts[stage].parameters for stage in stages), default=0)
    places = ", ".join(manifest.base.locations)[:120] or "members"
    return (
        f"the run starts from model {manifest.base.index[:16]}; until it has trained, up to {most / 1e9:.2g} GB of it"
        f" come from {places}"
    )


async def _capacity(
    transport: StreamTransport, bootstraps: Sequence[tuple[PeerId, list[str]]]
) -> tuple[LinkCapacity | None, str]:
    """Bandwidth between us and those of `bootstraps` that answer, measured in seconds."""
    from swarmnode.net.transport.capacity import best
    from swarmnode.net.transport.reachability import connected

    return await best(transport, await connected(transport, bootstraps), MEASURE_S)


def _tokens_per_s(manifest: Manifest, stage: int, device: str) -> float:
    """Tokens per second, measured as by a joining node: forward, and backward at twice its cost."""
    import time

    from swarmnode.app.machine.replica import TorchReplica
    from swarmnode.model.device import autocasts, use_one_thread
    from swarmnode.train.node.membership_handlers import forward

    use_one_thread()
    replica = TorchReplica(manifest, stage, device, autocast=autocasts(device))
    seconds = float("inf")
    for _ in range(PROBE_TIMES):
        begun = time.perf_counter()
        forward(replica, manifest, stage, manifest.inner.microbatch)
        seconds = min(seconds, time.perf_counter() - begun)
    return manifest.inner.microbatch * manifest.model.context / (3.0 * seconds)


def _of_daemon(home: Path) -> list[HealthCheck]:
    """Checks of the peers of a node that runs here; empty if none does."""
    from swarmnode.app.control import client
    from swarmnode.app.machine.checkup import HealthCheck, rate_text
    from swarmnode.base.errors import NoDaemon

    try:
        reply = client.ask(home, "examine", timeout_s=40.0)
    except NoDaemon:
        return []
    answering = [exam for exam in reply["peers"] if not exam["fault"]]
    slowest = max((exam["latency_s"] for exam in answering), default=0.0)
    says = f"{len(answering)} of {len(reply['peers'])} answer, the slowest in {1000 * slowest:.0f} ms"
    checks = [HealthCheck("peers", bool(answering) if reply["peers"] else None, says, "is the network up?", 21)]
    if up := max((exam["up_bps"] for exam in answering), default=0.0):
        down = max(exam["down_bps"] for exam in answering)
        checks.append(
            HealthCheck("bandwidth", True, f"{rate_text(up)} up, {rate_text(down)} down to its peers, while it works")
        )
    fix = "let TCP in (router, firewall) and give --listen a fixed port; without, it works through relays, slower"
    good = {"public": True, "local": True, "relayed": None, "private": None}.get(reply["reach"])
    checks.append(HealthCheck("reach", good, f"{reply['reach']}: {reply['reason']}", "" if good else fix))
    return checks

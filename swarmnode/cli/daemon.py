"""A node process: the real ports put together, the node run on them, everything taken down again."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from swarmnode import __version__
from swarmnode.cli.desk import Desk, Process
from swarmnode.cli.entrance import make_door, pass_of_invite
from swarmnode.cli.footing import (
    CONTACTS_ASKED_MAX,
    CONTACTS_FILE,
    first_footing,
    keep_current,
    listen_around,
    settle,
    stay_reachable,
)
from swarmnode.cli.options import RUN_ID, NodeOptions
from swarmnode.cli.permission import stay_permitted
from swarmnode.cli.places import checkpoints, unable_stages
from swarmnode.cli.pushing import push_metrics
from swarmnode.cli.regulating import make_regulator
from swarmnode.cli.thanking import thanking
from swarmnode.cli.watched import acknowledge, watched
from swarmnode.cli.watching import rejoin, remembered, tell_watchers, watch
from swarmnode.control.service import ControlServer
from swarmnode.data.corpus import open_corpus
from swarmnode.errors import (
    EXIT_PREEMPTED,
    EXIT_PREEMPTED_INCOMPLETE,
    Forbidden,
    LocalFault,
    ManifestError,
    NotPermitted,
    RemoteFault,
    SwarmnodeError,
    Unavailable,
    Unreachable,
    UsageError,
)
from swarmnode.gossip.compression import kernel
from swarmnode.ids import PeerId, RunId
from swarmnode.local import ready
from swarmnode.local.receipts import Receipts
from swarmnode.local.sensors import Sensors, Usage
from swarmnode.local.supervisor import Supervisor
from swarmnode.manifest import read_signed, verify
from swarmnode.metrics.exporter import PrometheusTelemetry
from swarmnode.metrics.recent import Recent
from swarmnode.model.device import autocasts, check_device
from swarmnode.model.export import StageLabel, save_stage, stage_state_dict
from swarmnode.node import guests, probe
from swarmnode.node.bucket import open_store
from swarmnode.node.compute import ThreadCompute
from swarmnode.node.drain import Farewell
from swarmnode.node.greeting import Greeting
from swarmnode.node.host import host_of
from swarmnode.node.node import Node, World
from swarmnode.node.notice import Kind, Notice, Notices, of_signal
from swarmnode.node.reading import CorpusSamples
from swarmnode.node.replica import TorchReplica
from swarmnode.node.resuming import check, find_resumptions
from swarmnode.node.saver import Saving
from swarmnode.ports import Call, Compute, Priority, Replica
from swarmnode.transport import identity as key_file
from swarmnode.transport.address import parse_bootstraps
from swarmnode.transport.capacity import Counterpart
from swarmnode.transport.contact import Contacts
from swarmnode.transport.directory import DhtDirectory
from swarmnode.transport.libp2p import Libp2pTransport
from swarmnode.transport.reach import Helper
from swarmnode.wire import call_pb2 as wire
from swarmnode.wire import record_pb2

MANIFEST_TIMEOUT_S = 5.0
MANIFEST_WAIT_S = 30.0  # guess: as long as a bootstrap started at the same time may take to come up
MANIFEST_RETRY_S = 0.5
KEY_FILE = "node.key"
EVENTS_FILE = "events.jsonl"

Bootstraps = Sequence[tuple[PeerId, list[str]]]


class SystemClock:
    """ports.Clock of this machine."""

    def unix_s(self) -> float:
        return time.time()


async def run_node(options: NodeOptions) -> int:
    """Be the node that `options` describe until told to leave. Returns the exit code.

    SIGTERM and SIGINT leave cleanly; the second one exits at once. Raises a SwarmnodeError it cannot go on with.
    """
    notices = Notices()
    signals = 0

    def signalled(number: signal.Signals) -> None:
        nonlocal signals
        signals += number != signal.SIGUSR1
        if signals > 1:
            os._exit(128 + number)
        notices.give(of_signal(number, os.environ, options.grace_s, time.time()))

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        loop.add_signal_handler(number, signalled, number)
    check_device(options.device)
    torch.set_num_threads(1)  # more than one a node process runs slower (measured, test-lab section 7)
    desk = Desk(options, notices)
    control = ControlServer(options.home, desk)
    control.hold()  # before anything in the home is touched: another daemon may live there
    try:
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(control.stop)
            ready.clear(options.home)
            process = await _unless_told(_start(options, stack), notices)
            farewell = await _live(process, control, desk, notices, stack) if process is not None else None
    except BaseExceptionGroup as group:
        raise _first(group) from group
    assert notices.told is not None
    click.echo(f"left: {notices.told.reason}{'' if farewell is None else farewell.text()}", err=True)
    if notices.told.kind is not Kind.PREEMPT:
        return 0
    return EXIT_PREEMPTED if farewell is None or farewell.clean else EXIT_PREEMPTED_INCOMPLETE


async def _unless_told(starting: Coroutine[Any, Any, Process], notices: Notices) -> Process | None:
    """What `starting` gives, or None when a notice says go before it is done: there is nothing to bring home yet."""
    async with asyncio.TaskGroup() as tasks:
        started, told = tasks.create_task(starting), tasks.create_task(notices.wait())
        await asyncio.wait({started, told}, return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        if not started.done():
            started.cancel()
    return None if started.cancelled() else started.result()


async def _start(options: NodeOptions, stack: contextlib.AsyncExitStack) -> Process:
    """Key, telemetry, transport, manifest, directory: in this order, each taken down by `stack`."""
    identity = key_file.load_or_create(options.home / KEY_FILE)
    bootstraps = parse_bootstraps(options.bootstrap)
    signed: record_pb2.SignedManifest | None = None
    run_id = RunId(options.run)
    if not RUN_ID.match(options.run):
        signed, _ = read_signed(Path(options.run))
        _, run_id = verify(signed, None)
    recent = Recent(SystemClock())
    telemetry = PrometheusTelemetry(
        clock=SystemClock(), run=run_id, node=identity.peer_id, path=options.home / EVENTS_FILE, echo=recent
    )
    stack.push_async_callback(telemetry.close)
    metrics_address = await telemetry.serve(options.metrics_port, options.metrics_host)
    reachability = "public" if options.bootstrap_only else options.reachability
    footing = first_footing(options.listen, reachability)
    transport = await Libp2pTransport.create(
        options.home / KEY_FILE, identity, run_id, [options.listen], footing=footing, telemetry=telemetry
    )
    stack.push_async_callback(transport.close)
    push_metrics(telemetry, transport, run_id, SystemClock(), stack)
    contacts = Contacts.load(options.home / CONTACTS_FILE, time.time())
    known = [*bootstraps, *((peer, list(one.addresses)) for peer, one in contacts.latest(CONTACTS_ASKED_MAX))]
    if options.invite is not None:
        transport.own_pass = pass_of_invite(options.invite, identity.peer_id)
    if options.lan:
        await listen_around(transport, run_id, contacts, known)
    if signed is None:
        signed = await fetch_manifest(transport, known, run_id)
    manifest, _ = verify(signed, run_id)
    if options.invite is not None and signed.owner != options.invite.owner:
        raise ManifestError("the invite names another owner than the run's manifest: ask the organiser for a new one")
    telemetry.event("manifest.verified", name=manifest.name)
    if manifest.gossip.codec not in ("fp32", "bf16"):
        await asyncio.to_thread(kernel.build)  # a second, once a machine; without a compiler torch does it, slower
    if options.stage is not None and options.stage >= manifest.pipeline.stages:
        raise UsageError(f"--stage {options.stage}: this run has stages 0 to {manifest.pipeline.stages - 1}")
    unable = frozenset[int]() if options.bootstrap_only else unable_stages(options, manifest)
    door = make_door(manifest, run_id, signed.owner, options, identity, SystemClock())
    transport.let_in(door)
    for peer, addresses in bootstraps if not door.rules.is_open else ():
        with contextlib.suppress(RemoteFault, Unavailable):  # who is not there yet is asked again later
            await transport.connect(peer, addresses)
            try:
                await guests.ask(door, transport, peer)
            except Forbidden as refusal:
                guests.take_evidence(door, refusal)
    permit, reason = door.judge(identity.peer_id, door.mine)
    if not permit:
        raise NotPermitted(f"run {run_id[:16]}: {reason}")
    Greeting(signed, door).serve(transport)
    Helper(transport.observed).serve(transport)
    Counterpart().serve(transport)
    reach = await settle(transport, known, footing, reachability, telemetry)
    if footing.kind == "open" and reachability == "auto":
        transport.spawn(stay_reachable(transport, known, footing, reach, telemetry))
    join = partial(
        DhtDirectory.create,
        transport,
        run_id=run_id,
        stages=manifest.pipeline.stages,
        ttl_max_s=manifest.limits.record_ttl_s,
        telemetry=telemetry,
        contacts=contacts,
        door=door,
    )
    former = remembered(options, run_id) if options.dashboard is not None else ()
    directory = await (rejoin(join, former) if former else join(bootstraps))
    stack.push_async_callback(directory.close)
    return Process(
        options, run_id, manifest, transport, directory, telemetry, metrics_address, recent, signed, door, unable
    )


async def _live(
    process: Process, control: ControlServer, desk: Desk, notices: Notices, stack: contextlib.AsyncExitStack
) -> Farewell | None:
    """The node, or for a bootstrap nothing but the directory; a transport beyond repair ends either."""
    options, telemetry = process.options, process.telemetry
    node = None
    if options.bootstrap_only:
        telemetry.readiness = lambda: (True, "bootstrap")
    else:
        compute = ThreadCompute(telemetry)
        stack.callback(compute.close)
        node = _node(process, await _saving(process), compute)
        usage = Usage(options.home, lambda: process.transport.throttle.moved_nbytes)
        desk.regulator = make_regulator(process, node, compute, Sensors(usage, SystemClock()))
        stack.callback(usage.save)
    desk.open(process, node)

    def give(notice: Notice) -> None:
        if notices.give(notice):
            fields = {"source": notice.source, "kind": notice.kind, "left_s": notice.deadline_s, "id": notice.id}
            telemetry.event("notice.received", level="warning", **fields, reason=notice.reason)

    socket = await control.start()
    peer = process.transport.peer_id
    addresses = tuple(f"{address}/p2p/{peer}" for address in await process.transport.addresses())
    page = await watch(process, addresses, SystemClock(), stack) if options.dashboard is not None else ""
    kept = Receipts(options.home)
    if node is not None:
        tell_watchers(process, desk.status, kept, SystemClock())
    ready.write(
        options.home,
        ready.Ready(
            os.getpid(), process.run_id, peer, addresses, process.metrics_address, str(socket), options.stage, page
        ),
    )
    stack.callback(ready.clear, options.home)
    telemetry.event("node.started", addresses=addresses, version=__version__, pid=os.getpid(), name=options.name)
    async with asyncio.TaskGroup() as tasks:
        moved: Callable[[list[str]], None] = (lambda now: None) if node is None else node.presence.moved
        watcher = await watched(options.notice, options.notice_url, SystemClock(), telemetry, stack)
        watching = [tasks.create_task(watcher.run(give))] if watcher is not None else []
        others = [
            tasks.create_task(process.transport.wait_failed()),
            tasks.create_task(Supervisor().attend(lambda: telemetry.readiness()[1])),
            tasks.create_task(keep_current(process.transport, process.directory.contacts, options.home, moved)),
            tasks.create_task(stay_permitted(process, node, notices)),
            tasks.create_task(desk.finished()),
            *([tasks.create_task(desk.regulator.run())] if desk.regulator is not None else []),
            *([tasks.create_task(thanking(process, node, kept, SystemClock()))] if node is not None else []),
        ]
        farewell = None
        if node is None:
            await notices.wait()
        else:
            farewell = await node.run(notices, options.stage)
        desk.left.set_result(farewell)
        for task in watching:
            task.cancel()
        if watcher is not None:
            assert notices.told is not None
            await acknowledge(watcher, notices.told, telemetry)
        for task in others:
            task.cancel()
    if process.forbidden:
        raise NotPermitted(f"run {process.run_id[:16]}: {process.forbidden[0]}")
    return farewell


async def _saving(process: Process) -> Saving:
    """Where this node saves the run's checkpoints and which one it starts from. Raises UsageError, DataError."""
    options, manifest, resumption = process.options, process.manifest, None
    where = checkpoints(options, manifest)
    if options.resume:
        resumption = (await find_resumptions(options.resume, process.run_id))[0]
        check(resumption, manifest, process.run_id, other=options.resume_other, where=options.resume)
    signed = base64.b64encode(process.signed.SerializeToString(deterministic=True)).decode()
    return Saving(open_store(where) if where else None, resumption, signed)


def _node(process: Process, saving: Saving, compute: ThreadCompute) -> Node:
    """The node on its real ports."""
    options, manifest, telemetry = process.options, process.manifest, process.telemetry
    fast = autocasts(options.device, options.precision)
    world = World(
        transport=process.transport,
        directory=process.directory,
        compute=compute,
        clock=SystemClock(),
        telemetry=telemetry,
        identity=key_file.load(options.home / KEY_FILE),
        replica=partial(TorchReplica, manifest, device=options.device, autocast=fast, sender=process.transport.peer_id),
        samples=lambda: CorpusSamples(open_corpus(manifest, options.data_root, options.cache), manifest),
        probe=probe.forward,
        save=partial(_save, process, compute),
        saving=saving,
        door=process.door,
        unable=process.unable,
        host=host_of(options.device, compute),
    )
    return Node(manifest, process.run_id, world)


async def _save(
    process: Process, compute: Compute, replica: Replica, stage: int, round_index: int, samples: int
) -> None:
    """The stage's fast weights and their running mean in the home, as `swarmnode export` reads them."""
    assert isinstance(replica, TorchReplica)
    peer, mean = process.transport.peer_id, replica.average
    path = process.options.home / f"stage-{stage}-{peer[-8:]}.safetensors"
    weights = await compute.run(Priority.OUTER, 0, partial(stage_state_dict, replica.stage))
    average, span = None, 0
    if mean is not None and mean.value is not None:
        average = await compute.run(Priority.OUTER, 0, partial(stage_state_dict, replica.stage, mean.value))
        span = mean.span
    label = StageLabel(process.run_id, stage=stage, round=round_index, samples=samples, peer=peer, averaged=span)
    await asyncio.to_thread(save_stage, path, weights, label, average)


async def fetch_manifest(
    transport: Libp2pTransport, bootstraps: Bootstraps, run_id: RunId
) -> record_pb2.SignedManifest:
    """The run's manifest from any bootstrap, verified against `run_id`.

    Raises Unreachable when none answers within MANIFEST_WAIT_S, ManifestError when what they give is not this run's.
    """
    if not bootstraps:
        raise Unreachable("a run given by its id needs a bootstrap to fetch the manifest from; give one")
    reason, asked = "no answer", Call(wire.Request(manifest=wire.ManifestRequest()))
    try:
        async with asyncio.timeout(MANIFEST_WAIT_S):
            while True:
                for peer, addresses in list(bootstraps):  # the local network may add to them
                    try:
                        await transport.connect(peer, addresses)
                        answer = await transport.call(peer, asked, timeout_s=MANIFEST_TIMEOUT_S, reply_bytes_max=0)
                    except Forbidden as error:
                        raise NotPermitted(f"run {run_id[:16]}: {error}") from None
                    except (RemoteFault, Unavailable) as error:
                        reason = str(error)
                        continue
                    verify(answer.header.manifest, run_id)
                    return answer.header.manifest
                await asyncio.sleep(MANIFEST_RETRY_S)
    except TimeoutError:
        raise Unreachable(
            f"no bootstrap gave the manifest of run {run_id[:16]} within {MANIFEST_WAIT_S:.0f} s (last: {reason}): "
            "is the run id right and a bootstrap of that run up?"
        ) from None


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What a user should read of a group: the first error of ours, else the first of any."""
    leaves: list[BaseException] = []
    stack: list[BaseException] = [group]
    while stack:
        error = stack.pop(0)
        if isinstance(error, BaseExceptionGroup):
            stack.extend(error.exceptions)
        else:
            leaves.append(error)
    ours = [error for error in leaves if isinstance(error, SwarmnodeError)]
    faults = [error for error in ours if isinstance(error, LocalFault)]
    return (faults or ours or leaves)[0]

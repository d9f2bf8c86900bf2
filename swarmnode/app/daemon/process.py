"""The node process: composition root of the real ports, the node that runs on them, and their shutdown."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import json
import math
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swarmnode import __version__
from swarmnode.app.control.service import ControlServer
from swarmnode.app.daemon import ready_file
from swarmnode.app.daemon.admission import read_access_list
from swarmnode.app.daemon.clock import watch_clock
from swarmnode.app.daemon.control_api import ControlApi, DaemonContext
from swarmnode.app.daemon.dashboard import open_page, tell_watchers
from swarmnode.app.daemon.data_source import base_ports, data_ports, give_chunks
from swarmnode.app.daemon.options import NodeOptions, host_port
from swarmnode.app.daemon.preflight import checkpoints
from swarmnode.app.daemon.priority import take_priority, watch_processor
from swarmnode.app.daemon.reachability import (
    keep_current,
)
from swarmnode.app.daemon.service_manager import Supervisor
from swarmnode.app.daemon.startup import KEY_FILE, start
from swarmnode.app.machine.compute import ThreadCompute
from swarmnode.app.machine.folder_store import FolderStore, open_store
from swarmnode.app.machine.receipt_store import Receipts
from swarmnode.app.machine.replica import TorchReplica
from swarmnode.app.machine.sensors import DailyTraffic, Sensors, local_time
from swarmnode.base.atomic_file import atomic_write
from swarmnode.base.concurrency import processors
from swarmnode.base.damaged_file import put_aside, read_own_json
from swarmnode.base.errors import (
    EXIT_PREEMPTED,
    EXIT_PREEMPTED_INCOMPLETE,
    LocalFault,
    NotPermitted,
    SwarmnodeError,
    Unavailable,
    cause_of,
)
from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId, machine_of, part_id, seeded
from swarmnode.base.metrics import name
from swarmnode.base.ports import Clock, Compute, Priority, Replica, Telemetry, Transport
from swarmnode.base.untrusted_text import printable
from swarmnode.base.wire import call_pb2, record_pb2
from swarmnode.data.corpus import open_corpus
from swarmnode.data.index import Index
from swarmnode.keep.recovery.checkpoint_io import SavedMean
from swarmnode.keep.recovery.resumption import CheckpointOptions
from swarmnode.keep.transfer.chunk_set import SetPorts
from swarmnode.model.device import autocasts, check_device, resolve_device, use_device
from swarmnode.net.transport import key_file
from swarmnode.net.transport.address import parse_bootstraps
from swarmnode.run.manifest import Manifest
from swarmnode.train.node import access_list, membership_handlers
from swarmnode.train.node.chunk_samples import CorpusSamples
from swarmnode.train.node.drain import DrainReport
from swarmnode.train.node.limits import NOT_ASKED, AskedPause, Limits, LimitVerdict, change
from swarmnode.train.node.node import Node
from swarmnode.train.node.node_ports import NodePorts
from swarmnode.train.node.notice import NoticeKind, Notices, of_signal
from swarmnode.train.node.regulator import Regulator, Sense
from swarmnode.train.node.report import ReceiptExchange
from swarmnode.train.node.shared_transport import SharedTransport
from swarmnode.train.pipeline.microbatch_size import Host
from swarmnode.train.pipeline.span import block_around

if TYPE_CHECKING:
    from swarmnode.app.machine.run_archive import Archive
    from swarmnode.data.base_index import BaseIndex

# Assemble a daemon's regulator: limits from its options, rates for its transport, load for its device, and a person's
# pause from the home, where it outlives the process.

PAUSE_FILE = "pause.json"
PAUSE_BYTES_MAX = 64 << 10


def make_regulator(process: DaemonContext, node: Node, compute: ThreadCompute, sense: Sense) -> Regulator:
    """A regulator of the limits in `options`; rates go to the transport, the load to `compute`."""
    throttle = process.transport.throttle
    path = process.options.home / PAUSE_FILE

    def changed(limits: Limits) -> None:
        throttle.up.bps = limits.max_up_bps
        throttle.down.bps = limits.max_down_bps
        throttle.share_quota(limits.quota_nbytes)
        compute.load = limits.max_load or 1.0

    return Regulator(
        change(Limits(), process.options.limits),
        sense,
        node.pause_control,
        node.presence,
        process.telemetry,
        changed,
        asked=read_pause(path),
        keep=lambda asked: write_pause(path, asked),
    )


def read_pause(path: Path) -> AskedPause:
    """The pause kept in `path`; none where there is none, or a damaged one."""

    def take(kept: dict[str, Any]) -> AskedPause:
        until = math.inf if kept["until_unix_s"] is None else float(kept["until_unix_s"])
        if math.isnan(until):
            raise ValueError("a pause until no time")
        return AskedPause(until, printable(str(kept["reason"])))

    return read_own_json(path, PAUSE_BYTES_MAX, take) or NOT_ASKED


def write_pause(path: Path, asked: AskedPause) -> None:
    """Keep `asked` over restarts. Raises LocalFault."""
    until = None if asked.until_unix_s == math.inf else asked.until_unix_s
    try:
        if asked == NOT_ASKED:
            path.unlink(missing_ok=True)
        else:
            atomic_write(path, json.dumps({"until_unix_s": until, "reason": asked.reason}).encode())
    except OSError as error:
        raise LocalFault(
            f"done, but a restart will not know of it: {path} cannot be written: {cause_of(error)}"
        ) from None


def tell_pause(verdict: LimitVerdict, now_unix_s: float) -> None:
    """Say on stderr why a node that starts does not train yet."""
    if verdict.running:
        return
    until = "" if verdict.until_unix_s is None else f"; until {local_time(verdict.until_unix_s - now_unix_s)}"
    click.echo(f"paused: {verdict.reason}{until} (`swarmnode resume` ends a pause or a snooze)", err=True)


def host_of(device: str, compute: ThreadCompute) -> Host:
    """The host of this node. If processors do the arithmetic, as many nodes as processors compute at once, one thread
    each; nodes that rest part of the time leave room for others."""
    if not device.startswith("cpu"):
        return Host()
    count = processors()
    return Host(lambda: count / compute.load)


def _known(process: DaemonContext, node: Node | None) -> list[PeerId]:
    """Bootstraps, and the members that this node knows."""
    members = () if node is None else node.presence.peer_table.swarm().members()
    machines = dict.fromkeys(machine_of(member.peer) for member in members)
    return [*(peer for peer, _ in parse_bootstraps(process.options.bootstrap)), *machines]


async def stay_permitted(process: DaemonContext, node: Node | None, notices: Notices) -> None:
    """Keep the owner's access list current; leave if it no longer admits us."""
    why = await access_list.keep_access_list(
        process.admission,
        process.transport,
        lambda: _known(process, node),
        seeded(process.run_id, "access_list", process.transport.peer_id),
        process.telemetry,
        (lambda: None) if node is None else node.presence.evict_unauthorized,
        here=lambda: read_access_list(process.options),
    )
    process.forbidden.append(why)
    notices.leave(why)


@contextlib.contextmanager
def failure_logged(telemetry: Telemetry) -> Iterator[None]:
    """Log an error that ends the node, and pass it on."""
    try:
        yield
    except Exception as error:
        first = first_error(error) if isinstance(error, BaseExceptionGroup) else error
        telemetry.event("node.failed", level="error", reason=f"{type(first).__name__}: {first}")
        raise


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error in a group to show to the user: the first SwarmnodeError, else the first of any."""
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


def thanking(process: DaemonContext, node: Node, kept: Receipts, clock: Clock) -> ReceiptExchange:
    """Signs receipts for others' work, and collects in `kept` those for this node's work."""
    identity = key_file.load(process.options.home / KEY_FILE)
    manifest = process.manifest
    telemetry = process.telemetry

    def tell() -> None:
        gave = kept.total(process.run_id)
        telemetry.gauge(name.GIVEN_SAMPLES, float(gave.samples))
        telemetry.gauge(name.GIVEN_TOKENS, float(gave.tokens))
        telemetry.gauge(name.GIVEN_TARGETS, float(gave.targets))

    async def keep(receipt: call_pb2.Receipt) -> None:
        await kept.keep(receipt)
        tell()

    tell()
    alone = manifest.pipeline.stages == 1
    context = manifest.model.context
    thanks = ReceiptExchange(
        process.run_id, identity, node.transport.work, clock, telemetry, keep, alone=alone, context=context
    )
    thanks.serve(process.transport)
    return thanks


async def run_node(options: NodeOptions, lock: int | None, before: DaemonContext | None = None) -> int | DaemonContext:
    """Be the node that `options` describe until told to leave. Returns the exit code; where the run's stages are cut
    anew what it was, for the next call. `lock` is that of its home, `before` what it was in the cut before.

    SIGTERM and SIGINT leave in order; a second one exits at once. Raises a SwarmnodeError if it cannot continue.
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
    take_priority(options.priority)
    options = replace(options, device=resolve_device(options.device))
    check_device(options.device)
    use_device(options.device)
    api = ControlApi(options, notices)
    control = ControlServer(options.home, api, lock, api.ready)
    control.hold()
    try:
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(control.stop)
            ready_file.clear(options.home)
            socket = await control.start(host_port(options.control_listen) if options.control_listen else None)
            process = await _unless_told(start(options, stack, before), notices)
            drain_report = None
            if process is not None:
                with failure_logged(process.telemetry):
                    drain_report = await _live(process, control, socket, api, notices, stack)
    except BaseExceptionGroup as group:
        raise first_error(group) from group
    assert notices.told is not None
    if process is not None and process.recut and not signals:
        click.echo(f"starts again: {notices.told.reason}", err=True)
        return process
    click.echo(f"left: {notices.told.reason}{'' if drain_report is None else drain_report.text()}", err=True)
    if notices.told.kind is not NoticeKind.PREEMPT:
        return 0
    return EXIT_PREEMPTED if drain_report is None or drain_report.clean else EXIT_PREEMPTED_INCOMPLETE


async def _unless_told(starting: Coroutine[Any, Any, DaemonContext], notices: Notices) -> DaemonContext | None:
    """The result of `starting`, or None if a notice arrives before it is done: there is no work to save yet."""
    async with asyncio.TaskGroup() as tasks:
        started = tasks.create_task(starting)
        told = tasks.create_task(notices.wait())
        await asyncio.wait({started, told}, return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        if not started.done():
            started.cancel()
    return None if started.cancelled() else started.result()


async def _stay_in_cut(process: DaemonContext, node: Node | None, notices: Notices) -> None:
    """Leave, to start again at once, when the run goes on with its stages cut anew and this node did the round before
    that, if it trains."""
    amendments = process.admission.amendments
    manifest = process.manifest
    while amendments is not None and notices.told is None:
        await asyncio.sleep(manifest.limits.announce_period_s)
        if amendments.cuts[-1] <= process.cut:
            continue
        if node is not None and node.served is not None and node.state == record_pb2.NODE_STATE_TRAINING:
            done = node.stage_status().round_index
        else:  # the run may have gone on where this node sees nobody
            done = 0
            with contextlib.suppress(Unavailable):
                done = await process.directory.claimed() // manifest.gossip.round_samples
        if (cut := amendments.cut(done)) > process.cut:
            process.recut.append(cut)
            # Nodes of two cuts do not see each other: whoever has not heard of this one would stay behind.
            rng = seeded(process.run_id, "cut", process.transport.peer_id)
            await access_list.tell(process.admission, process.transport, _known(process, node), rng)
            notices.leave(f"the run goes on in {amendments.after(cut).pipeline.stages} stages", NoticeKind.STOP)


async def _live(
    process: DaemonContext,
    control: ControlServer,
    socket: Path,
    api: ControlApi,
    notices: Notices,
    stack: contextlib.AsyncExitStack,
) -> DrainReport | None:
    """Run the node, or for a bootstrap only the directory. A transport beyond repair ends either."""
    options = process.options
    node = None
    if options.bootstrap_only:
        process.telemetry.readiness = lambda: (True, "bootstrap")
        await give_chunks(process, options.data_root or options.run_folder)
    else:
        node = await _regulated(process, api, stack)
    api.open(process, node)
    process.recent.on_event = control.watchers.wake

    peer = process.transport.peer_id
    addresses = tuple(f"{address}/p2p/{peer}" for address in await process.transport.addresses())
    page, archive, live = await open_page(process, addresses, process.clock, stack)
    api.offer(archive, live)
    kept = Receipts(options.home)
    thanks = None
    if node is not None:
        api.account(functools.partial(kept.total, process.run_id))
        tell_watchers(process, api, kept, process.clock)
        thanks = thanking(process, node, kept, process.clock)
    elif archive is not None:
        from swarmnode.app.daemon.archive import give_archive

        give_archive(process, archive)
    _tell_ready(process, addresses, str(socket), page, control.address)
    stack.callback(ready_file.clear, options.home)

    beside = [*_beside(process, node, notices), *_beside_of(process, api, archive, thanks, notices)]
    async with asyncio.TaskGroup() as tasks:
        async with _notices_of_cloud(process, notices, tasks, stack):
            others = [tasks.create_task(each) for each in beside]
            drain_report = await _until_told(process, node, notices, thanks)
            api.left.set_result(drain_report)
        for task in others:
            task.cancel()
    if process.forbidden:
        raise NotPermitted(f"run {process.run_id[:16]}: {process.forbidden[0]}")
    return drain_report


async def _regulated(process: DaemonContext, api: ControlApi, stack: contextlib.AsyncExitStack) -> Node:
    """The node, and in `api` its regulator, which has looked once: the node may have been paused when its last process
    ended."""
    node, compute = await _built(process, stack)
    usage = DailyTraffic(process.options.home, lambda: process.transport.throttle.moved_nbytes)
    api.regulator = make_regulator(process, node, compute, Sensors(usage, process.clock, process.options.pace))
    stack.callback(usage.save)
    await api.regulator.once()
    tell_pause(api.regulator.verdict, process.clock.unix_s())
    return node


def _tell_ready(process: DaemonContext, addresses: tuple[str, ...], socket: str, page: str, control: str) -> None:
    """Write where this daemon can be reached into its home, and log that it runs."""
    options = process.options
    ready = ready_file.Ready(
        os.getpid(),
        process.run_id,
        process.transport.peer_id,
        addresses,
        process.metrics_address,
        socket,
        options.stage,
        page,
        control,
    )
    ready_file.write(options.home, ready)
    process.telemetry.event(
        "node.started", addresses=addresses, version=__version__, pid=os.getpid(), name=options.name
    )


def _notices_of_cloud(
    process: DaemonContext, notices: Notices, tasks: asyncio.TaskGroup, stack: contextlib.AsyncExitStack
) -> contextlib.AbstractAsyncContextManager[None]:
    """The context in which a cloud's notices are watched, if `--notice` names one."""
    if process.options.notice == "none":
        return contextlib.nullcontext()
    from swarmnode.app.daemon.notice_watch import watching  # most machines are in no cloud

    return watching(process, notices, tasks, stack)


async def _until_told(
    process: DaemonContext, node: Node | None, notices: Notices, thanks: ReceiptExchange | None
) -> DrainReport | None:
    """Live until a notice says go; a node leaves then, and exchanges receipts for the last time."""
    if node is None:
        await notices.wait()
        return None
    report = await node.run(notices, process.options.stage)
    if thanks is not None:
        await thanks.farewell(process.transport)
    return report


def _beside(process: DaemonContext, node: Node | None, notices: Notices) -> Iterator[Coroutine[Any, Any, None]]:
    """The work of every daemon until it leaves."""
    transport = process.transport
    directory = process.directory
    telemetry = process.telemetry
    clock = process.clock
    moved = (lambda now: None) if node is None else (lambda now: node.presence.note_of_machine(addresses=tuple(now)))
    yield transport.wait_failed()
    yield Supervisor().attend(lambda: telemetry.readiness()[1])
    yield keep_current(transport, directory.contacts, process.options.home, moved)
    period_s = process.manifest.limits.record_ttl_s / 2  # before others find our records too old or too new
    yield watch_clock(clock, directory.clocks_ahead, telemetry, period_s)
    yield watch_processor(telemetry)
    yield stay_permitted(process, node, notices)
    yield _stay_in_cut(process, node, notices)


def _beside_of(
    process: DaemonContext, api: ControlApi, archive: Archive | None, thanks: ReceiptExchange | None, notices: Notices
) -> Iterator[Coroutine[Any, Any, None]]:
    """The work of the parts that only some daemons have."""
    yield api.finished()
    if archive is not None and process.options.archive is not None:
        from swarmnode.app.daemon.archive import run_archive

        yield run_archive(archive, process.options.archive, notices)
    if thanks is not None:
        yield thanks.collect(process.transport)
    if api.regulator is not None:
        yield api.regulator.run()


async def _built(process: DaemonContext, stack: contextlib.AsyncExitStack) -> tuple[Node, ThreadCompute]:
    """The node and its compute thread; lines and directory prefer the peers that it has seen at work."""
    compute = ThreadCompute(process.telemetry)
    stack.callback(compute.close)
    text = data_ports(process, stack)
    base = base_ports(process, stack)
    node = _node(process, await _saving(process), compute, text, base)
    if process.options.device_flops:
        from swarmnode.app.machine.device_pace import device_pace  # of machines that imitate others

        compute.pace = device_pace(process.manifest, process.options.device_flops, lambda: node.stage)
    works = partial(_works, node)
    process.transport.prefer(works)
    process.directory.prefer(works, lambda: node.presence.doubtful)
    return node, compute


def _works(node: Node, peer: PeerId) -> bool:
    """Whether `peer`, or a part of it, was seen at work by one of this machine's nodes."""
    seen = [one.presence.run_progress.clock.history.times for one in (node, *node.parts.values())]
    ids = [peer]
    if node.spans:
        machine = machine_of(peer)
        ids += [machine, *(part_id(machine, stage) for stage in range(len(node.presence.routing.routers)))]
    return any(one in times for times in seen for one in ids)


async def _saving(process: DaemonContext) -> CheckpointOptions:
    """The place of this node's checkpoints, and the one it starts from. Raises UsageError, DataError."""
    options = process.options
    manifest = process.manifest
    resumption = None
    where = checkpoints(options, manifest)
    if options.resume:
        from swarmnode.app.machine.checkup import check, find_resumptions

        resumption = (await find_resumptions(options.resume, process.run_id))[0]
        check(resumption, manifest, process.run_id, other=options.resume_other, where=options.resume)
    signed = base64.b64encode(process.signed.SerializeToString(deterministic=True)).decode()
    saved = options.home / "saved"
    if saved.exists() and not saved.is_dir():
        put_aside(saved, "no folder")
    home = FolderStore(saved)
    archives = tuple(peer for peer, _ in parse_bootstraps(options.bootstrap))
    store = open_store(where) if where else None
    return CheckpointOptions(store, resumption, signed, home=home, archives=archives)


def _ports(
    process: DaemonContext,
    compute: ThreadCompute,
    transport: Transport,
    identity: Identity,
    replica: Callable[[Manifest, int], Replica],
) -> NodePorts:
    """The ports of this machine's first member, without what it saves and reads."""
    assert process.fit is not None, "a bootstrap is no node"
    return NodePorts(
        transport=transport,
        directory=process.directory,
        compute=compute,
        clock=process.clock,
        telemetry=process.telemetry,
        identity=identity,
        replica=replica,
        samples=partial(_samples, process),
        probe=membership_handlers.forward,
        mean=partial(_mean, compute),
        admission=process.admission,
        unable=process.fit.unable,
        role=process.options.role,
        no_files=process.fit.no_files,
        host=Host() if process.options.device_flops else host_of(process.options.device, compute),
        owner=process.signed.owner,
        hashing=asyncio.to_thread,
    )


def _node(
    process: DaemonContext,
    saving: CheckpointOptions,
    compute: ThreadCompute,
    text: SetPorts[Index] | None,
    base: SetPorts[BaseIndex] | None,
) -> Node:
    """The node on its real ports."""
    options = process.options
    manifest = process.manifest
    assert process.fit is not None, "a bootstrap is no node"
    identity = key_file.load(options.home / KEY_FILE)
    shared = SharedTransport(process.transport)
    make = partial(
        TorchReplica,
        device=options.device,
        autocast=autocasts(options.device, options.precision),
        optimizer_state=process.fit.mode.optimizer_state,
        draw=False,
    )
    world = replace(
        _ports(process, compute, shared.member(identity.peer_id), identity, partial(make, sender=identity.peer_id)),
        saving=saving,
        data=text,
        base=base,
    )
    if manifest.pipeline.span_max == 1:
        return Node(manifest, process.run_id, world, process.cut)
    from swarmnode.train.node.span import PartTelemetry, SpanPorts  # few runs' machines serve several stages

    def part(stage: int) -> Node:
        own = identity.part(stage)
        ports = replace(
            world,
            transport=shared.member(own.peer_id),
            telemetry=PartTelemetry(process.telemetry),
            identity=own,
            replica=partial(make, sender=own.peer_id),
            saving=replace(saving, home=FolderStore(options.home / f"saved-{stage}")),
        )
        return Node(manifest, process.run_id, ports, process.cut)

    return Node(manifest, process.run_id, world, process.cut, SpanPorts(partial(_block, process), part))


def _block(process: DaemonContext, stage: int) -> range:
    """The stages that this machine serves where it serves `stage`: all around it that its memory holds."""
    assert process.fit is not None, "a bootstrap is no node"
    pipeline = process.manifest.pipeline
    options = process.options
    most = min(pipeline.span_max, options.stages_max or pipeline.span_max)
    return block_around(stage, pipeline.stages, most, process.fit.holds)


def _samples(process: DaemonContext) -> CorpusSamples:
    options = process.options
    manifest = process.manifest
    corpus = process.corpus or open_corpus(manifest, options.data_root, options.cache)
    return CorpusSamples(corpus, manifest)


async def _mean(compute: Compute, replica: Replica) -> SavedMean | None:
    """A copy of the running mean of `replica`, None if it has none."""
    assert isinstance(replica, TorchReplica)
    if (mean := replica.average) is None:
        return None
    copied = await compute.run(Priority.OUTER, 0, mean.copied)
    return None if copied is None else SavedMean(*copied)

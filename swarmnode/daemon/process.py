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
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from swarmnode import __version__
from swarmnode.atomic_file import atomic_write
from swarmnode.cloud import watch
from swarmnode.cloud.metadata_client import ADDRESS, Metadata
from swarmnode.cloud.watch import Watcher
from swarmnode.concurrency import processors
from swarmnode.control.service import ControlServer
from swarmnode.daemon import ready_file
from swarmnode.daemon.admission import make_admission, pass_of_invite, read_access_list
from swarmnode.daemon.archive import give_archive, run_archive
from swarmnode.daemon.clock import SystemClock, watch_clock
from swarmnode.daemon.control_api import ControlApi, DaemonContext
from swarmnode.daemon.dashboard import open_page, tell_watchers
from swarmnode.daemon.data_source import base_ports, data_ports, give_chunks, told_on_terminal
from swarmnode.daemon.manifest_source import Bootstraps, fetch_manifest
from swarmnode.daemon.options import RUN_ID, NodeOptions, host_port
from swarmnode.daemon.preflight import check_can_work, checkpoints, usable_stages
from swarmnode.daemon.reachability import (
    CONTACTS_ASKED_MAX,
    CONTACTS_FILE,
    first_network_mode,
    keep_current,
    settle,
    stay_reachable,
)
from swarmnode.daemon.service_manager import Supervisor, doing
from swarmnode.damaged_file import put_aside, read_own_json
from swarmnode.data.base_index import BaseIndex
from swarmnode.data.corpus import Corpus, open_corpus
from swarmnode.data.index import Index
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
    cause_of,
)
from swarmnode.gossip import compression
from swarmnode.identity import friendly_name
from swarmnode.ids import PeerId, RunId, seeded, swarm_of
from swarmnode.machine.checkup import check, find_resumptions
from swarmnode.machine.compute import ThreadCompute
from swarmnode.machine.device_pace import device_pace
from swarmnode.machine.folder_store import FolderStore, open_store
from swarmnode.machine.receipt_store import Receipts
from swarmnode.machine.replica import TorchReplica
from swarmnode.machine.sensors import DailyTraffic, Sensors, local_time
from swarmnode.machine.stage_fit import StageFit
from swarmnode.manifest import Manifest, read_signed, verify
from swarmnode.membership.admission import Admission
from swarmnode.membership.amendment import Amendments
from swarmnode.membership.record import STRETCH_MAX
from swarmnode.metrics import name
from swarmnode.metrics.events import RecentEvents
from swarmnode.metrics.exporter import PrometheusTelemetry
from swarmnode.model.device import autocasts, check_device, resolve_device, use_device
from swarmnode.model.export import StageLabel, save_stage, stage_state_dict
from swarmnode.node import access_list, membership_handlers
from swarmnode.node.chunk_samples import CorpusSamples
from swarmnode.node.drain import DrainReport
from swarmnode.node.limits import NOT_ASKED, AskedPause, Limits, LimitVerdict, change
from swarmnode.node.membership_handlers import MembershipHandlers
from swarmnode.node.node import Node
from swarmnode.node.node_ports import NodePorts
from swarmnode.node.notice import Notice, NoticeKind, Notices, of_signal
from swarmnode.node.regulator import Regulator, Sense
from swarmnode.node.report import ReceiptExchange
from swarmnode.pipeline.microbatch_size import Host
from swarmnode.ports import Clock, Compute, Priority, Replica, Telemetry
from swarmnode.recovery.recovery_source import LOST_WAIT_S
from swarmnode.recovery.resumption import CheckpointOptions
from swarmnode.transfer.chunk_set import SetPorts
from swarmnode.transport import hivemind_patches, key_file
from swarmnode.transport.address import parse_bootstraps
from swarmnode.transport.call_directory import JOIN_TIMEOUT_S, claimed_by
from swarmnode.transport.capacity import CapacityResponder
from swarmnode.transport.contact import Contacts
from swarmnode.transport.kind import directory_of, kind_of, open_transport
from swarmnode.transport.reachability import ReachHelper, connected
from swarmnode.transport.stream_transport import StreamTransport
from swarmnode.untrusted_text import printable
from swarmnode.wire import call_pb2, record_pb2

KEY_FILE = "node.key"
EVENTS_FILE = "events.jsonl"


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


async def watched(
    cloud: str, url: str | None, clock: Clock, telemetry: Telemetry, stack: contextlib.AsyncExitStack
) -> Watcher | None:
    """The watcher of `cloud` at `url` (None: the cloud's own address), closed by `stack`; None if there is none.

    "auto" outside of clouds sends no request. Raises Unavailable if no metadata service answers at a given `url`.
    """
    if cloud == "none":
        return None
    reason = "asked for"
    if cloud == "auto" and url is None:
        watcher = watch.by_dmi(watch.read_dmi())
        if watcher is None:
            return None
        cloud = watcher
        reason = "this machine's firmware says so"
    metadata = Metadata(url or ADDRESS)
    stack.push_async_callback(metadata.close)
    if cloud == "auto":
        watcher = await watch.by_asking(metadata)
        if watcher is None:
            raise Unavailable(f"--notice-url {url}: no metadata service of AWS, GCP or Azure answers there")
        cloud = watcher
        reason = "it answers"
    telemetry.event("notice.watching", source=cloud, url=metadata.base, reason=reason)
    return watch.watcher_of(cloud, metadata, clock, telemetry)


async def acknowledge(watcher: Watcher, told: Notice, telemetry: Telemetry) -> None:
    """Tell `watcher`'s cloud that this machine is ready to go; a failure is only logged."""
    try:
        if told.source == watcher.source and await watcher.acknowledge(told):
            telemetry.event("notice.acknowledged", source=told.source, id=told.id)
    except SwarmnodeError as error:
        telemetry.event("notice.unreadable", level="warning", source=told.source, reason=str(error))


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
    return [*(peer for peer, _ in parse_bootstraps(process.options.bootstrap)), *(member.peer for member in members)]


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
            process = await _unless_told(_start(options, stack, before), notices)
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


def _transport_kind(
    signed: record_pb2.SignedManifest | None, run_id: RunId, options: NodeOptions, contacts: Contacts
) -> str:
    """The run's transport by its manifest, else by the addresses of its machines that are known here."""
    if signed is not None:
        return verify(signed, run_id)[0].transport.kind
    return kind_of([*options.bootstrap, *(one for _, contact in contacts.latest(1) for one in contact.addresses)])


async def _start(options: NodeOptions, stack: contextlib.AsyncExitStack, before: DaemonContext | None) -> DaemonContext:
    """Set up key, telemetry, transport, manifest and directory, in this order; `stack` takes each down."""
    identity = key_file.load_or_create(options.home / KEY_FILE)
    options = replace(options, name=options.name or friendly_name(identity.peer_id))
    bootstraps = parse_bootstraps(options.bootstrap)
    signed, run_id = _named(options.run) if before is None else (before.signed, before.run_id)
    clock = SystemClock()
    hivemind_patches.keep_time(clock.unix_s)
    recent = RecentEvents(clock)
    path = options.home / EVENTS_FILE
    echo = told_on_terminal(recent)
    telemetry = PrometheusTelemetry(clock=clock, run=run_id, node=identity.peer_id, path=path, echo=echo)
    stack.push_async_callback(telemetry.close)
    metrics_address = await telemetry.serve(options.metrics_port, options.metrics_host)
    reachability = "public" if options.bootstrap_only else options.reachability
    network_mode = first_network_mode(options.listen, reachability)
    listen = [options.listen]
    given = {"network_mode": network_mode, "telemetry": telemetry, "named": bootstraps, "lan": options.lan}
    if options.announce:
        given["announce"] = (options.announce,)
    if before is not None:  # others know its port, and it knows where they are
        listen = before.transport.listening
        given["book"] = before.transport.book
    contacts = Contacts.load(options.home / CONTACTS_FILE, clock.unix_s())
    kind = _transport_kind(signed, run_id, options, contacts)
    with doing("opening the network"):
        transport = await open_transport(kind, options.home / KEY_FILE, identity, run_id, listen, **given)
    stack.push_async_callback(transport.close)
    known = [*bootstraps, *((peer, list(one.addresses)) for peer, one in contacts.latest(CONTACTS_ASKED_MAX))]
    if options.invite is not None:
        transport.own_pass = pass_of_invite(options.invite, identity.peer_id)
    signed, manifest = await _manifest(signed, run_id, options, known, kind, transport)
    telemetry.event("manifest.verified", name=manifest.name)
    admission = make_admission(signed, manifest, run_id, options, identity, clock)
    amendments = admission.amendments
    assert amendments is not None
    if before is not None:
        admission.learn(before.admission.news(call_pb2.AccessListRequest()))
        options = replace(options, stage=None, resume="")  # they are of the cut before
    cut = await _cut(options, amendments, contacts, transport) if before is None else before.recut[0]
    manifest = amendments.after(cut) if cut else manifest
    swarm = swarm_of(run_id, cut)
    fit, corpus = await _able(options, manifest)
    transport.let_in(admission)
    with doing("asking whether this machine may take part"):
        await _hear_access(admission, transport, bootstraps, run_id)
    if cut:  # what joiners are told
        contacts.trained(swarm, amendments.chain[cut - 1].from_round * manifest.gossip.round_samples)
        contacts.save(options.home / CONTACTS_FILE)  # killed a second later it comes back to this cut
    MembershipHandlers(signed, admission, lambda: contacts.samples.get(swarm, 0)).serve(transport)
    ReachHelper(transport.observed, transport.greets).serve(transport)
    CapacityResponder().serve(transport)
    with doing("trying whether others reach this machine"):
        reach = await settle(transport, known, network_mode, reachability, telemetry)
    if network_mode.kind == "open" and reachability == "auto":
        transport.spawn(stay_reachable(transport, known, network_mode, reach, telemetry))
    with doing("looking for the other machines"):
        directory = await directory_of(kind).create(
            transport,
            _first_asked(options, contacts, bootstraps),
            run_id=swarm,
            stages=manifest.pipeline.stages + 1,  # the place of nodes without a stage, which older versions look up
            unix_s=clock.unix_s,
            ttl_max_s=STRETCH_MAX * manifest.limits.record_ttl_s,
            telemetry=telemetry,
            contacts=contacts,
            admission=admission,
            join_timeout_s=JOIN_TIMEOUT_S if before is None else LOST_WAIT_S,  # all start again, each when it can
        )
    stack.push_async_callback(directory.close)
    here = options, run_id, manifest, transport, directory, telemetry, metrics_address
    return DaemonContext(*here, recent, signed, admission, clock, cut, swarm, fit, corpus)


async def _manifest(
    signed: record_pb2.SignedManifest | None,
    run_id: RunId,
    options: NodeOptions,
    known: Sequence[tuple[PeerId, list[str]]],
    kind: str,
    transport: StreamTransport,
) -> tuple[record_pb2.SignedManifest, Manifest]:
    """The run's manifest, asked of those `known` where it is not here. Raises ManifestError for another's invite."""
    if signed is None:
        with doing(f"asking {len(known)} meeting point{'s' * (len(known) != 1)} for the run"):
            signed = await fetch_manifest(transport, known, run_id)
    manifest, _ = verify(signed, run_id)
    if manifest.transport.kind != kind:
        raise ManifestError(f"the run talks over {manifest.transport.kind}: ask the organiser for a new invite")
    if options.invite is not None and signed.owner != options.invite.owner:
        raise ManifestError("the invite names another owner than the run's manifest: ask the organiser for a new one")
    return signed, manifest


async def _able(options: NodeOptions, manifest: Manifest) -> tuple[StageFit | None, Corpus | None]:
    """The stages that this machine can serve, None for a bootstrap, and the run's text in its files, if it feeds."""
    with doing("checking compiler, disk and data"):
        await asyncio.to_thread(compression.build, manifest.gossip.codec)
        fit = None if options.bootstrap_only else usable_stages(options, manifest)
        return fit, None if fit is None else await check_can_work(options, manifest, fit)


async def _cut(options: NodeOptions, amendments: Amendments, contacts: Contacts, transport: StreamTransport) -> int:
    """The cut of the run's stages now, as far as this home, bootstraps and the checkpoint to resume know how far the
    run is."""
    if len(amendments.cuts) == 1:
        return 0
    samples = [contacts.samples.get(swarm_of(amendments.run_id, cut), 0) for cut in amendments.cuts]
    if options.resume:
        samples.append((await find_resumptions(options.resume, amendments.run_id))[0].checkpoint.samples)
    for peer in await connected(transport, parse_bootstraps(options.bootstrap)):
        samples.append(await claimed_by(transport, peer) or 0)
    return amendments.cut(max(samples) // amendments.newest.gossip.round_samples)


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


def _named(run: str) -> tuple[record_pb2.SignedManifest | None, RunId]:
    """The signed manifest in file `run`, if that is no run id, and the run's id."""
    if RUN_ID.match(run):
        return None, RunId(run)
    signed, _ = read_signed(Path(run))
    return signed, verify(signed, None)[1]


def _first_asked(options: NodeOptions, contacts: Contacts, bootstraps: Bootstraps) -> Bootstraps:
    """The bootstraps of which one must answer. A meeting point that members look for waits for none."""
    if not options.bootstrap_only or not contacts.known:
        return bootstraps
    for peer, addresses in bootstraps:
        contacts.tell(peer, addresses)
    return ()


async def _hear_access(admission: Admission, transport: StreamTransport, bootstraps: Bootstraps, run_id: RunId) -> None:
    """Ask `bootstraps` for the owner's newest access list; amendments came with the manifest. Raises NotPermitted if
    this node may not take part."""
    for peer in await connected(transport, bootstraps):
        with contextlib.suppress(RemoteFault, Unavailable):  # they are asked again later
            try:
                await access_list.ask(admission, transport, peer)
            except Forbidden as refusal:
                access_list.take_evidence(admission, refusal)
    permit, reason = admission.judge_me(transport.peer_id)
    if not permit:
        raise NotPermitted(f"run {run_id[:16]}: {reason}")


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
    telemetry = process.telemetry
    node = None
    if options.bootstrap_only:
        telemetry.readiness = lambda: (True, "bootstrap")
        await give_chunks(process, options.data_root or options.run_folder)
    else:
        node, compute = await _built(process, stack)
        usage = DailyTraffic(options.home, lambda: process.transport.throttle.moved_nbytes)
        api.regulator = make_regulator(process, node, compute, Sensors(usage, process.clock, options.pace))
        stack.callback(usage.save)
        await api.regulator.once()  # before the node joins: it may have been paused when the process ended
        tell_pause(api.regulator.verdict, process.clock.unix_s())
    api.open(process, node)

    def give(notice: Notice) -> None:
        if notices.give(notice):
            fields = {"source": notice.source, "kind": notice.kind, "left_s": notice.deadline_s, "id": notice.id}
            telemetry.event("notice.received", level="warning", **fields, reason=notice.reason)

    process.recent.on_event = control.watchers.wake
    peer = process.transport.peer_id
    addresses = tuple(f"{address}/p2p/{peer}" for address in await process.transport.addresses())
    page, archive, live = await open_page(process, addresses, process.clock, stack)
    api.offer(archive, live)
    if archive is not None and node is None:
        give_archive(process, archive)
    kept = Receipts(options.home)
    if node is not None:
        api.account(functools.partial(kept.total, process.run_id))
        tell_watchers(process, api, kept, process.clock)
    ready_file.write(
        options.home,
        ready_file.Ready(
            os.getpid(),
            process.run_id,
            peer,
            addresses,
            process.metrics_address,
            str(socket),
            options.stage,
            page,
            control.address,
        ),
    )
    stack.callback(ready_file.clear, options.home)
    telemetry.event("node.started", addresses=addresses, version=__version__, pid=os.getpid(), name=options.name)
    async with asyncio.TaskGroup() as tasks:
        watcher = await watched(options.notice, options.notice_url, process.clock, telemetry, stack)
        watching = [tasks.create_task(watcher.run(give))] if watcher is not None else []
        beside = [*_beside(process, node, notices), api.finished(), run_archive(archive, options.archive, notices)]
        thanks = None if node is None else thanking(process, node, kept, process.clock)
        if thanks is not None:
            beside.append(thanks.collect(process.transport))
        if api.regulator is not None:
            beside.append(api.regulator.run())
        others = [tasks.create_task(each) for each in beside]
        drain_report = await _until_told(process, node, notices, thanks)
        api.left.set_result(drain_report)
        for task in watching:
            task.cancel()
        if watcher is not None:
            assert notices.told is not None
            await acknowledge(watcher, notices.told, telemetry)
        for task in others:
            task.cancel()
    if process.forbidden:
        raise NotPermitted(f"run {process.run_id[:16]}: {process.forbidden[0]}")
    return drain_report


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
    moved = (lambda now: None) if node is None else (lambda now: node.presence.note(addresses=tuple(now)))
    yield transport.wait_failed()
    yield Supervisor().attend(lambda: telemetry.readiness()[1])
    yield keep_current(transport, directory.contacts, process.options.home, moved)
    period_s = process.manifest.limits.record_ttl_s / 2  # before others find our records too old or too new
    yield watch_clock(clock, directory.clocks_ahead, telemetry, period_s)
    yield stay_permitted(process, node, notices)
    yield _stay_in_cut(process, node, notices)


async def _built(process: DaemonContext, stack: contextlib.AsyncExitStack) -> tuple[Node, ThreadCompute]:
    """The node and its compute thread; lines and directory prefer the peers that it has seen at work."""
    compute = ThreadCompute(process.telemetry)
    stack.callback(compute.close)
    text = data_ports(process, stack)
    base = base_ports(process, stack)
    node = _node(process, await _saving(process), compute, text, base)
    if process.options.device_flops:
        compute.pace = device_pace(process.manifest, process.options.device_flops, lambda: node.stage)
    works = node.presence.run_progress.clock.history.times.__contains__
    process.transport.prefer(works)
    process.directory.prefer(works, lambda: node.presence.doubtful)
    return node, compute


async def _saving(process: DaemonContext) -> CheckpointOptions:
    """The place of this node's checkpoints, and the one it starts from. Raises UsageError, DataError."""
    options = process.options
    manifest = process.manifest
    resumption = None
    where = checkpoints(options, manifest)
    if options.resume:
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
    telemetry = process.telemetry
    fast = autocasts(options.device, options.precision)
    assert process.fit is not None, "a bootstrap is no node"
    identity = key_file.load(options.home / KEY_FILE)
    world = NodePorts(
        transport=process.transport,
        directory=process.directory,
        compute=compute,
        clock=process.clock,
        telemetry=telemetry,
        identity=identity,
        replica=partial(
            TorchReplica,
            device=options.device,
            autocast=fast,
            sender=process.transport.peer_id,
            optimizer_state=process.fit.mode.optimizer_state,
            draw=False,
        ),
        samples=partial(_samples, process),
        probe=membership_handlers.forward,
        save=partial(_save, process, compute),
        saving=saving,
        admission=process.admission,
        unable=process.fit.unable,
        role=options.role,
        no_files=process.fit.no_files,
        host=Host() if options.device_flops else host_of(options.device, compute),
        owner=process.signed.owner,
        hashing=asyncio.to_thread,
        data=text,
        base=base,
    )
    return Node(manifest, process.run_id, world, process.cut)


def _samples(process: DaemonContext) -> CorpusSamples:
    options = process.options
    manifest = process.manifest
    corpus = process.corpus or open_corpus(manifest, options.data_root, options.cache)
    return CorpusSamples(corpus, manifest)


async def _save(
    process: DaemonContext, compute: Compute, replica: Replica, stage: int, round_index: int, samples: int
) -> None:
    """Save the stage's fast weights and their running mean in the home, in the format of `swarmnode export`."""
    assert isinstance(replica, TorchReplica)
    peer = process.transport.peer_id
    mean = replica.average
    path = process.options.home / f"stage-{stage}-{peer[-8:]}.safetensors"
    weights = await compute.run(Priority.OUTER, 0, partial(stage_state_dict, replica.stage))
    average = None
    span = 0
    if mean is not None and mean.value is not None:
        average = await compute.run(Priority.OUTER, 0, partial(stage_state_dict, replica.stage, mean.value))
        span = mean.span
    label = StageLabel(process.run_id, stage=stage, round=round_index, samples=samples, peer=peer, averaged=span)
    await asyncio.to_thread(save_stage, path, weights, label, average)

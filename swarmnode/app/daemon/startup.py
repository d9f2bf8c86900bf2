"""Start a daemon: key, telemetry, network, the run's rules, reachability and directory, in this order."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, replace
from pathlib import Path

from swarmnode.app.daemon.admission import make_admission, pass_of_invite
from swarmnode.app.daemon.clock import SystemClock
from swarmnode.app.daemon.control_api import DaemonContext
from swarmnode.app.daemon.data_source import told_on_terminal
from swarmnode.app.daemon.manifest_source import Bootstraps, fetch_manifest
from swarmnode.app.daemon.options import RUN_ID, NodeOptions
from swarmnode.app.daemon.preflight import check_can_work, usable_stages
from swarmnode.app.daemon.reachability import (
    CONTACTS_ASKED_MAX,
    CONTACTS_FILE,
    first_network_mode,
    settle,
    stay_reachable,
)
from swarmnode.app.daemon.service_manager import doing
from swarmnode.app.machine.stage_fit import StageFit
from swarmnode.base.errors import Forbidden, ManifestError, NotPermitted, RemoteFault, Unavailable
from swarmnode.base.identity import Identity, friendly_name
from swarmnode.base.ids import PeerId, RunId, swarm_of
from swarmnode.base.metrics.events import Echo, RecentEvents
from swarmnode.base.metrics.exporter import PrometheusTelemetry
from swarmnode.base.wire import call_pb2, record_pb2
from swarmnode.data.corpus import Corpus
from swarmnode.keep.recovery.recovery_source import LOST_WAIT_S
from swarmnode.net.membership.record import STRETCH_MAX
from swarmnode.net.transport import hivemind_patches, key_file
from swarmnode.net.transport.address import parse_bootstraps
from swarmnode.net.transport.call_directory import JOIN_TIMEOUT_S, CallDirectory
from swarmnode.net.transport.capacity import CapacityResponder
from swarmnode.net.transport.contact import Contacts
from swarmnode.net.transport.contact_keeper import claimed_by
from swarmnode.net.transport.kind import directory_of, kind_of, open_transport
from swarmnode.net.transport.p2pd import NetworkMode
from swarmnode.net.transport.reachability import ReachHelper, connected
from swarmnode.net.transport.stream_transport import StreamTransport
from swarmnode.run.admission.admission import Admission
from swarmnode.run.admission.amendment import Amendments
from swarmnode.run.manifest import Manifest, read_signed, verify
from swarmnode.train.gossip import compression
from swarmnode.train.node import access_list
from swarmnode.train.node.membership_handlers import MembershipHandlers
from swarmnode.train.node.waiting import Waits

KEY_FILE = "node.key"
EVENTS_FILE = "events.jsonl"


@dataclass(frozen=True, slots=True)
class _Beginning:
    """The knowledge of a daemon before it has asked anybody. `before`: the same daemon in the cut before, if it starts
    again because the run's stages were cut anew. `signed`: None where meeting points are asked for the manifest.
    `kind`: of the run's transport."""

    options: NodeOptions
    before: DaemonContext | None
    identity: Identity
    bootstraps: Bootstraps
    signed: record_pb2.SignedManifest | None
    run_id: RunId
    clock: SystemClock
    contacts: Contacts
    kind: str

    @property
    def reachability(self) -> str:
        return "public" if self.options.bootstrap_only else self.options.reachability

    @property
    def network_mode(self) -> NetworkMode:
        return first_network_mode(self.options.listen, self.reachability)

    @property
    def known(self) -> list[tuple[PeerId, list[str]]]:
        """The machines that may answer: those that the user named, then those met last."""
        latest = self.contacts.latest(CONTACTS_ASKED_MAX)
        return [*self.bootstraps, *((peer, list(contact.addresses)) for peer, contact in latest)]


@dataclass(frozen=True, slots=True)
class _Rules:
    """The run as its owner signed it. `cut`: the amendment that cut the stages as they are now, 0 if none did;
    `manifest`: with the amendments up to it."""

    signed: record_pb2.SignedManifest
    manifest: Manifest
    admission: Admission
    amendments: Amendments
    cut: int


async def start(options: NodeOptions, stack: contextlib.AsyncExitStack, before: DaemonContext | None) -> DaemonContext:
    """Set up all that a daemon needs before it serves; `stack` takes each part down.

    Raises a SwarmnodeError if this machine cannot or may not take part.
    """
    begin = _begin(options, before)
    options = begin.options
    recent = RecentEvents(begin.clock)
    waits = Waits(begin.clock.unix_s)
    telemetry = _telemetry(begin, recent, waits)
    stack.push_async_callback(telemetry.close)
    metrics_address = await telemetry.serve(options.metrics_port, options.metrics_host)
    transport = await _open(begin, telemetry)
    stack.push_async_callback(transport.close)

    rules = await _learn_rules(begin, transport)
    if before is not None:
        options = replace(options, stage=None, resume="")  # they are of the cut before
    telemetry.event("manifest.verified", name=rules.manifest.name)
    swarm = swarm_of(begin.run_id, rules.cut)
    fit, corpus = await _able(options, rules.manifest)

    transport.let_in(rules.admission)
    with doing("asking whether this machine may take part"):
        await _hear_access(rules.admission, transport, begin.bootstraps, begin.run_id)
    _note_cut(begin, rules, swarm)
    _answer_strangers(begin, rules, swarm, transport)

    await _settle(begin, transport, telemetry)
    directory = await _directory(begin, rules, swarm, transport, telemetry)
    stack.push_async_callback(directory.close)
    return DaemonContext(
        options,
        begin.run_id,
        rules.manifest,
        transport,
        directory,
        telemetry,
        metrics_address,
        recent,
        rules.signed,
        rules.admission,
        begin.clock,
        rules.cut,
        swarm,
        waits,
        fit,
        corpus,
    )


def _begin(options: NodeOptions, before: DaemonContext | None) -> _Beginning:
    """The beginning, by the options, this home and the cut before."""
    identity = key_file.load_or_create(options.home / KEY_FILE)
    bootstraps = parse_bootstraps(options.bootstrap)
    signed, run_id = _named(options.run) if before is None else (before.signed, before.run_id)
    clock = SystemClock()
    hivemind_patches.keep_time(clock.unix_s)
    contacts = Contacts.load(options.home / CONTACTS_FILE, clock.unix_s())
    kind = _transport_kind(signed, run_id, options, contacts)
    options = replace(options, name=options.name or friendly_name(identity.peer_id))
    return _Beginning(options, before, identity, bootstraps, signed, run_id, clock, contacts, kind)


def _named(run: str) -> tuple[record_pb2.SignedManifest | None, RunId]:
    """The signed manifest in file `run`, if that is no run id, and the run's id."""
    if RUN_ID.match(run):
        return None, RunId(run)
    signed, _ = read_signed(Path(run))
    return signed, verify(signed, None)[1]


def _transport_kind(
    signed: record_pb2.SignedManifest | None, run_id: RunId, options: NodeOptions, contacts: Contacts
) -> str:
    """The run's transport by its manifest, else by the addresses of its machines that are known here."""
    if signed is not None:
        return verify(signed, run_id)[0].transport.kind
    return kind_of([*options.bootstrap, *(one for _, contact in contacts.latest(1) for one in contact.addresses)])


def _telemetry(begin: _Beginning, echo: Echo, waits: Waits) -> PrometheusTelemetry:
    return PrometheusTelemetry(
        clock=begin.clock,
        run=begin.run_id,
        node=begin.identity.peer_id,
        path=begin.options.home / EVENTS_FILE,
        echo=told_on_terminal(echo),
        hear=waits.hear,
    )


async def _open(begin: _Beginning, telemetry: PrometheusTelemetry) -> StreamTransport:
    """The transport, listening; after a new cut on the port that others know, with the places that it knew."""
    options = begin.options
    listen = [options.listen]
    given = {
        "network_mode": begin.network_mode,
        "telemetry": telemetry,
        "named": begin.bootstraps,
        "lan": options.lan,
    }
    if options.announce:
        given["announce"] = (options.announce,)
    if begin.before is not None:
        listen = begin.before.transport.listening
        given["book"] = begin.before.transport.book
    with doing("opening the network"):
        transport = await open_transport(
            begin.kind, options.home / KEY_FILE, begin.identity, begin.run_id, listen, **given
        )
    if options.invite is not None:
        transport.own_pass = pass_of_invite(options.invite, begin.identity.peer_id)
    return transport


async def _learn_rules(begin: _Beginning, transport: StreamTransport) -> _Rules:
    """The manifest, who may take part, and how the stages are cut now."""
    signed, manifest = await _manifest(begin, transport)
    admission = make_admission(signed, manifest, begin.run_id, begin.options, begin.identity, begin.clock)
    amendments = admission.amendments
    assert amendments is not None
    if begin.before is None:
        cut = await _cut(begin.options, amendments, begin.contacts, transport)
    else:
        admission.learn(begin.before.admission.news(call_pb2.AccessListRequest()))
        cut = begin.before.recut[0]
    return _Rules(signed, amendments.after(cut) if cut else manifest, admission, amendments, cut)


async def _manifest(begin: _Beginning, transport: StreamTransport) -> tuple[record_pb2.SignedManifest, Manifest]:
    """The run's manifest, asked of machines that may know it where it is not here. Raises ManifestError for another's
    invite."""
    signed = begin.signed
    if signed is None:
        known = begin.known
        with doing(f"asking {len(known)} meeting point{'s' * (len(known) != 1)} for the run"):
            signed = await fetch_manifest(transport, known, begin.run_id)
    manifest, _ = verify(signed, begin.run_id)
    if manifest.transport.kind != begin.kind:
        raise ManifestError(f"the run talks over {manifest.transport.kind}: ask the organiser for a new invite")
    invite = begin.options.invite
    if invite is not None and signed.owner != invite.owner:
        raise ManifestError("the invite names another owner than the run's manifest: ask the organiser for a new one")
    return signed, manifest


async def _cut(options: NodeOptions, amendments: Amendments, contacts: Contacts, transport: StreamTransport) -> int:
    """The cut of the run's stages now, as far as this home, bootstraps and the checkpoint to resume know how far the
    run is."""
    if len(amendments.cuts) == 1:
        return 0
    samples = [contacts.samples.get(swarm_of(amendments.run_id, cut), 0) for cut in amendments.cuts]
    if options.resume:
        from swarmnode.app.machine.checkup import find_resumptions

        samples.append((await find_resumptions(options.resume, amendments.run_id))[0].checkpoint.samples)
    for peer in await connected(transport, parse_bootstraps(options.bootstrap)):
        samples.append(await claimed_by(transport, peer) or 0)
    return amendments.cut(max(samples) // amendments.newest.gossip.round_samples)


async def _able(options: NodeOptions, manifest: Manifest) -> tuple[StageFit | None, Corpus | None]:
    """The stages that this machine can serve, None for a bootstrap, and the run's text in its files, if it feeds."""
    with doing("checking compiler, disk and data"):
        await asyncio.to_thread(compression.build, manifest.gossip.codec)
        fit = None if options.bootstrap_only else usable_stages(options, manifest)
        return fit, None if fit is None else await check_can_work(options, manifest, fit)


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


def _note_cut(begin: _Beginning, rules: _Rules, swarm: RunId) -> None:
    """Keep on disk how far the run is in a new cut: joiners are told, and a daemon that is killed comes back to it."""
    if not rules.cut:
        return
    round_index = rules.amendments.chain[rules.cut - 1].from_round
    begin.contacts.trained(swarm, round_index * rules.manifest.gossip.round_samples)
    begin.contacts.save(begin.options.home / CONTACTS_FILE)


def _answer_strangers(begin: _Beginning, rules: _Rules, swarm: RunId, transport: StreamTransport) -> None:
    """Serve the calls that machines make before they are members."""
    contacts = begin.contacts
    MembershipHandlers(rules.signed, rules.admission, lambda: contacts.samples.get(swarm, 0)).serve(transport)
    ReachHelper(transport.observed, transport.greets).serve(transport)
    CapacityResponder().serve(transport)


async def _settle(begin: _Beginning, transport: StreamTransport, telemetry: PrometheusTelemetry) -> None:
    """Find out whether others reach this machine, else be reached through relays."""
    mode = begin.network_mode
    with doing("trying whether others reach this machine"):
        reach = await settle(transport, begin.known, mode, begin.reachability, telemetry)
    if mode.kind == "open" and begin.reachability == "auto":
        transport.spawn(stay_reachable(transport, begin.known, mode, reach, telemetry))


async def _directory(
    begin: _Beginning, rules: _Rules, swarm: RunId, transport: StreamTransport, telemetry: PrometheusTelemetry
) -> CallDirectory:
    """The directory of records, after a bootstrap has answered."""
    manifest = rules.manifest
    with doing("looking for the other machines"):
        return await directory_of(begin.kind).create(
            transport,
            _first_asked(begin.options, begin.contacts, begin.bootstraps),
            run_id=swarm,
            stages=manifest.pipeline.stages + 1,  # the place of nodes without a stage, which older versions look up
            unix_s=begin.clock.unix_s,
            ttl_max_s=STRETCH_MAX * manifest.limits.record_ttl_s,
            telemetry=telemetry,
            contacts=begin.contacts,
            admission=rules.admission,
            join_timeout_s=JOIN_TIMEOUT_S if begin.before is None else LOST_WAIT_S,  # all start again, when they can
        )


def _first_asked(options: NodeOptions, contacts: Contacts, bootstraps: Bootstraps) -> Bootstraps:
    """The bootstraps of which one must answer. A meeting point that members look for waits for none."""
    if not options.bootstrap_only or not contacts.known:
        return bootstraps
    for peer, addresses in bootstraps:
        contacts.tell(peer, addresses)
    return ()

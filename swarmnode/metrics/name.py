"""The names of everything a node counts and everything it says: one table of metrics, one of events.

Prometheus practice: base units (seconds, bytes, nats), `_total` on counters, and no label whose values grow with the
swarm. A label is either closed (its values are listed) or a short word without digits, so that a peer id never fits.
Names outside these tables are a bug of ours, so they raise AssertionError.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final


class Kind(enum.StrEnum):
    """What a metric does: grows, goes up and down, or is spread over buckets."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


OPEN: Final[tuple[str, ...]] = ()
"""A label whose values are not listed: any word of letters and underscores, at most 32 long."""

FREE: Final[tuple[str, ...]] = ("",)
"""A label with one value a process, whatever it is (the run's id): it does not grow with the swarm either."""

BASE_UNITS: Final = ("seconds", "bytes", "nats")
"""Units that end the name; others are counted things and are said in the help."""

_WORD = re.compile(r"[A-Za-z][A-Za-z_]{0,31}\Z")


@dataclass(frozen=True, slots=True)
class Metric:
    """One row: `labels` maps each label to the values it may take (`OPEN`: any word); `buckets` are upper bounds."""

    name: str
    kind: Kind
    unit: str
    help: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()


METRICS: Final[dict[str, Metric]] = {}


def _metric(
    kind: Kind,
    name: str,
    unit: str,
    text: str,
    labels: Mapping[str, tuple[str, ...]] | None = None,
    buckets: tuple[float, ...] = (),
) -> str:
    assert name not in METRICS, f"metric {name} is declared twice"
    METRICS[name] = Metric(name, kind, unit, text, labels or {}, buckets)
    return name


def _counter(name: str, unit: str, text: str, **labels: tuple[str, ...]) -> str:
    return _metric(Kind.COUNTER, name, unit, text, labels)


def _gauge(name: str, unit: str, text: str, **labels: tuple[str, ...]) -> str:
    return _metric(Kind.GAUGE, name, unit, text, labels)


def _histogram(name: str, unit: str, text: str, *buckets: float) -> str:
    return _metric(Kind.HISTOGRAM, name, unit, text, None, buckets)


# The way of a microbatch.
MICROBATCHES = _counter(
    "swarmnode_microbatches_total",
    "microbatches",
    "Microbatches by what became of them: done, lost and validated are counted by the feeder; retried by the hop that "
    "repaired the way onward; duplicate by the replica it reached a second time.",
    outcome=("done", "lost", "retried", "duplicate", "validated"),
)
STALENESS = ("0", "1", "2", "3", "4 or more")
GRADIENTS = _counter(
    "swarmnode_gradients_total",
    "gradients",
    "Microbatch gradients of this replica, by the inner steps it took between their forward and their backward.",
    staleness=STALENESS,
)
STALE_GRADIENTS = _counter(
    "swarmnode_stale_gradients_total",
    "gradients",
    "Microbatch gradients not added because they were older than pipeline.staleness_max.",
)
AUDITS = _counter(
    "swarmnode_audits_total",
    "audits",
    "Answers of other replicas done again and compared, by what was found. undone: no other replica did it; unshown: "
    "its server did not show what it had answered by; undecided: as many contradict it as agree.",
    outcome=("right", "wrong", "undecided", "undone", "unshown"),
)
REDONE = _counter("swarmnode_redone_total", "microbatches", "Hops of microbatches done again for others' audits.")
CLIPPED_GRADIENTS = _counter(
    "swarmnode_clipped_gradients_total",
    "gradients",
    "Gradients that came back much longer than usual, and were clipped.",
)
SAMPLES = _counter("swarmnode_samples_total", "samples", "Samples this node fed whose gradient came back.")
DUPLICATE_SAMPLES = _counter(
    "swarmnode_duplicate_samples_total", "samples", "Samples of blocks this feeder finished and another finished too."
)
TOKENS = _counter("swarmnode_tokens_total", "tokens", "Target tokens of the samples this node fed.")
BUSY = _counter("swarmnode_busy_total", "calls", "Calls refused because every place here was taken.")
WINDOW = _gauge("swarmnode_window", "microbatches", "Microbatches this feeder keeps under way.")
WINDOW_WANTED = _gauge(
    "swarmnode_window_wanted",
    "microbatches",
    "Microbatches that would keep the machines busy, if no gradient could be too old.",
)
RECOMPUTED_TAPES = _counter(
    "swarmnode_recomputed_tapes_total",
    "tapes",
    "Forwards done again for a backward: memory bound, or a state loaded between.",
)
RELEASED_TAPES = _counter(
    "swarmnode_released_tapes_total", "tapes", "Tapes dropped (their input kept) to stay within the memory bound."
)
TAPE_BYTES = _gauge("swarmnode_tape_bytes", "bytes", "Memory held by tapes, estimated.")
PEER_FAULTS = _counter("swarmnode_peer_faults_total", "faults", "Faults found in peers, by kind.", kind=OPEN)
LINK_BYTES = _counter(
    "swarmnode_link_bytes_total",
    "bytes",
    "Payload and header bytes of calls, by what they carry.",
    kind=("pipeline", "gossip", "state", "control"),
    direction=("sent", "received"),
)

# Arithmetic.
COMPUTE_SECONDS = _counter(
    "swarmnode_compute_seconds_total", "seconds", "Time the compute thread worked, by kind of work.", kind=OPEN
)
COMPUTE_WAITING = _gauge("swarmnode_compute_waiting", "pieces", "Pieces of work not yet finished.")
INNER_STEPS = _counter("swarmnode_inner_steps_total", "steps", "Inner steps of this replica.")
GRADIENT_NORM = _gauge("swarmnode_gradient_norm", "", "EMA of the gradient norm before clipping.")
LEARNING_RATE = _gauge("swarmnode_learning_rate", "", "Learning rate of the last inner step.")
LOSS = _gauge("swarmnode_loss_nats", "nats", "Loss per target token.", split=("train", "validation"))

# Rounds.
ROUND = _gauge("swarmnode_round", "", "Last round this replica finished.")
ROUNDS = _counter("swarmnode_rounds_total", "rounds", "Rounds this replica finished.")
EXCHANGES = _counter(
    "swarmnode_exchanges_total",
    "exchanges",
    "Outer steps of this replica: paired (each partner counts its own) or lone.",
    outcome=("paired", "lone"),
)
PACKETS = _counter(
    "swarmnode_packets_total",
    "packets",
    "Packets of partners, by the step of acceptance that decided (gossip/robust.py).",
    step=("accepted", "clipped", "norm", "direction", "loss", "misshapen", "newcomer"),
)
RESERVATIONS = _counter(
    "swarmnode_reservations_total",
    "questions",
    "Replicas asked whether a microbatch may be sent, by what they answered (pipeline/reserve.py).",
    outcome=("granted", "full", "unheard"),
)
STAND_INS = _counter(
    "swarmnode_standins_total",
    "packets",
    "Packets asked of another replica in place of a partner's that did not come or was refused (gossip/standin.py).",
    outcome=("taken", "refused", "none"),
)
LOSS_PROBES = _counter(
    "swarmnode_loss_probes_total",
    "packets",
    "Packets whose average with our weights was tried on our own text (gossip.acceptance guarded, one round in four).",
    outcome=("kept", "refused"),
)
BEQUESTS = _counter(
    "swarmnode_bequests_total", "exchanges", "Times this node, leaving, gave what it had learnt to another replica."
)
ONESIDED_COMMITS = _counter(
    "swarmnode_onesided_commits_total",
    "exchanges",
    "Exchanges applied here whose commit may not have reached the partner.",
)
EXCHANGE_SECONDS = _histogram(
    "swarmnode_exchange_seconds",
    "seconds",
    "From the boundary of a round to its outer step applied.",
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 60.0),  # guess: LAN pairs to the exchange timeout and beyond
)

# The node.
INFO = _gauge("swarmnode_info", "", "Always 1; says which run and version.", run=FREE, version=FREE)
STAGE = _gauge("swarmnode_stage", "", "Stage this node serves; -1 when it serves none.")
REACH = _gauge("swarmnode_reach", "", "How others reach this node: 1 directly, 0.5 by relays, 0 not or unknown.")
STATE = _gauge("swarmnode_state", "", "NodeState: 1 joining, 2 syncing, 3 training, 4 draining, 5 left, 10 paused.")
PEERS = _gauge("swarmnode_peers", "peers", "Peers with an unexpired record.")
STAGES = _gauge("swarmnode_stages", "stages", "Stages of the run.")
STAGES_EMPTY = _gauge("swarmnode_stages_empty", "stages", "Stages that nobody serves, as this node sees the swarm.")
REPLICAS_FEWEST = _gauge(
    "swarmnode_replicas_fewest",
    "replicas",
    "Replicas serving the stage that has fewest, as this node sees the swarm.",
)
RUN_SAMPLES = _gauge("swarmnode_run_samples", "samples", "Samples the whole run has trained, as far as known here.")
P2PD_RESTARTS = _counter("swarmnode_p2pd_restarts_total", "restarts", "Times the libp2p daemon died and was restarted.")
SNAPSHOT_BYTES = _counter(
    "swarmnode_snapshot_bytes_total", "bytes", "Snapshot bytes moved.", direction=("sent", "received")
)
RECOVERIES = _counter(
    "swarmnode_recoveries_total",
    "recoveries",
    "Times this node got a stage's state, by method.",
    method=("replica", "ring", "disk", "checkpoint", "checkfree", "fresh"),
)
LOOP_LAG_SECONDS = _histogram(
    "swarmnode_loop_lag_seconds",
    "seconds",
    "How late the event loop ran a timer.",
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5),  # 5 ms is a quiet p99 (hivemind.md, measured)
)
CHECKPOINTS = _counter(
    "swarmnode_checkpoints_total",
    "checkpoints",
    "Checkpoints of this replica's stage, saved or failed; complete: it was the last stage missing.",
    outcome=("saved", "complete", "failed"),
)
CHECKPOINT_SECONDS = _gauge("swarmnode_checkpoint_seconds", "seconds", "Time the last checkpoint of this stage took.")
CHECKPOINT_PAUSE_SECONDS = _gauge(
    "swarmnode_checkpoint_pause_seconds", "seconds", "Time training stood still for the last checkpoint."
)
RESIDENT_BYTES = _gauge("swarmnode_resident_bytes", "bytes", "Resident memory of this process, p2pd not included.")
EVENTS_DROPPED = _counter("swarmnode_events_dropped_total", "events", "Log lines lost because the disk refused them.")

EVENTS: Final[dict[str, str]] = {
    "node.started": "the process runs; its addresses are known",
    "node.ready": "others can reach this node and its control socket answers",
    "node.state": "the node's state changed (joining, syncing, training, draining, left)",
    "node.draining": "told to go: no new work is taken, what is held is finished",
    "drain.done": "one step of leaving is done",
    "drain.cut": "a step of leaving was left undone: no time, or it failed; what is lost by it",
    "notice.watching": "a cloud's notices of preemption are watched",
    "notice.received": "word came that this machine or process will be taken away, or may be soon",
    "notice.unreadable": "a cloud's metadata service does not answer, or answers rubbish; asked again",
    "notice.acknowledged": "the cloud was told that this machine is ready to go",
    "node.left": "the node is gone on purpose; the log ends",
    "node.failed": "the node stops because of a fault of its own",
    "node.probe": "this machine's speed was measured",
    "node.loop_lag": "the event loop was late by more than a bound",
    "manifest.verified": "the run's manifest was fetched and its signature and hash are right",
    "manifest.refused": "a manifest with a wrong signature or hash was refused",
    "bootstrap.connected": "a bootstrap answered",
    "bootstrap.unreachable": "a bootstrap did not answer; it is tried again",
    "directory.announced": "our record was stored",
    "directory.failed": "our record could not be stored or others' could not be read; tried again",
    "directory.merged": "a peer that the directory had lost answers: parts of the swarm come together again",
    "node.reach": "whether others can reach this node, and how",
    "node.paused": "the node stands aside, and why; its replica stays in memory",
    "node.resumed": "the node works again after a pause",
    "limits.changed": "somebody changed this node's limits",
    "limits.verdict": "this node's limits let it run, or not",
    "metrics.push_failed": "metrics could not be pushed by OTLP, and why; the next push tries again",
    "receipt.failed": "a peer we worked for was asked for a receipt in vain",
    "guests.changed": "the owner's guest list changed; peers it bans are turned out",
    "guests.failed": "a peer was asked for the guest list in vain; another is asked later",
    "record.refused": "a stale, forged or malformed record was dropped",
    "progress.doubted": "peers tell of more samples than the swarm can have trained; most of the others asked do not",
    "progress.raised": "most peers tell of more samples than this node believed possible: it believes them now",
    "call.failed": "a handler of ours failed; its caller was told the type of the error only",
    "gate.changed": "strangers flood this node's port, or do no longer: what the kernel turns away, and why",
    "p2pd.died": "the libp2p daemon died; it is started again",
    "p2pd.restarted": "the libp2p daemon runs again and handlers are registered",
    "stage.chosen": "this node decided which stage to serve, and why",
    "stage.moving": "this node decided to move to a needier stage, and why; it fetches that one's state",
    "stage.stays": "this node does not move after all, and why",
    "stage.moved": "this node left its stage for a needier one",
    "stage.lost": "a stage has no replica alive any more",
    "stage.back": "a lost stage is served again: after how long, and the loss before and after",
    "state.donor": "a donor for the stage's state was chosen",
    "state.beside": "another donor gives chunks of its own snapshot, because the download takes long",
    "state.download": "progress of a state download",
    "state.downloaded": "the stage's state is here, verified and loaded",
    "state.waiting": "all who could give the stage's state give it to others now; the first free one is asked",
    "state.doubted": "nobody confirms a state that came: the others could not be asked, or one alone contradicts it",
    "state.failed": "a donor died or sent what does not verify; another is tried",
    "state.served": "a snapshot was given to another node",
    "state.saved": "this replica's state is on disk",
    "state.fresh": "the stage's state was initialised from the seed",
    "recovery.waiting": "a lost stage's state cannot be taken yet, and why",
    "recovery.loss": "the training loss before a stage was lost and after it came back",
    "recovery.began": "a lost stage is being brought back: how, and why so",
    "recovery.rung": "one way to bring a stage back did not work; the next is tried",
    "recovery.kept": "a fresh snapshot of the next stage is kept here, or why not",
    "checkpoint.saved": "this replica's stage is in a checkpoint",
    "checkpoint.complete": "every stage of a checkpoint is saved: it can be resumed",
    "checkpoint.failed": "this replica's stage could not be saved; the checkpoints before are as they were",
    "checkpoint.pruned": "old checkpoints were deleted to stay within the budget",
    "checkpoint.loaded": "the stage's state was read from a checkpoint",
    "recovery.done": "a stage's state came back, and how",
    "recovery.failed": "a stage's state cannot be brought back",
    "microbatch.lost": "no way onward was found before the deadline",
    "microbatch.moved": "a replica was late near the deadline; its call was cancelled and another replica is asked",
    "microbatch.retried": "a hop repaired the way onward",
    "microbatch.duplicate": "a microbatch arrived a second time and was not counted again",
    "microbatch.refused": "a microbatch was refused: wrong shape, dtype, position or not finite",
    "tape.released": "tapes were dropped to stay within the memory bound",
    "window.changed": "the feeder's window changed",
    "validation.failed": "held-out loss could not be measured: a microbatch found no way",
    "validation.done": "held-out loss was measured",
    "inner.step": "one inner step",
    "inner.skipped": "an inner step was skipped: the gradient was not finite",
    "round.boundary": "a round ended; this replica paired or not, and why",
    "round.stride": "rounds come faster or slower than replicas can meet: takes part in only every second, fourth, ...",
    "feeder.window": "how many samples travel together, how many microbatches this feeder keeps under way, and why",
    "bequest.given": "a leaver gave what it learnt since its last round to a replica that stays",
    "bequest.merged": "what a leaver learnt counts in this round here",
    "bequest.stale": "what a leaver learnt came for another round and is dropped",
    "handover.done": "the last replica of a stage leaves; its state is kept by another node",
    "exchange.paired": "an outer step with a partner",
    "exchange.group": "who of a group of more than two came to an outer step and was believed",
    "exchange.lone": "an outer step alone, and why",
    "exchange.onesided": "a partner may have applied an exchange that this replica did not, or the reverse",
    "exchange.standin": "a partner failed; another replica was asked for its packet of the round",
    "exchange.refused": "a partner's handshake or packet was refused",
    "exchange.probed": "averaging with a partner was tried on our own text: the change of loss in nats",
    "exchange.clipped": "a partner's packet was taken in part only",
    "peer.left_out": "this peer's packets broke the rules, here or at most replicas: it is not met any more",
    "receipt.heard": "a replica signed what it made of another one's packet",
    "receipt.given": "we signed what we made of a partner's packet",
    "receipt.got": "a partner signed what it made of our packet",
    "peer.found": "a peer appeared",
    "peer.gone": "a peer's record expired or it said it left",
    "peer.fault": "a peer broke the protocol, died, or sent what cannot be believed",
    "audit.done": "an answer was done again by another replica and compared",
    "audit.suspicion": "a replica that asks the same stage says that a peer lied: its answers are checked more often",
    "peer.excluded": "a peer was found to lie: it gets no work, no partner and no say here any more",
    "peer.banned": "a peer gets no work until it publishes a newer record",
    "peer.unbanned": "a banned peer published a newer record or answered a ping",
    "data.opened": "the data source is open",
    "data.block": "a block of samples was taken or finished",
    "data.duplicate": "a block was drawn by two feeders",
    "control.leave": "somebody asked this node to leave through its control socket",
    "dashboard.serving": "the coordinator's page can be opened",
    "dashboard.history_failed": "the disk refused the coordinator's history; the picture goes on without it",
    "events.more": "a peer caused so many events of one kind that they were not written: how many",
    "signal.received": "SIGTERM or SIGINT arrived",
}

LEVELS: Final[tuple[str, ...]] = ("debug", "info", "warning", "error")


def check_metric(metric: str, kind: Kind, labels: Mapping[str, str]) -> Metric:
    """The row of `metric`, after asserting that it is of `kind` and has exactly these labels with values allowed."""
    row = METRICS.get(metric)
    assert row is not None, f"metric {metric!r} is not in metrics/name.py"
    assert row.kind is kind, f"metric {metric} is a {row.kind}, not a {kind}"
    assert labels.keys() == row.labels.keys(), f"metric {metric} has labels {list(row.labels)}, not {list(labels)}"
    for label, value in labels.items():
        allowed = row.labels[label]
        if allowed is FREE:
            continue
        if allowed is OPEN:
            assert _WORD.match(value), f"metric {metric}: {label}={value!r} is not a short word without digits"
        else:
            assert value in allowed, f"metric {metric}: {label}={value!r} is not one of {allowed}"
    return row


def check_event(event: str, level: str) -> None:
    """Assert that `event` and `level` are known."""
    assert event in EVENTS, f"event {event!r} is not in metrics/name.py"
    assert level in LEVELS, f"level {level!r} is not one of {LEVELS}"


def series(metric: str, **labels: str) -> str:
    """The key of one series as Prometheus writes it, labels sorted: `series(LOSS, split="train")`."""
    if not labels:
        return metric
    inside = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
    return f"{metric}{{{inside}}}"

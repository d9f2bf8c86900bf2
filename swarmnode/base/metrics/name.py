"""The names of all metrics.

Prometheus practice: base units (seconds, bytes, nats), `_total` on counters, and no label whose values grow with the
swarm. A label is either closed (its values are listed) or a short word without digits, so that a peer id never fits.
Other names are programming errors and raise AssertionError.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final


class MetricKind(enum.StrEnum):
    """The kind of a metric: it grows, goes up and down, or is spread over buckets."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


OPEN: Final[tuple[str, ...]] = ()
"""A label whose values are not listed: any word of letters and underscores, at most 32 long."""

FREE: Final[tuple[str, ...]] = ("",)
"""A label with arbitrary values whose number does not grow with the swarm: the run's id, or the scores that the
manifest lists."""

BASE_UNITS: Final = ("seconds", "bytes", "nats")
"""Units that end the name; other units are counted things, named in the help."""

_WORD = re.compile(r"[A-Za-z][A-Za-z_]{0,31}\Z")


@dataclass(frozen=True, slots=True)
class Metric:
    """A row: `labels` maps each label to the values it may take (`OPEN`: any word); `buckets` are upper bounds."""

    name: str
    kind: MetricKind
    unit: str
    help: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()


METRICS: Final[dict[str, Metric]] = {}


def _metric(
    kind: MetricKind,
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
    return _metric(MetricKind.COUNTER, name, unit, text, labels)


def _gauge(name: str, unit: str, text: str, **labels: tuple[str, ...]) -> str:
    return _metric(MetricKind.GAUGE, name, unit, text, labels)


def _histogram(name: str, unit: str, text: str, *buckets: float) -> str:
    return _metric(MetricKind.HISTOGRAM, name, unit, text, None, buckets)


def check_metric(metric: str, kind: MetricKind, labels: Mapping[str, str]) -> Metric:
    """The row of `metric`, after asserting its kind and exactly these labels with allowed values."""
    row = METRICS.get(metric)
    assert row is not None, f"metric {metric!r} is not in base/metrics/name.py"
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


# Microbatches.
MICROBATCHES = _counter(
    "swarmnode_microbatches_total",
    "microbatches",
    "Microbatches by outcome: done, lost and validated are counted by the feeder; retried by the hop that "
    "sent it to another replica; duplicate by the replica it reached a second time.",
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
    "Audited answers of other replicas, by result. undone: no other replica recomputed it; unshown: "
    "its server did not show its evidence; undecided: as many replicas contradict it as agree.",
    outcome=("right", "wrong", "undecided", "undone", "unshown"),
)
REDONE = _counter("swarmnode_redone_total", "microbatches", "Hops recomputed for audits by others.")
CLIPPED_GRADIENTS = _counter(
    "swarmnode_clipped_gradients_total",
    "gradients",
    "Returned gradients clipped because they were much longer than usual.",
)
SAMPLES = _counter("swarmnode_samples_total", "samples", "Samples this node fed whose gradient came back.")
DUPLICATE_SAMPLES = _counter(
    "swarmnode_duplicate_samples_total", "samples", "Samples of blocks that this feeder and another one both finished."
)
DATA_BYTES = _counter(
    "swarmnode_data_bytes_total",
    "bytes",
    "Chunks of text, by way; served: also of the base model.",
    source=("web", "peer", "served"),
)
BASE_BYTES = _counter(
    "swarmnode_base_bytes_total", "bytes", "Chunks of the base model received, by way.", source=("web", "peer")
)
DATA_WAIT_SECONDS = _counter("swarmnode_data_wait_seconds_total", "seconds", "Time in which only text was missing.")
TOKENS = _counter("swarmnode_tokens_total", "tokens", "Tokens read of the samples that this node fed.")
TARGETS = _counter("swarmnode_targets_total", "tokens", "Of these, the targets that count in the loss.")
GIVEN_SAMPLES = _gauge("swarmnode_given_samples", "samples", "What this node's receipts of the run are for.")
GIVEN_TOKENS = _gauge("swarmnode_given_tokens", "tokens", "Tokens read of these samples.")
GIVEN_TARGETS = _gauge("swarmnode_given_targets", "tokens", "Of these, the targets that count in the loss.")
BUSY = _counter("swarmnode_busy_total", "calls", "Calls refused because all slots were taken.")
WINDOW = _gauge("swarmnode_window", "microbatches", "Microbatches this feeder keeps in flight.")
RECOMPUTED_TAPES = _counter(
    "swarmnode_recomputed_tapes_total",
    "tapes",
    "Forwards recomputed for a backward, because of the memory bound or a state loaded in between.",
)
RELEASED_TAPES = _counter(
    "swarmnode_released_tapes_total", "tapes", "Tapes dropped (their input kept) to stay within the memory bound."
)
OUT_OF_MEMORY = _counter(
    "swarmnode_out_of_memory_total",
    "times",
    "Times that memory ran out in a piece of work. Graphs are then dropped, and get half the memory from then on.",
)
TAPE_BYTES = _gauge("swarmnode_tape_bytes", "bytes", "Memory held by tapes, estimated.")
PEER_FAULTS = _counter("swarmnode_peer_faults_total", "faults", "Faults found in peers, by kind.", kind=OPEN)
LINK_BYTES = _counter(
    "swarmnode_link_bytes_total",
    "bytes",
    "Payload and header bytes of calls, by content.",
    kind=("pipeline", "gossip", "state", "data", "control"),
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
    "Packets of partners, by the deciding step of acceptance (trust/robust.py).",
    step=("accepted", "clipped", "norm", "direction", "loss", "misshapen", "newcomer"),
)
RESERVATIONS = _counter(
    "swarmnode_reservations_total",
    "questions",
    "Replicas asked whether a microbatch may be sent, by answer (train/pipeline/next_hop.py).",
    outcome=("granted", "full", "unheard"),
)
FALLBACK_PACKETS = _counter(
    "swarmnode_fallback_packets_total",
    "packets",
    "Packets requested from another replica in place of a partner's that was missing or refused"
    " (train/gossip/fallback_partner.py).",
    outcome=("taken", "refused", "none"),
)
FINAL_DELTAS = _counter(
    "swarmnode_final_deltas_total",
    "exchanges",
    "Times this node gave its last progress to another replica when leaving.",
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
INFO = _gauge("swarmnode_info", "", "Always 1; the labels hold run and version.", run=FREE, version=FREE)
STAGE = _gauge("swarmnode_stage", "", "Stage this node serves; -1 for none.")
REACH = _gauge("swarmnode_reach", "", "Reachability of this node: 1 direct, 0.5 through relays, 0 none or unknown.")
STATE = _gauge("swarmnode_state", "", "NodeState: 1 joining, 2 syncing, 3 training, 4 draining, 5 left, 10 paused.")
PEERS = _gauge("swarmnode_peers", "peers", "Peers with an unexpired record.")
STAGES = _gauge("swarmnode_stages", "stages", "Stages of the run.")
STAGES_EMPTY = _gauge(
    "swarmnode_stages_empty", "stages", "Stages without a serving replica, as this node sees the swarm."
)
REPLICAS_FEWEST = _gauge(
    "swarmnode_replicas_fewest",
    "replicas",
    "Serving replicas of the stage with the fewest, as this node sees the swarm.",
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
    method=("replica", "ring", "disk", "pieces", "archive", "checkpoint", "base", "checkfree", "fresh"),
)
LOOP_LAG_SECONDS = _histogram(
    "swarmnode_loop_lag_seconds",
    "seconds",
    "Delay of timers in the event loop.",
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5),  # 5 ms is a quiet p99 (measured)
)
CHECKPOINTS = _counter(
    "swarmnode_checkpoints_total",
    "checkpoints",
    "Checkpoints of this replica's stage, saved or failed; complete: it completed the checkpoint.",
    outcome=("saved", "complete", "failed"),
)
ARCHIVES = _counter("swarmnode_archives_total", "attempts", "Attempts to archive.", outcome=("saved", "failed"))
ARCHIVE_SAMPLES = _gauge(
    "swarmnode_archive_samples", "samples", "Samples of the run in the newest archived checkpoint."
)
ARCHIVE_SCORE = _gauge(
    "swarmnode_archive_score",
    "its own",
    "A number that [evaluation] of the manifest lists, of the newest archived checkpoint.",
    score=FREE,
)
CHECKPOINT_SECONDS = _gauge("swarmnode_checkpoint_seconds", "seconds", "Time the last checkpoint of this stage took.")
CHECKPOINT_PAUSE_SECONDS = _gauge(
    "swarmnode_checkpoint_pause_seconds", "seconds", "Time training paused for the last checkpoint."
)
RESIDENT_BYTES = _gauge("swarmnode_resident_bytes", "bytes", "Resident memory of this process, p2pd not included.")
EVENTS_DROPPED = _counter("swarmnode_events_dropped_total", "events", "Log lines lost because the disk failed.")


def series(metric: str, **labels: str) -> str:
    """The key of one series in Prometheus's form, labels sorted: `series(LOSS, split="train")`."""
    if not labels:
        return metric
    inside = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
    return f"{metric}{{{inside}}}"

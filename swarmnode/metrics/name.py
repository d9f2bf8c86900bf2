"""The names of all metrics and events, one table each.

Prometheus practice: base units (seconds, bytes, nats), `_total` on counters, and no label whose values grow with the
swarm. A label is either closed (its values are listed) or a short word without digits, so that a peer id never fits.
Other names are programming errors and raise AssertionError.
"""

from __future__ import annotations

from typing import Final

from swarmnode.metrics.metric import BASE_UNITS as BASE_UNITS
from swarmnode.metrics.metric import FREE, OPEN
from swarmnode.metrics.metric import METRICS as METRICS
from swarmnode.metrics.metric import Metric as Metric
from swarmnode.metrics.metric import MetricKind as MetricKind
from swarmnode.metrics.metric import check_metric as check_metric
from swarmnode.metrics.metric import counter as _counter
from swarmnode.metrics.metric import gauge as _gauge
from swarmnode.metrics.metric import histogram as _histogram

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
TOKENS = _counter("swarmnode_tokens_total", "tokens", "Counted target tokens of the samples this node fed.")
BUSY = _counter("swarmnode_busy_total", "calls", "Calls refused because all slots were taken.")
WINDOW = _gauge("swarmnode_window", "microbatches", "Microbatches this feeder keeps in flight.")
WINDOW_WANTED = _gauge(
    "swarmnode_window_wanted",
    "microbatches",
    "Microbatches that would keep the machines busy without a staleness limit.",
)
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
    "Packets of partners, by the deciding step of acceptance (gossip/robust.py).",
    step=("accepted", "clipped", "norm", "direction", "loss", "misshapen", "newcomer"),
)
RESERVATIONS = _counter(
    "swarmnode_reservations_total",
    "questions",
    "Replicas asked whether a microbatch may be sent, by answer (pipeline/reservation.py).",
    outcome=("granted", "full", "unheard"),
)
FALLBACK_PACKETS = _counter(
    "swarmnode_fallback_packets_total",
    "packets",
    "Packets requested from another replica in place of a partner's that was missing or refused"
    " (gossip/fallback_partner.py).",
    outcome=("taken", "refused", "none"),
)
LOSS_PROBES = _counter(
    "swarmnode_loss_probes_total",
    "packets",
    "Packets whose average with our weights was tried on our text (gossip.acceptance guarded, one round in four).",
    outcome=("kept", "refused"),
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
    method=("replica", "ring", "disk", "checkpoint", "base", "checkfree", "fresh"),
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

EVENTS: Final[dict[str, str]] = {
    "node.started": "the process runs; its addresses are known",
    "node.ready": "others can reach this node and its control socket answers",
    "node.state": "the node's state changed (joining, syncing, training, draining, left)",
    "node.draining": "the node leaves: it takes no new work and finishes what it holds",
    "drain.done": "one step of leaving is done",
    "drain.cut": "a step of leaving was skipped or failed, and what is lost by it",
    "notice.watching": "the node watches a cloud's preemption notices",
    "notice.received": "a notice that this machine or process will be taken away, now or perhaps soon",
    "notice.unreadable": "a cloud's metadata service gives no answer or nonsense; asked again later",
    "notice.acknowledged": "the cloud was told that this machine is ready to go",
    "node.left": "the node left on purpose; the log ends",
    "node.failed": "the node stops because of a fault of its own",
    "node.probe": "this machine's speed was measured",
    "node.loop_lag": "the event loop was late by more than a bound",
    "manifest.verified": "the run's manifest was fetched; its signature and hash are correct",
    "bootstrap.connected": "a bootstrap answered",
    "bootstrap.unreachable": "a bootstrap did not answer; tried again later",
    "directory.announced": "our record was stored",
    "directory.failed": "our record could not be stored or others' could not be read; tried again later",
    "directory.merged": "a peer that the directory had lost answers: parts of the swarm merge",
    "node.reach": "whether others can reach this node, and how",
    "node.paused": "the node pauses, and why; its replica stays in memory",
    "node.resumed": "the node works again after a pause",
    "limits.changed": "this node's limits were changed",
    "limits.verdict": "whether this node's limits let it run",
    "metrics.push_failed": "metrics could not be pushed by OTLP, and why; the next push tries again",
    "receipt.failed": "a peer we worked for gave no receipt",
    "access_list.changed": "the owner's access list changed; peers it bans are disconnected",
    "access_list.failed": "a peer did not give the access list; another is asked later",
    "record.refused": "a stale, forged or malformed record was dropped",
    "progress.doubted": "peers claim more samples than the swarm can have trained; most others do not",
    "progress.raised": "most peers claim more samples than this node believed possible: it believes them now",
    "call.failed": "a handler of ours failed; its caller saw only the type of the error",
    "gate.changed": "strangers flood this node's port, or stopped: what the kernel rejects, and why",
    "p2pd.died": "the libp2p daemon died; it is started again",
    "p2pd.restarted": "the libp2p daemon runs again and handlers are registered",
    "stage.chosen": "this node decided which stage to serve, and why",
    "stage.moving": "this node decided to move to a stage that needs it more, and why; it fetches the state",
    "stage.stays": "this node does not move after all, and why",
    "stage.moved": "this node moved to another stage",
    "stage.lost": "a stage has no replica alive any more",
    "stage.back": "a lost stage is served again: after how long, and the loss before and after",
    "state.donor": "a donor for the stage's state was chosen",
    "state.beside": "a second donor sends chunks of its own snapshot, because the download takes long",
    "state.download": "progress of a state download",
    "state.downloaded": "the stage's state was downloaded, verified and loaded",
    "state.waiting": "all possible donors of the stage's state are busy; the first free one is asked",
    "state.doubted": "a downloaded state is unconfirmed: no other replica could be asked, or only one contradicts it",
    "state.failed": "a donor died or sent data that does not verify; another is tried",
    "state.served": "a snapshot was sent to another node",
    "state.saved": "this replica's state is on disk",
    "state.fresh": "the stage's state was initialised from the seed",
    "recovery.waiting": "a lost stage's state cannot be taken yet, and why",
    "recovery.loss": "the training loss before a stage was lost and after it came back",
    "recovery.began": "the recovery of a lost stage began: the method, and why",
    "recovery.source_failed": "one source for a stage's state failed; the next is tried",
    "recovery.kept": "a new snapshot of the next stage is kept here, or why not",
    "checkpoint.saved": "this replica's stage was saved in a checkpoint",
    "checkpoint.complete": "every stage of a checkpoint is saved: it can be resumed",
    "checkpoint.failed": "this replica's stage could not be saved; earlier checkpoints are unchanged",
    "checkpoint.pruned": "old checkpoints were deleted to stay within the budget",
    "archive.compared": "the received copies of a stage were compared; whose is taken",
    "archive.refused": "a replica gave no copy for the archive, or one that the others contradict (lied)",
    "archive.saved": "a complete checkpoint of the run is in the archive, measured",
    "archive.unmeasured": "the archive could not evaluate a checkpoint itself; the swarm's loss is used",
    "archive.failed": "the archive could not copy the run now; tried again later, its contents are unchanged",
    "archive.pruned": "checkpoints of the archive were deleted: old ones, or incomplete ones of a killed archive",
    "archive.pushed": "a checkpoint of the archive is in the owner's bucket or folder",
    "archive.push_failed": "the owner's bucket or folder rejected a checkpoint; tried again with the next one",
    "checkpoint.loaded": "the stage's state was read from a checkpoint",
    "recovery.done": "a stage's state was recovered, and how",
    "recovery.failed": "a stage's state cannot be recovered",
    "microbatch.lost": "no route onward was found before the deadline",
    "microbatch.moved": "a replica was late near the deadline; its call was cancelled and another replica is asked",
    "microbatch.retried": "a hop retried the next hop with another replica",
    "microbatch.duplicate": "a microbatch arrived a second time and was not counted again",
    "microbatch.refused": "a microbatch was refused: wrong shape, dtype, position or not finite",
    "tape.released": "tapes were dropped to stay within the memory bound",
    "window.changed": "the feeder's window changed",
    "validation.failed": "held-out loss could not be measured: a microbatch found no route",
    "validation.done": "held-out loss was measured",
    "inner.step": "one inner step",
    "round.boundary": "a round ended; this replica paired or not, and why",
    "round.stride": "rounds come faster or slower than replicas can meet: takes part only in every second, fourth ...",
    "feeder.waiting": "a node that only feeds waits until every stage has a replica",
    "feeder.window": "the size of microbatches, how many this feeder keeps in flight, and why",
    "final_delta.given": "a leaving replica gave its progress since its last round to a remaining one",
    "final_delta.merged": "a leaving replica's progress counts in this round here",
    "final_delta.stale": "a leaving replica's progress came for another round and is dropped",
    "handover.done": "the last replica of a stage leaves; its state is kept by another node",
    "exchange.paired": "an outer step with a partner",
    "exchange.group": "the members of a group of more than two that took part in an outer step, and those believed",
    "exchange.lone": "an outer step alone, and why",
    "exchange.onesided": "a partner may have applied an exchange that this replica did not, or the reverse",
    "exchange.fallback": "a partner failed; another replica was asked for its packet of the round",
    "exchange.refused": "a partner's handshake or packet was refused",
    "exchange.probed": "averaging with a partner was evaluated on our own text: the change of loss in nats",
    "exchange.clipped": "only a part of a partner's packet was taken",
    "peer.left_out": "this peer's packets broke the rules, here or at most replicas: it is no longer met",
    "receipt.heard": "a replica's signed receipt of its verdict on another one's packet arrived",
    "receipt.given": "we signed our verdict on a partner's packet",
    "receipt.got": "a partner signed its verdict on our packet",
    "peer.found": "a peer appeared",
    "peer.gone": "a peer's record expired or announced that it left",
    "peer.fault": "a peer broke the protocol, died, or sent what cannot be believed",
    "audit.done": "an answer was recomputed by another replica and compared",
    "audit.suspicion": "another caller reports that a peer lied: its answers are checked more often",
    "peer.excluded": "a peer was found to lie: it gets no work, no partner and no vote here any more",
    "peer.banned": "a peer gets no work until it publishes a newer record",
    "peer.unbanned": "a banned peer published a newer record or answered a ping",
    "base.opened": "the index of the model that the run starts from is here",
    "base.loaded": "a stage's weights of the model that the run starts from were loaded",
    "data.opened": "the data source is open",
    "data.waiting": "nobody gives the run's data set or base model, or a chunk of it, now; tried again",
    "data.failed": "a place or a member did not give what was asked of the data set or base model, or gave another",
    "data.uncached": "the disk did not take a chunk; it is used from memory, and fetched again when it is needed again",
    "data.refused": "this machine's text cannot be the run's, or is not to be had: it serves other stages",
    "data.block": "a block of samples was taken or finished",
    "data.duplicate": "a block was drawn by two feeders",
    "control.leave": "somebody asked this node to leave through its control socket",
    "dashboard.serving": "the coordinator's page is available",
    "dashboard.history_failed": "the disk failed for the coordinator's history; the dashboard continues without it",
    "events.more": "a peer caused too many events of one kind; the number that was not written",
}

LEVELS: Final[tuple[str, ...]] = ("debug", "info", "warning", "error")


def check_event(event: str, level: str) -> None:
    """Assert that `event` and `level` are known."""
    assert event in EVENTS, f"event {event!r} is not in metrics/name.py"
    assert level in LEVELS, f"level {level!r} is not one of {LEVELS}"


def series(metric: str, **labels: str) -> str:
    """The key of one series in Prometheus's form, labels sorted: `series(LOSS, split="train")`."""
    if not labels:
        return metric
    inside = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
    return f"{metric}{{{inside}}}"

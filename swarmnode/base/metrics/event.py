"""Every event of a node's log: what it means, and its fields.

A line of the log also has `ts`, `level`, `event`, `node` and `stage`. A field may be missing where it does not apply.
Names say units: `_s` and `seconds` are seconds, `nbytes` and `_bytes` bytes; losses are nats a token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class EventKind:
    """`fields` are the names that such an event may have."""

    meaning: str
    fields: tuple[str, ...]


def _event(meaning: str, fields: str = "") -> EventKind:
    return EventKind(meaning, tuple(fields.split()))


STAGE_FIELDS: Final = frozenset({"stage", "serves", "of_stage", "stage_of_peer", "source", "target", "first"})
"""Fields that name a stage where they are numbers, from 0."""


def told(key: str, value: object) -> object:
    """The value of a field as people read it: a stage counts from 1. `value` is a number, or a number as text."""
    if key not in STAGE_FIELDS or isinstance(value, bool) or not str(value).isdecimal():
        return value
    return int(str(value)) + 1


_OUTER_STEP = (
    "round peer reason fallback delta_norm step_norm apart seconds worked_s samples "
    "between_s between_worked_s sent_bytes samples_total every_steps"
)

EVENTS: Final[dict[str, EventKind]] = {
    "node.started": _event("the process runs; its addresses are known", "addresses version pid name"),
    "node.ready": _event("others can reach this node and its control socket answers", "serves"),
    "node.state": _event("the node's state changed (joining, syncing, training, draining, left)", "state reason"),
    "node.draining": _event(
        "the node leaves: it takes no new work and finishes what it holds", "source reason left_s held unsent"
    ),
    "drain.done": _event("one step of leaving is done", "step seconds"),
    "drain.cut": _event("a step of leaving was skipped or failed, and what is lost by it", "step undone reason"),
    "notice.watching": _event("the node watches a cloud's preemption notices", "source url reason"),
    "notice.received": _event(
        "a notice that this machine or process will be taken away, now or perhaps soon", "source kind left_s id reason"
    ),
    "notice.unreadable": _event(
        "a cloud's metadata service gives no answer or nonsense; asked again later", "source reason"
    ),
    "notice.acknowledged": _event("the cloud was told that this machine is ready to go", "source id"),
    "node.left": _event("the node left on purpose; the log ends", "held finished unsent sent successor cut seconds"),
    "node.failed": _event("the node stops because of a fault of its own", "reason"),
    "node.probe": _event("this machine's speed was measured", "samples_per_second by_microbatch"),
    "manifest.verified": _event("the run's manifest was fetched; its signature and hash are correct", "name"),
    "bootstrap.connected": _event("a meeting point answered", "peer"),
    "bootstrap.unreachable": _event("a meeting point did not answer; tried again later", "peer why"),
    "directory.failed": _event(
        "our record could not be stored or others' could not be read; tried again later", "reason stage"
    ),
    "directory.merged": _event("a peer that the directory had lost answers: parts of the swarm merge", "peer here"),
    "node.reach": _event("whether others can reach this node, and how", "reach reason"),
    "node.paused": _event("the node pauses, and why; its replica stays in memory", "reason held"),
    "node.resumed": _event("the node works again after a pause", "reason"),
    "limits.changed": _event("this node's limits were changed", "changed"),
    "limits.verdict": _event("whether this node's limits let it run", "running reason"),
    "receipt.failed": _event("a peer we worked for gave no receipt", "peer reason"),
    "clock.wrong": _event("this machine's clock was set, or differs from its peers'; the node counts on", "reason"),
    "clock.right": _event("this machine's clock is right again", ""),
    "clock.followed": _event("this machine's clock made a step, and the node's clock followed it", "step_s"),
    "processor.taken": _event(
        "other programs take the processor: in percent, how long this node's threads wait of the time they could run",
        "share",
    ),
    "processor.given": _event("other programs leave this node its part of the processor again", ""),
    "access_list.changed": _event("the owner's access list changed; peers it bans are disconnected", "sequence"),
    "amendment.heard": _event("the owner amended the run; nodes take it up at its round", "amendment changes"),
    "owner.forked": _event("an owner's keys signed two documents of one number: one may be stolen", "reason"),
    "amendment.applied": _event("this node goes on with the amended manifest", "round amendment changes"),
    "access_list.failed": _event("a peer did not give the access list; another is asked later", "reason"),
    "record.refused": _event("a stale, forged or malformed record was dropped", "reason"),
    "progress.doubted": _event(
        "peers claim more samples than the swarm can have trained; most others do not", "peers top"
    ),
    "progress.raised": _event(
        "most peers claim more samples than this node believed possible: it believes them now", "samples reason"
    ),
    "progress.in_vain": _event(
        "another part of the swarm trained more than this one while they were apart: its state is taken, and `again`"
        " samples that this node fed meanwhile are trained again",
        "here there again reason",
    ),
    "call.failed": _event(
        "a handler of ours failed; its caller saw only the type of the error", "method error why peer"
    ),
    "gate.changed": _event(
        "strangers flood this node's port, or stopped: what the kernel rejects, and why",
        "reason strangers_share denied",
    ),
    "p2pd.died": _event("the libp2p daemon died; it is started again", "exit_code"),
    "p2pd.restarted": _event("the libp2p daemon runs again and handlers are registered", "p2pd"),
    "span.chosen": _event("the stages that this machine serves together: how many, and from which on", "first stages"),
    "stage.chosen": _event("this node decided which stage to serve, and why", "serves reason"),
    "stage.moving": _event(
        "this node decided to move to a stage that needs it more, and why; it fetches the state", "source target reason"
    ),
    "stage.stays": _event("this node does not move after all, and why", "source target reason"),
    "stage.moved": _event("this node moved to another stage", "source target cut reason"),
    "stage.lost": _event("a stage has no replica alive any more", "of_stage replicas reason"),
    "stage.back": _event(
        "a lost stage is served again: after how long, and the loss before and after", "of_stage seconds"
    ),
    "state.donor": _event("a donor for the stage's state was chosen", "peer stage attempt of"),
    "state.beside": _event(
        "a second donor sends chunks of its own snapshot, because the download takes long", "peer stage missing"
    ),
    "state.download": _event("progress of a state download", "peer stage chunks of nbytes"),
    "state.downloaded": _event(
        "the stage's state was downloaded, verified and loaded", "peer stage round nbytes donors"
    ),
    "state.waiting": _event(
        "all possible donors of the stage's state are busy; the first free one is asked", "stage donors reason"
    ),
    "state.doubted": _event(
        "a downloaded state is unconfirmed: no other replica could be asked, or only one contradicts it",
        "stage peers reason",
    ),
    "state.failed": _event(
        "a donor died or sent data that does not verify; another is tried", "peer stage lied reason"
    ),
    "state.served": _event("a snapshot was sent to another node", "peer stage round"),
    "state.saved": _event("this replica's state is on disk", "round samples_total"),
    "state.unsaved": _event("this replica's state could not be written to disk; it trains on", "reason"),
    "state.fresh": _event("the stage's state was initialised from the seed", "reason"),
    "node.twin": _event(
        "another process runs with this node's key; whether this one stays, which began earlier", "joined_unix_ms stays"
    ),
    "state.kept": _event(
        "this replica was away while its stage went on without it, and has the newer state: it goes on with that",
        "round lost reason",
    ),
    "state.behind": _event(
        "this replica's state is behind its stage's: it takes theirs before it serves again",
        "round reason",
    ),
    "recovery.waiting": _event("a lost stage's state cannot be taken yet, and why", "stage reason"),
    "recovery.began": _event("the recovery of a lost stage began: the method, and why", "stage method reason"),
    "recovery.source_failed": _event("one source for a stage's state failed; the next is tried", "stage method reason"),
    "recovery.kept": _event(
        "a new snapshot of the next stage is kept here, or why not", "of_stage round nbytes seconds reason"
    ),
    "checkpoint.saved": _event(
        "this replica's stage was saved in a checkpoint", "label stage round nbytes seconds pause_s reason"
    ),
    "checkpoint.complete": _event(
        "every stage of a checkpoint is saved: it can be resumed", "label round samples_total nbytes"
    ),
    "checkpoint.failed": _event(
        "this replica's stage could not be saved; earlier checkpoints are unchanged", "label stage reason"
    ),
    "checkpoint.pruned": _event("old checkpoints were deleted to stay within the budget", "labels keep"),
    "archive.compared": _event(
        "the received copies of a stage were compared; whose is taken", "stage peer copies agree reason"
    ),
    "archive.refused": _event(
        "a replica gave no copy for the archive, or one that the others contradict (lied)", "peer stage lied reason"
    ),
    "archive.saved": _event(
        "a complete checkpoint of the run is in the archive and can be used", "label round samples_total nbytes seconds"
    ),
    "archive.measured": _event("a checkpoint of the archive was measured, and by whom", "label loss measured"),
    "archive.handed": _event(
        "the last replica of a stage left, and the archive has its slow weights", "peer stage round"
    ),
    "archive.unmeasured": _event(
        "the archive could not evaluate a checkpoint itself; the swarm's loss is used", "reason"
    ),
    "archive.failed": _event(
        "the archive could not copy the run now; tried again later, its contents are unchanged", "reason label"
    ),
    "archive.pruned": _event(
        "checkpoints of the archive were deleted: old ones, or incomplete ones of a killed archive",
        "labels reason keep",
    ),
    "archive.pushed": _event("a checkpoint of the archive is in the owner's bucket or folder", "label where"),
    "archive.push_failed": _event(
        "the owner's bucket or folder rejected a checkpoint; tried again with the next one", "where reason"
    ),
    "checkpoint.loaded": _event(
        "the stage's state was read from a checkpoint", "label stage samples_total anew nbytes seconds"
    ),
    "recovery.done": _event(
        "a stage's state was recovered, how, of which round, and how many samples behind the newest known",
        "stage method seconds nbytes round behind reason",
    ),
    "recovery.failed": _event("a stage's state cannot be recovered", "reason"),
    "microbatch.lost": _event("no route onward was found before the deadline", "reason block"),
    "microbatch.moved": _event(
        "a replica was late near the deadline; its call was cancelled and another replica is asked",
        "peer others reason",
    ),
    "microbatch.refused": _event("a microbatch was refused: wrong shape, dtype, position or not finite", "peer reason"),
    "validation.failed": _event("held-out loss could not be measured: a microbatch found no route", "reason"),
    "validation.done": _event("held-out loss was measured", "loss samples_total"),
    "round.stride": _event(
        "rounds come faster or slower than replicas can meet: takes part only in every second, fourth ...",
        "stride before reason",
    ),
    "feeder.window": _event(
        "the size of microbatches, how many this feeder keeps in flight, and why", "limit microbatch reason"
    ),
    "final_delta.given": _event(
        "a leaving replica gave its progress since its last round to a remaining one", "peer round samples"
    ),
    "final_delta.merged": _event(
        "a leaving replica's progress counts in this round here", "peer round made_for samples"
    ),
    "final_delta.stale": _event(
        "a leaving replica's progress came for another round and is dropped", "peer round made_for samples"
    ),
    "handover.done": _event(
        "the last replica of a stage leaves; its state is kept by another node or the archive", "peer stage reason"
    ),
    "report.written": _event("the run's report is in its folder", "path"),
    "report.failed": _event("the run's report could not be written", "reason"),
    "handover.refused": _event(
        "an archive did not take the stage of its last replica, which leaves", "peer stage reason"
    ),
    "exchange.paired": _event(
        "an outer step with a partner",
        _OUTER_STEP,
    ),
    "exchange.group": _event(
        "the members of a group of more than two that took part in an outer step, and those believed", "round peers"
    ),
    "exchange.lone": _event(
        "an outer step alone, and why",
        _OUTER_STEP,
    ),
    "exchange.onesided": _event(
        "a partner may have applied an exchange that this replica did not, or the reverse", "round peer reason"
    ),
    "exchange.fallback": _event(
        "a partner failed; another replica was asked for its packet of the round", "round peer given reason"
    ),
    "table.taken": _event("a tied model's table has the other end's part as of its round", "peer round of_round"),
    "table.missed": _event("the other end's part of a tied model's table did not come", "peer round reason"),
    "exchange.refused": _event("a partner's handshake or packet was refused", "round peer step reason"),
    "exchange.clipped": _event("only a part of a partner's packet was taken", "round peer keep reason"),
    "butterfly.given_up": _event(
        "a member that was to say who takes part in a round stayed silent; another one does", "round peer reason"
    ),
    "butterfly.not_given": _event("pieces or means could not be given to a member, or fetched", "round peer reason"),
    "butterfly.unchecked": _event("a mean could not be averaged again: a member showed no piece", "round peer reason"),
    "peer.left_out": _event("this peer's packets broke the rules: it is not met for a while", "peer reason"),
    "receipt.given": _event("we signed our verdict on a partner's packet", "round peer step"),
    "receipt.got": _event(
        "a partner signed its verdict on our packet", "round peer accepted step reason samples receipt"
    ),
    "peer.gone": _event("a peer's record expired or announced that it left", "peer reason peers"),
    "audit.done": _event(
        "an answer was recomputed by another replica and compared", "peer stage_of_peer outcome reason"
    ),
    "peer.excluded": _event(
        "a peer was found to lie: it gets no work, no partner and no vote here any more", "peer reason"
    ),
    "peer.banned": _event("a peer gets no work until it publishes a newer record", "peer stage_of_peer seconds reason"),
    "peer.unbanned": _event("a banned peer published a newer record or answered a ping", "peer reason"),
    "base.opened": _event("the index of the model that the run starts from is here", "digest note"),
    "base.loaded": _event(
        "a stage's weights of the model that the run starts from were loaded", "stage nbytes chunks seconds"
    ),
    "data.opened": _event("the data source is open", "digest tokens_train tokens_validation note"),
    "data.waiting": _event(
        "nobody gives the run's data set or base model, or a chunk of it, now; tried again", "chunk reason"
    ),
    "data.failed": _event(
        "a place or a member did not give what was asked of the data set or base model, or gave another", "chunk reason"
    ),
    "data.uncached": _event(
        "the disk did not take a chunk; it is used from memory, and fetched again when it is needed again", "reason"
    ),
    "data.refused": _event(
        "this machine's text cannot be the run's, or is not to be had: it serves other stages", "reason"
    ),
    "data.block": _event("a block of samples was taken or finished", "block state reason"),
    "data.duplicate": _event("a block was drawn by two feeders", "blocks"),
    "control.leave": _event("somebody asked this node to leave through its control socket", "reason notice_s"),
    "dashboard.serving": _event("the coordinator's page is available", "url"),
    "dashboard.history_failed": _event(
        "the disk failed for the coordinator's history; the dashboard continues without it", "reason"
    ),
    "dashboard.notify_failed": _event("a notification of --notify could not be given", "reason"),
    "dashboard.tracking_failed": _event("--track ended: its library failed; the coordinator goes on", "library reason"),
    "events.more": _event(
        "a peer caused too many events of one kind, or one repeated itself: the number that was not written",
        "of peer reason count seconds",
    ),
}

LEVELS: Final[tuple[str, ...]] = ("debug", "info", "warning", "error")


def check_event(event: str, level: str, fields: Iterable[str] = ()) -> None:
    """Raise AssertionError unless `event` and `level` are known and `fields` are declared: else it is our mistake."""
    assert event in EVENTS, f"event {event!r} is not in base/metrics/event.py"
    assert level in LEVELS, f"level {level!r} is not one of {LEVELS}"
    more = set(fields).difference(EVENTS[event].fields)
    assert not more, f"fields {sorted(more)} of event {event!r} are not in base/metrics/event.py"

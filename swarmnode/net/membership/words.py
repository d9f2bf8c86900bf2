"""Everything that a record, a call's header or an answer decides at the node that hears it, and what bounds it.

Keys and records cost nothing. So each of a peer's words is bounded by what was seen of it at work (packets taken,
microbatches returned or trained, chunks with their hashes, calls answered), or decides nothing. docs/security.md has
this table; `tests/node/test_words_of_keys.py` holds each field of these messages against it, and floods a village with
keys that say the worst of each row.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Words:
    """Some fields of one message. `decides` nothing: the field is shown, or checked against what is known anyway."""

    message: str
    fields: tuple[str, ...]
    decides: str
    bound: str
    code: str


NOTHING = "nothing"


def _of(message: str, fields: str, decides: str, bound: str, code: str) -> Words:
    return Words(message, tuple(fields.split()), decides, bound, code)


WORDS = (
    _of(
        "Record",
        "run_id peer_id sequence expires_unix_ms version stretch",
        "whether a record is of this run, newer, and how long it counts",
        "signed by the peer's key; times against our clock, 20 announce periods at most",
        "net/membership/record.py",
    ),
    _of(
        "Record",
        "stage state",
        "members counted: microbatches in flight, who moves where, whether a stage is empty",
        "while strangers that were tried do not work, machines seen at work count",
        "net/membership/trust.py",
    ),
    _of(
        "Record",
        "addresses",
        "what is dialled",
        "one dial a minute and address over all keys",
        "net/transport/dial_book.py",
    ),
    _of(
        "Record",
        "samples_per_second",
        "routes, shares of a step, donors' order, the clock's bound",
        "four medians at most in a route; shares of a step by members whose packets were taken; the clock counts "
        "machines whose work was checked",
        "train/pipeline/route.py, train/gossip/exchange.py, net/membership/clock.py",
    ),
    _of(
        "Record",
        "queue",
        "which replica of the next stage is tried first",
        "measured answers replace it",
        "train/pipeline/route.py",
    ),
    _of(
        "Record",
        "round",
        "where rounds are steps, the step that a replica goes on with, and whether it lags",
        "members whose packets were taken; of others, no further than the believed samples",
        "train/gossip/exchange.py",
    ),
    _of(
        "Record",
        "round_stride",
        "in which rounds a member is a partner; the stride that a newcomer begins with",
        "the least that is told; one's own pace sets it from then on",
        "train/gossip/exchange.py",
    ),
    _of(
        "Record",
        "joined_unix_ms saved_samples moving_to",
        "who brings a lost stage back first, who moves there",
        "a claim lasts as long as the download would; then the next one builds",
        "keep/recovery/recovery_source.py",
    ),
    _of(
        "Record",
        "blocks",
        "which text a feeder takes for finished",
        "feeders whose packets were taken; none of strangers unless many were tried and most came",
        "train/node/served_stage.py, data/blocks.py",
    ),
    _of(
        "Record",
        "progress",
        "the run's samples",
        "what machines seen at work can have trained, four times what they announce at most; what gone feeders owed, "
        "by what was trained here in vain",
        "net/membership/clock.py",
    ),
    _of(
        "Record",
        "kept_round kept_samples",
        "whom a node asks that brings a stage back",
        "rounds that the run can have reached; the state is compared with others'",
        "keep/recovery/recovery_look.py",
    ),
    _of(
        "Record",
        "lost_samples lost_at_samples",
        "whose state gives way after a pause or a cut",
        "only of replicas that were there before, or whose packets were taken",
        "train/node/stage_return.py",
    ),
    _of("Record", "state_digest", NOTHING, "states are compared by their content", "keep/recovery/state_check.py"),
    _of("Record", "boundary_digest", "whether a route is tried", "the call's own digest", "train/pipeline/backlog.py"),
    _of("Record", "pass", "admission", "the owner's grant, the delegate's signature", "run/admission/access.py"),
    _of(
        "Record",
        "allowance",
        "when a machine counts as asleep, and its line's share",
        "its own line alone",
        "train/node/presence.py",
    ),
    _of(
        "Record",
        "saves_checkpoints",
        "whose turn to save is waited for",
        "an announce period each",
        "train/node/checkpointer.py",
    ),
    _of(
        "Record",
        "unable span",
        "which stages the machine itself is sent to",
        "its own moves alone",
        "train/pipeline/rebalance.py",
    ),
    _of("Record", "data_digest", "a warning", NOTHING, "train/node/run_text.py"),
    _of(
        "Process",
        "microbatch_id feeder samples purpose itinerary position deadline_ms first_sample",
        "what is trained, and for whom",
        "the caller's own stage; places in the backlog; a feeder's numbers are trained once, .05 of them twice",
        "train/node/caller_check.py, train/pipeline/backlog.py, train/pipeline/feeder_turns.py",
    ),
    _of(
        "Process",
        "boundary_digest",
        "refusal of activations that cannot be read",
        "our own digest",
        "train/pipeline/hop.py",
    ),
    _of("Process", "feed_signature", NOTHING, "of older versions", "train/pipeline/hop.py"),
    _of(
        "Process",
        "mark_position inner_steps mark step",
        "which answers are compared, and when a microbatch of a step is trained",
        "one's own weights; a step further ahead than the next is refused",
        "trust/auditor.py, train/gossip/exchange.py",
    ),
    _of(
        "StepEnd",
        "step",
        "when a later stage takes its step",
        "feeders whose microbatches were trained here; half of them. A mate's word begins the step, as its call for the"
        " round would",
        "train/gossip/step_end.py, train/gossip/exchange.py",
    ),
    _of(
        "Exchange",
        "round stage samples newcomer",
        "a packet's weight in the mean",
        "a packet is judged by its content; its weight is bounded by the others'",
        "trust/robust.py, train/gossip/acceptance.py",
    ),
    _of(
        "Pong",
        "payload samples",
        "how far the run is, to a newcomer",
        "the median of those that answer",
        "net/membership/clock.py",
    ),
    _of(
        "Processed",
        "loss_sum tokens path retries",
        "what is shown of a microbatch, and the targets that are thanked for",
        "tokens are those of the microbatch; losses of training are made again with its answer",
        "train/pipeline/next_hop.py",
    ),
    _of(
        "Processed",
        "onward_s queued_s received_s",
        "the speed of a line, and the size of microbatches",
        "no more than the seconds that the call took here",
        "train/pipeline/next_hop.py",
    ),
    _of(
        "Processed",
        "sent got signature inner_steps mark",
        "which weights judge an answer",
        "signed by its server, which they convict",
        "trust/statement.py, trust/verdict.py",
    ),
    _of(
        "Exchanged",
        "round samples newcomer held_s",
        "a packet's weight in the mean; how long a round waits for its partner",
        "as of Exchange; the seconds that the call took",
        "train/gossip/exchange_driver.py",
    ),
    _of(
        "Snapshot",
        "id stage nbytes chunk_nbytes hashes elements sections",
        "what is downloaded",
        "the sizes of that stage's state; each chunk has its hash",
        "keep/transfer/download.py",
    ),
    _of(
        "Snapshot",
        "round progress lost_samples lost_at_samples",
        "how far a newcomer takes the run and its own state to be",
        "rounds that the run can have reached; the state is compared with others'",
        "keep/transfer/download.py, keep/recovery/state_check.py",
    ),
    _of(
        "Snapshot",
        "inner_steps gradient_norm bump_steps",
        "the number that its newcomer states of its steps; how two neighbours mix in a rebuilt stage; its rate",
        "between the two neighbours' weights, which are compared; as many steps as a rebuild has",
        "model/stage.py, keep/recovery/checkfree.py",
    ),
    _of(
        "Snapshot",
        "warrant",
        "that a machine has the owner's archive",
        "the owner's signature",
        "run/admission/access.py",
    ),
    _of(
        "Reserved",
        "granted ahead",
        "where the microbatch goes",
        "answers that come or do not",
        "train/pipeline/route.py",
    ),
    _of(
        "Handover",
        "stage",
        "that the state of a leaver is kept",
        "a replica of that stage seen at work",
        "keep/recovery/neighbour_backup.py",
    ),
    _of(
        "Receipt",
        "run_id server client microbatches samples tokens targets from_unix_s until_unix_s signature",
        "what is shown as given",
        "its client's signature; the page counts members' only",
        "net/membership/receipt.py, app/dashboard/totals.py",
    ),
    _of(
        "AccessListRequest",
        "sequence amendments head list_digest rivals",
        "what the owner's documents are sent, and that the asker is asked in turn",
        "one call a period; the owner's signatures",
        "run/admission/admission.py",
    ),
)

"""The fields of a manifest that say how a run is kept going: checkpoints, limits, recovery, access."""

from __future__ import annotations

from swarmnode.manifest.check import BYTES_MAX, COUNT_MAX, Field, bucket, one_of, real, whole

_SECONDS = real(0.0, 86_400.0, above=True)

SERVICE_FIELDS: tuple[Field, ...] = (
    Field(
        "checkpoint",
        "url",
        bucket(),
        "The bucket in which checkpoints are saved by nodes whose user says --use-bucket (their own keys, from their"
        " environment). A folder is never named here: --checkpoints names one on the machine it is of.",
        "none: volunteers cannot write there",
    ),
    Field("checkpoint", "every_rounds", whole(1, COUNT_MAX), "Rounds between two checkpoints.", "guess"),
    Field("checkpoint", "keep", whole(1, 1_000_000), "Checkpoints kept; older ones are deleted.", "guess"),
    Field(
        "limits",
        "microbatch_timeout_s",
        _SECONDS,
        "Seconds that any microbatch may take, there and back; where they take long, what they are seen to take.",
        "guess: simulated, pieces of work of 5 s and three stages, 60 s lost 19 of 400 and 120 s none",
    ),
    Field("limits", "hop_timeout_min_s", _SECONDS, "Seconds a hop may take, at least.", "guess"),
    Field(
        "limits",
        "in_flight_max",
        whole(1, 65_536),
        "Microbatches a replica holds per position in the itinerary.",
        "guess",
    ),
    Field(
        "limits",
        "tape_bytes_max",
        whole(0, BYTES_MAX),
        "Bytes of tapes a replica keeps; more is recomputed. A GPU keeps more if it has memory to spare.",
        "guess",
    ),
    Field("limits", "frame_bytes_max", whole(1024, BYTES_MAX), "Bytes of tensors in one call, at most.", "guess"),
    Field(
        "limits",
        "exchange_timeout_s",
        _SECONDS,
        "Seconds an exchange between two replicas may take, and 2 more for each MB of a packet.",
        "guess",
    ),
    Field("limits", "announce_period_s", _SECONDS, "Seconds between records of a node.", "guess"),
    Field(
        "limits", "record_ttl_s", _SECONDS, "Seconds until a record is forgotten.", "guess: several announce periods"
    ),
    Field(
        "recovery",
        "method",
        one_of("copy", "average", "weighted", "none"),
        "Rebuilding a stage from its neighbours (CheckFree): by copy, norm-rescaled average, or gradient norms; none:"
        " only snapshots.",
        "measured: swarmnode bench checkfree; at p = .004 copy loses 0.11 nat, weighted 0.13, average 0.18",
    ),
    Field(
        "recovery",
        "keepers",
        whole(0, 64),
        "Nodes of a stage that keep a snapshot of the next one (the last keeps the first's).",
        "guess: one may die with it",
    ),
    Field(
        "recovery", "snapshot_rounds", whole(1, COUNT_MAX), "Rounds until a snapshot that is kept is renewed.", "guess"
    ),
    Field(
        "recovery",
        "snapshot_rounds_max",
        whole(0, COUNT_MAX),
        "Rounds a snapshot may be old to bring a stage back; an older one loses to its neighbours.",
        "guess",
    ),
    Field(
        "recovery",
        "snapshot_bytes_max",
        whole(0, BYTES_MAX),
        "Bytes of a snapshot that a keeper keeps in memory; of a larger one only embedding and head.",
        "guess",
    ),
    Field(
        "recovery",
        "itinerary",
        one_of("straight", "swapped"),
        "swapped: odd microbatches visit the first two and last two inner stages in reverse order (CheckFree+).",
        "guess",
    ),
    Field(
        "recovery",
        "while_lost",
        one_of("wait", "skip"),
        "What microbatches do while a stage is lost; skip: leave it out (never the first or last, at most a third).",
        "guess",
    ),
    Field(
        "access",
        "mode",
        one_of("open", "invited"),
        "open: whoever has an invite or an address; invited: only machines with an invite the owner signed, or named in"
        " the owner's guest list.",
        "the least trouble among friends",
    ),
)

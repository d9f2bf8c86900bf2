"""The manifest fields of a run's operation: checkpoints, limits, recovery, access."""

from __future__ import annotations

from swarmnode.manifest.check import (
    BYTES_MAX,
    COUNT_MAX,
    Field,
    bucket,
    list_of,
    matching,
    one_of,
    path,
    real,
    text,
    whole,
)

_SECONDS = real(0.0, 86_400.0, above=True)

SERVICE_FIELDS: tuple[Field, ...] = (
    Field(
        "checkpoint",
        "url",
        bucket(),
        "The bucket for checkpoints of nodes started with --use-bucket (with their own keys, from their"
        " environment). A folder is not allowed here: --checkpoints names one on each machine.",
        "none: volunteers cannot write there",
    ),
    Field("checkpoint", "every_rounds", whole(1, COUNT_MAX), "Rounds between two checkpoints.", "guess"),
    Field("checkpoint", "keep", whole(1, 1_000_000), "Checkpoints kept; older ones are deleted.", "guess"),
    Field(
        "limits",
        "microbatch_timeout_s",
        _SECONDS,
        "Seconds that a microbatch may take, there and back; adapts upwards if they are seen to take longer.",
        "guess: simulated, pieces of work of 5 s and three stages, 60 s lost 19 of 400 and 120 s none",
    ),
    Field("limits", "hop_timeout_min_s", _SECONDS, "Least seconds that a hop may take.", "guess"),
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
        "Bytes of tapes a replica keeps; the others are recomputed. A GPU keeps more if it has free memory.",
        "guess",
    ),
    Field("limits", "frame_bytes_max", whole(1024, BYTES_MAX), "Most bytes of tensors in one call.", "guess"),
    Field(
        "limits",
        "exchange_timeout_s",
        _SECONDS,
        "Seconds an exchange between two replicas may take, plus 2 for each MB of a packet.",
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
        "measured (docs/measurements/lost-stages.md): at p = .004 copy loses 0.11 nat, weighted 0.13, average 0.18",
    ),
    Field(
        "recovery",
        "keepers",
        whole(0, 64),
        "Nodes of a stage that keep a snapshot of the next one (the last keeps the first's).",
        "guess: one may die together with the stage",
    ),
    Field("recovery", "snapshot_rounds", whole(1, COUNT_MAX), "Rounds until a kept snapshot is renewed.", "guess"),
    Field(
        "recovery",
        "snapshot_rounds_max",
        whole(0, COUNT_MAX),
        "Largest age in rounds of a snapshot for recovery; if it is older, the stage is rebuilt from its neighbours.",
        "guess",
    ),
    Field(
        "recovery",
        "snapshot_bytes_max",
        whole(0, BYTES_MAX),
        "Largest snapshot in bytes that a keeper holds in memory; of a larger one it keeps only embedding and head.",
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
        "Microbatches while a stage is lost: wait, or skip it (never the first or last, at most a third).",
        "guess",
    ),
    Field(
        "access",
        "mode",
        one_of("open", "invited"),
        "open: machines with an invite or an address; invited: only machines with an invite signed by its owner, or on"
        " the owner's access list.",
        "the simplest among friends",
    ),
    Field(
        "evaluation",
        "sets",
        list_of(path(), 16),
        "Texts beside the run's own held-out part: files or folders below the data folder of the machine that keeps"
        " the archive. Each gives nats per token.",
        "none: the run's own held-out part is always measured",
    ),
    Field(
        "evaluation",
        "tasks",
        list_of(matching(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", "the name of an lm-eval task"), 32),
        "Tasks of lm-evaluation-harness, if it is installed where the archive is kept (docs/evaluation.md).",
        "none: they download their data",
    ),
    Field(
        "evaluation",
        "prompts",
        list_of(text(), 16),
        "Texts that each checkpoint continues; the page shows the continuations.",
        "none",
    ),
    Field(
        "evaluation",
        "prompt_tokens",
        whole(1, 1024),
        "Tokens of a continuation, always the most likely ones.",
        "guess: two or three lines of text",
    ),
)

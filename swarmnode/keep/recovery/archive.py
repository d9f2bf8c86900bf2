"""Decisions of a run's archive: the copies to take, the checkpoints to keep, the disk space to reserve. Pure, no
waiting.

An archive copies the slow weights of every stage from replicas that it does not know. Before it takes a copy, it
compares the copy with those of other replicas of the stage, and with the copy that it took the last time.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from swarmnode.base.errors import DataError, Unavailable
from swarmnode.base.ids import PeerId, short, stage_name
from swarmnode.keep.recovery.checkpoint import Checkpoint
from swarmnode.keep.recovery.recovery_source import CLAIM_WAIT_S
from swarmnode.keep.transfer.state_slices import APART_MAX


@dataclass(frozen=True, slots=True)
class Score:
    """A number of a model: `value` in the unit `metric` ("nats/token", or the task's own)."""

    name: str
    metric: str
    value: float


@dataclass(frozen=True, slots=True)
class Scores:
    """All that was measured. `continuations` are (prompt, text); `failed` says in one line each what was not."""

    scores: tuple[Score, ...] = ()
    continuations: tuple[tuple[str, str], ...] = ()
    failed: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        return {
            "scores": [{"name": one.name, "metric": one.metric, "value": one.value} for one in self.scores],
            "continuations": [{"prompt": prompt, "text": text} for prompt, text in self.continuations],
            "failed": list(self.failed),
        }

    @staticmethod
    def of_json(tree: object) -> Scores:
        """Parse `to_json`. Raises KeyError, TypeError or ValueError for anything else."""
        if not isinstance(tree, dict):
            raise TypeError("not an object")
        return Scores(
            tuple(Score(str(row["name"]), str(row["metric"]), float(row["value"])) for row in tree["scores"]),
            tuple((str(row["prompt"]), str(row["text"])) for row in tree["continuations"]),
            tuple(str(line) for line in tree["failed"]),
        )


NO_SCORES = Scores()


COPIES_MAX = 3  # derived: replicas of a stage that are compared: with three, one liar is outvoted
EARLY_S = (120.0, 300.0, 600.0)  # guess: of training; an owner looks at a new run often
LEAST_S = 600.0  # guess: between two copies later; of a day's run less than one per cent
COPY_SHARE = 0.05  # guess: of an archive's time that it may spend copying, where that makes copies rarer
FRESH_S = 60.0  # guess: a copy so old is as good as one made now
ONCE_S = CLAIM_WAIT_S  # whoever waits for a copy waits so long: a lost stage is recovered within this time
WHOLE_CHUNKS = 64  # of more, so many are drawn; derived: 5 % of them spoilt pass in one draw of 27

ABOUT = "archive.json"
"""In a checkpoint's folder, written last, and again when it is measured: what the archive found out about it."""

UNMEASURED = "later"
"""As `ArchiveNotes.measured`: the model can be used, and its loss follows."""

Distances = Mapping[tuple[int, int], float]
"""How far copies i < j are apart, in lengths of the longer one (keep/recovery/state_check.py)."""


class Deserted(Unavailable):
    """Nobody serves any stage: there is nothing newer than what an archive has."""


@dataclass(frozen=True, slots=True)
class CopyVerdict:
    """The verdict on the copies of one stage: the one taken (None: none can be), the number of others that agree with
    it, the peers that contradict it, and the reason."""

    taken: int | None
    agree: int
    liars: tuple[PeerId, ...]
    reason: str


def choose_copy(
    peers: Sequence[PeerId],
    apart: Distances,
    before: Sequence[float] | None = None,
    ready: Collection[int] | None = None,
    apart_max: float = APART_MAX,
) -> CopyVerdict:
    """Choose the copy to take from those of `peers`: the middle one of the majority.

    Copies agree when they are at most `apart_max` apart. `before` holds the distance of each to the copy taken the last
    time. That copy has a vote as long as any copy agrees with it, and so decides between two replicas that contradict
    each other. Copies in `ready` (default: all) are complete and are preferred. A single copy is accepted, because
    there is nothing to compare it with.
    """
    count = len(peers)
    ready = range(count) if ready is None else ready

    def far(one: int, other: int) -> float:
        return apart[min(one, other), max(one, other)]

    def near(one: int) -> list[int]:
        return [other for other in range(count) if other != one and far(one, other) <= apart_max]

    if not count:
        return CopyVerdict(None, 0, (), "no copy came")
    if count == 1:
        known = before is not None and before[0] <= apart_max
        reason = "the only copy; near the one before" if known else "the only copy; nobody confirms it"
        return CopyVerdict(0, 0, (), reason)
    votes = [1 + len(near(one)) for one in range(count)]
    voters = count
    if before is not None and min(before) <= apart_max:
        voters += 1
        votes = [vote + (distance <= apart_max) for vote, distance in zip(votes, before, strict=True)]
    best = max(votes)
    if 2 * best <= voters:
        names = " and ".join(map(short, peers))
        least = min(apart.values())
        return CopyVerdict(None, 0, (), f"{names} contradict each other ({least:.3g} of their length apart)")
    middle = min(
        (one for one in range(count) if votes[one] == best),
        key=lambda one: (one not in ready, median([far(one, other) for other in near(one)] or [0.0]), one),
    )
    agree = near(middle)
    liars = tuple(peers[other] for other in range(count) if other != middle and other not in agree)
    how = f"{len(agree)} of {count - 1} others agree"
    return CopyVerdict(middle, len(agree), liars, how if agree else f"{how}; the last copy does")


def sampled(chunks: int, rng: random.Random) -> list[int]:
    """The indices of the chunks of a copy to compare: all of a small copy, else WHOLE_CHUNKS drawn at random. Donors
    have announced the hashes of all their chunks before the draw."""
    return list(range(chunks)) if chunks <= WHOLE_CHUNKS else sorted(rng.sample(range(chunks), WHOLE_CHUNKS))


def next_copy_s(copied_s: float, every_s: float, took_s: float = 0.0) -> float:
    """Seconds of the run's training after which a copy is due, when the last one was made after `copied_s` (0: none
    was) and took `took_s`: EARLY_S, then LEAST_S after each, or as much later as copying costs; `every_s` at most."""
    early = next((at_s for at_s in EARLY_S if at_s > copied_s + FRESH_S), math.inf)
    steady = copied_s + max(LEAST_S, took_s / COPY_SHARE) if early == math.inf else math.inf
    return min(early, steady, copied_s + every_s)


def labels_to_keep(losses: Mapping[str, float | None], keep: int) -> set[str]:
    """The labels to keep: the newest `keep` and the one with the lowest loss.

    `losses` maps the label of each complete checkpoint to its validation loss, None where it was not measured.
    """
    newest = set(sorted(losses)[-keep:])
    measured = {label: loss for label, loss in losses.items() if loss is not None}
    return newest | ({min(measured, key=lambda label: (measured[label], label))} if measured else set())


def needed_nbytes(stages: Sequence[int], chunk_nbytes: int) -> int:
    """Bytes of disk that the next checkpoint needs while it is made: each stage's copy, its files, and the parts of
    other copies that it is compared with. `stages`: bytes of the slow weights of each."""
    compared = sum(min(nbytes, WHOLE_CHUNKS * chunk_nbytes) for nbytes in stages)
    return 2 * sum(stages) + (COPIES_MAX - 1) * compared


def together_within(rounds: Sequence[int], stride: int, apart_max: int) -> tuple[bool, str]:
    """(whether copies of `rounds`, one a stage, make one model, the reason if not). Replicas take part only in every
    `stride`-th round of the run."""
    most = max(rounds)
    least = min(rounds)
    if most - least <= apart_max * max(1, stride):
        return True, ""
    late = [stage for stage, round_index in enumerate(rounds) if round_index == least]
    return False, f"{stage_name(late[0])} is at round {least} where others are at {most}: it catches up first"


@dataclass(frozen=True, slots=True)
class ArchiveNotes:
    """An archive's findings on a checkpoint, beside its checkpoint.json. `loss` is nats per token on held-out text;
    `measured` names who measured it ("archive", "swarm", "" for nobody, UNMEASURED for nobody yet); `scores` are of
    what the manifest's [evaluation] lists. `files` are (name, bytes, SHA-256) of those that checkpoint.json does not
    list: the folder is a model folder, too."""

    unix_s: float
    loss: float | None = None
    measured: str = UNMEASURED
    files: tuple[tuple[str, int, str], ...] = ()
    scores: Scores = NO_SCORES

    def to_text(self) -> bytes:
        """JSON in the format of `of_text`."""
        tree = {**dataclasses.asdict(self), "scores": self.scores.to_json()}
        return (json.dumps(tree, indent=1, sort_keys=True) + "\n").encode()

    @staticmethod
    def of_text(data: bytes, where: str) -> ArchiveNotes:
        """Parse notes; keys of other versions are left out. Raises DataError that begins with `where` for data that an
        archive did not write."""
        try:
            tree = json.loads(data)
            loss = tree["loss"]
            return ArchiveNotes(
                float(tree["unix_s"]),
                None if loss is None else float(loss),
                str(tree["measured"]),
                tuple((str(name), int(nbytes), str(sha256)) for name, nbytes, sha256 in tree["files"]),
                Scores.of_json(tree["scores"]),
            )
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise DataError(f"{where}: not as an archive writes it ({error}); it is made again") from None


@dataclass(frozen=True, slots=True)
class ArchiveEntry:
    """A complete checkpoint of an archive: its index, and what is noted of it."""

    checkpoint: Checkpoint
    notes: ArchiveNotes

    @property
    def label(self) -> str:
        return self.checkpoint.label

    @property
    def files(self) -> Mapping[str, tuple[int, str]]:
        """(bytes, SHA-256) of each file in its folder, by name."""
        noted = {name: (nbytes, sha256) for name, nbytes, sha256 in self.notes.files}
        return noted | {file.name: (file.nbytes, file.sha256) for file in self.checkpoint.files}

    @property
    def nbytes(self) -> int:
        return sum(nbytes for nbytes, _ in self.files.values())

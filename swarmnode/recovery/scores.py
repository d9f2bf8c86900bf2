"""Scores of a checkpoint: what the manifest's [evaluation] lists, as `swarmnode eval --all` prints it."""

from __future__ import annotations

from dataclasses import dataclass


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

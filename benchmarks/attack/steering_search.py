"""The steering that pushes a stage farthest before a caller suspects it (`bench attack --attacks search`).

The attacker knows the code and its limits. It tries each cosine, length, direction and share of lies against the real
tests (`trust/mean_answers.py`), with honest answers, distances and sketches as recorded in the demo
(tests/trust/recorded_checks.json). A lie of cosine c and length l, beside an honest pair of cosine h, along a steady
direction whose unit tensor has the sketch v, where an honest answer has the sketch s:

    sketch = c s + sqrt(1 - c^2) v,    push = l sqrt(1 - c^2)

`push` is summed over the answers that the caller uses, in lengths of an honest gradient; `each`: for one of the liar's
answers, on average. What is pushed is no measure of harm: that is the live bench's.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from swarmnode.base.ids import PeerId, seeded
from swarmnode.trust.audit import Audits
from swarmnode.trust.verdict import CLOSE, Evidence, verdict

RECORDED = Path(__file__).parents[2] / "tests/trust/recorded_checks.json"
WAYS = {"mean": "steer", "bias": "steer toward=bias cosine=.98 length=1"}  # directions, and a life recorded with each
COSINES = (0.5, 0.72, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
LENGTHS = (1.0, 1.3, 1.8)
EVERY = (1, 3, 10)
STAGE = 1
LIFE = 1000
LIVES = 9  # answers of the liar to one caller in a life
SHARE = 0.02


def direction(lives: dict[str, Any], way: str) -> list[float]:
    """The sketch of the unit tensor that the lies of a recorded life point along."""
    checks = lives[WAYS[way]]
    (cosine, length) = {"mean": (0.72, 1.8), "bias": (0.98, 1.0)}[way]
    push = length * math.sqrt(1.0 - cosine * cosine)
    return [statistics.fmean(column) / push for column in zip(*(one["residual"] for one in checks), strict=True)]


def life(
    honest: Sequence[dict[str, Any]],
    along: Sequence[float],
    cosine: float,
    length: float,
    every: int,
    replicas: int,
    rng: random.Random,
) -> tuple[int, float, bool]:
    """(the liar's answers until its caller suspects it, LIFE at most; its push by then; whether an honest replica was
    suspected) at a caller of a stage of `replicas`."""
    audits = Audits(SHARE)
    peers = [PeerId(f"{number:052}") for number in range(replicas)]
    liar = peers[0]
    answers = 0
    pushed = 0.0
    wronged = False
    seen = 0
    push = length * math.sqrt(1.0 - cosine * cosine)
    while answers < LIFE and not audits.unusable(liar, STAGE):
        server = rng.choice(peers)
        one = rng.choice(honest)
        lies = False
        if server == liar:
            answers += 1
            lies = answers % every == 0
        # An honest answer's sketch is as long as recorded, and points anywhere.
        sketch = [rng.gauss(0.0, one["length"] / math.sqrt(len(along))) for _ in along]
        if lies:
            sketch = [cosine * s + math.sqrt(1.0 - cosine * cosine) * v for s, v in zip(sketch, along, strict=True)]
        audits.means(STAGE).observe(server, sketch, float(seen))
        seen += 1
        if not audits.unusable(server, STAGE):
            pushed += push * lies
        if not audits.chosen(server, rng.random()):
            continue
        audits.spent()
        distance = one["distance"]
        if lies:
            distance = 1.0 - cosine * (1.0 - distance) + (length + 1.0 / length) / 2.0 - 1.0
        found = Evidence.AGAIN_SAME if distance <= CLOSE else Evidence.AGAIN_OTHER
        if found is Evidence.AGAIN_OTHER and lies:  # its own weights judge it
            audits.means(STAGE).put_aside(server, float(seen))
        audits.record(server, verdict(found, replicas), b"", float(seen))
        wronged = wronged or (server != liar and audits.unusable(server, STAGE))
    return answers, pushed, wronged


def run(say: Callable[[str], None], replicas: int = 4, seeds: int = LIVES) -> dict[str, Any]:
    """{"search": a row for each setting, the strongest first}: medians over `seeds` lives."""
    lives = json.loads(RECORDED.read_text())
    rows = list[dict[str, Any]]()
    for way, cosine, length, every in product(WAYS, COSINES, LENGTHS, EVERY):
        along = direction(lives, way)
        made = [
            life(
                lives["honest"], along, cosine, length, every, replicas, seeded("search", way, cosine, length, every, n)
            )
            for n in range(seeds)
        ]
        answers, pushed = (statistics.median(one[at] for one in made) for at in (0, 1))
        rows.append(
            {
                "attack": f"steer toward={way} cosine={cosine} length={length} every={every}",
                "answers": answers,
                "suspected": sum(one[0] < LIFE for one in made) / seeds,
                "push": round(pushed, 1),
                "each": round(pushed / answers, 3),
                "honest suspected": sum(one[2] for one in made),
            }
        )
    rows.sort(key=lambda row: -float(row["push"]))
    say(f"{len(rows)} settings, {seeds} lives each; the strongest: {rows[0]['attack']}")
    return {"search": rows}

"""The table of attackers, and their harness (`swarmnode bench attack`): a new attacker is one entry of ATTACKERS.

Three worlds: a swarm in virtual time (swarm.py), rounds of a batch of replicas (packets.py), and processes whose
resources are attacked (floods.py). Each row of the result is an attacker against a stage of so many replicas with one
method, over the same run in which it is absent.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.attack import floods, packets
from benchmarks.attack.flooder import WAYS
from benchmarks.attack.swarm import METHODS, SwarmLife, live
from benchmarks.method.gossip import in_processes
from swarmnode.base.errors import UsageError
from swarmnode.base.ports import Clock

JOURNAL = "attack.jsonl"
FINEST = "steer toward=mean cosine=.98 length=1.3"


@dataclass(frozen=True, slots=True)
class Attacker:
    """A way to lie: `lie` of LyingReplica in one of `every` answers, at `place` of the pipeline, where a stage has one
    of `replicas`, with one of `methods`. `newcomer`: a replica joins its stage under way. `adapters`: the run trains
    adapters."""

    about: str
    lie: str
    place: str = "last"
    every: int = 1
    newcomer: bool = False
    adapters: bool = False
    replicas: tuple[int, ...] = (2, 3, 4)
    methods: tuple[str, ...] = METHODS


ATTACKERS: dict[str, Attacker] = {
    "none": Attacker("an honest replica in the liar's place", "honest"),
    "flip": Attacker("gradients times -1", "flip"),
    "switching": Attacker("another lie each time, one answer in ten", "switching", every=10),
    "steer": Attacker("each gradient looks honest, their mean points aside: cosine .72, 1.8 times as long", "steer"),
    "adaptive": Attacker("the finest that still costs: cosine .98, one answer in three", f"{FINEST} every=3"),
    "wary": Attacker("as adaptive, but honest for 2 s after its weights were copied", f"{FINEST} wary=2"),
    "inner": Attacker("the middle one of three stages steers both ways", "steer part=both", place="inner"),
    "feeder": Attacker("a feeder's activations point aside", "steer part=activations", place="first"),
    "donor": Attacker("the state that it gives has noise of .35 of its length", "donor .35", newcomer=True),
    "planted": Attacker("its gradients teach its own stage to say z after q", "plant into=gradient"),
    "planted weights": Attacker("it moves its own weights to say z after q", "plant into=weights"),
    "planted adapters": Attacker("as planted, in a run of adapters", "plant into=gradient", adapters=True),
}
"""Attackers in a swarm. `packets.ATTACKS` (packets of rounds) and `flooder.WAYS` (resources) are attackers, too."""

NAMES = (*ATTACKERS, *packets.ATTACKS, *WAYS, "search")


def lives_of(name: str, replicas: int, method: str, samples: int, seed: int) -> tuple[SwarmLife, SwarmLife]:
    """(the swarm without the attacker `name`, the one with it)."""
    one = ATTACKERS[name]
    with_it = SwarmLife(
        one.lie,
        one.place,
        replicas,
        method,
        samples,
        seed,
        every=one.every,
        newcomer=one.newcomer,
        adapters=one.adapters,
    )
    return replace(with_it, lie=None, every=1), with_it


def swarms(
    names: Sequence[str],
    replicas: Sequence[int],
    methods: Sequence[str],
    samples: int,
    seeds: Sequence[int],
    say: Callable[[str], None],
    *,
    jobs: int = 1,
    out: Path | None = None,
    resume: bool = False,
) -> list[dict[str, Any]]:
    """A row for each of `names`, of `replicas` and of `methods`. With `out` each life is also a line of
    OUT/attack.jsonl; with `resume`, lives that are there are not repeated."""
    journal = None if out is None else out / JOURNAL
    before = journal.read_text().splitlines() if resume and journal is not None and journal.exists() else []
    found = {row.pop("life"): row for row in map(json.loads, before)}
    wanted = [
        (name, count, method, [lives_of(name, count, method, samples, seed) for seed in seeds])
        for name in names
        for count in replicas or ATTACKERS[name].replicas
        for method in methods or ATTACKERS[name].methods
    ]
    todo = dict.fromkeys(life for *_, pairs in wanted for pair in pairs for life in pair if _key(life) not in found)
    for life, row in zip(todo, in_processes(live, list(todo), jobs), strict=True):
        found[_key(life)] = row
        say(json.dumps({"life": _key(life), **row}))
        if journal is not None:
            journal.parent.mkdir(parents=True, exist_ok=True)
            with journal.open("a") as file:
                file.write(json.dumps({"life": _key(life), **row}) + "\n")
    return [
        {
            "attack": name,
            "method": method,
            "replicas": count,
            **_summed([(found[_key(a)], found[_key(b)]) for a, b in pairs]),
        }
        for name, count, method, pairs in wanted
    ]


def _key(life: SwarmLife) -> str:
    return json.dumps(asdict(life), sort_keys=True)


def _summed(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """Means over seeds of (life without the attacker, life with it); lies are the most of all, -1 where some caller
    never excluded it."""
    costs = [with_it["nats"] - without["nats"] for without, with_it in pairs]
    lies = [with_it.get("lies until out", -1) for _, with_it in pairs]

    def mean(key: str) -> float:
        told = [with_it[key] for _, with_it in pairs if key in with_it]
        return statistics.fmean(told) if told else math.nan

    return {
        "seeds": len(pairs),
        "nats": round(statistics.fmean(costs), 3),
        "spread": round(statistics.stdev(costs), 3) if len(costs) > 1 else math.nan,
        "lies until out": -1 if -1 in lies else max(lies),
        "out of callers": mean("out"),
        "lies": mean("lies"),
        "honest blamed": sum(with_it["honest blamed"] + without["honest blamed"] for without, with_it in pairs),
        "checked": round(mean("checked"), 4),
        "planted": round(mean("planted"), 3),
        "newcomer apart": mean("newcomer apart"),
    }


def run(
    names: Sequence[str],
    replicas: Sequence[int],
    methods: Sequence[str],
    samples: int,
    seeds: int,
    clock: Clock,
    say: Callable[[str], None],
    *,
    jobs: int = 1,
    out: Path | None = None,
    resume: bool = False,
    **of_rounds: Any,
) -> dict[str, Any]:
    """{"attacks": rows in swarms, and for packets and floods, if named, their tables}. Raises UsageError for an unknown
    attacker or method, LocalFault where a flooded node dies."""
    for wrong in (name for name in names if name not in NAMES):
        raise UsageError(f"unknown attacker {wrong!r}: use one of {', '.join(NAMES)}")
    for wrong in (method for method in methods if method not in METHODS):
        raise UsageError(f"unknown method {wrong!r}: use one of {', '.join(METHODS)}")
    if any(count < 2 for count in replicas):
        raise UsageError("a stage with a liar needs 2 replicas at least")
    tables: dict[str, Any] = {}
    if mine := [name for name in names if name in ATTACKERS]:
        tables["attacks"] = swarms(
            mine, replicas, methods, samples, range(seeds), say, jobs=jobs, out=out, resume=resume
        )
    if said := [name for name in names if name in packets.ATTACKS]:
        found = packets.run(attacks=said, seeds=seeds, say=say, jobs=jobs, out=out, resume=resume, **of_rounds)
        tables["reference"] = found["reference"]
        tables["packets"] = found["attacks"]
    if ways := [name for name in names if name in WAYS]:
        tables["floods"] = floods.run(ways, clock, say)["attacks"]
    if "search" in names:
        from benchmarks.attack import steering_search

        tables["search"] = steering_search.run(say)["search"]
    return tables

"""Golden traces: what some lives have decided, as hashes. After a change of what nodes decide, on purpose, write them
anew and look at what changed besides:

    .venv/bin/python -m tests.simulation.golden
"""

import dataclasses
import json
import pathlib

from swarmsim.life import simulate
from swarmsim.scenario import find, read_scenario, shorter

FILE = pathlib.Path(__file__).with_name("golden.json")
LIVES = (("calm", 1, 20.0), ("everything", 3, 40.0), ("home-links", 5, 30.0))


def life(name: str, seed: int, seconds: float) -> dict[str, object]:
    scenario = shorter(read_scenario(find(name)), seconds)
    # Windows have not grown yet in so short a life: progress is for the sweep to demand.
    bounds = dataclasses.replace(scenario.bounds, throughput=0.0, window_s=10.0)
    outcome = simulate(dataclasses.replace(scenario, bounds=bounds), seed)
    assert not outcome.failures, outcome.failures
    return {
        "scenario": name,
        "seed": seed,
        "seconds": seconds,
        "trace": outcome.trace,
        "events": outcome.events,
        "samples": outcome.total.samples,
        "bytes": outcome.total.bytes,
    }


def main() -> None:
    FILE.write_text(json.dumps([life(*given) for given in LIVES], indent=1) + "\n")
    print(FILE.read_text())


if __name__ == "__main__":
    main()

"""The plain side of `bench learning`: a grid of plain PyTorch runs, each in its own process, kept in a journal."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.swarm.laws import read_lines
from benchmarks.swarm.pytorch_learning import VERSION, GridPoint, LossPoint, TrainingTask
from swarmnode.base.errors import LocalFault
from swarmnode.base.ids import digest
from swarmnode.data.indexed import open_text
from swarmnode.run.manifest import Manifest
from swarmnode.run.manifest.recipe import PRESETS

BATCHES = (8, 4, 16, 32, 64)  # best first, so that an interrupted bench has them in its journal
ADAMW_RATES = (1.5e-3, 1.05e-3, 2.1e-3, 3e-3, 0.75e-3)  # around the best of batches of 4 to 32 (demo, 7,500 samples)
MUON_RATES = (3e-3, 1.5e-3, 6e-3, 0.012)  # the same; at .012 batches of 8 have 1.49 nats, at .0025 1.32 (measured)
MUON_MOMENTA = (0.9, 0.8, 0.95)  # measured: docs/methods.md
FAST = (
    GridPoint("adamw", 4, 1.05e-3),
    GridPoint("adamw", 8, 1.05e-3),
    GridPoint("muon", 8, 3e-3, momentum=0.9),
    GridPoint("muon", 8, 3e-3, momentum=0.8),
)
"""The best settings for the demo's model, by whole runs on its text (measured)."""

GRID = (
    *(GridPoint("adamw", batch, rate) for batch in BATCHES for rate in ADAMW_RATES),
    *(
        GridPoint("muon", batch, rate, momentum=momentum)
        for momentum in MUON_MOMENTA
        for batch in (BATCHES if momentum == MUON_MOMENTA[0] else BATCHES[:1])
        for rate in MUON_RATES
    ),
)


def fast_settings(manifest: Manifest) -> tuple[GridPoint, ...]:
    """FAST for the demo's model; for another the batch and rates of `manifest`, and other rates beside them."""
    if manifest.model == PRESETS["demo"].model:
        return FAST
    inner = manifest.inner
    adamw = (GridPoint("adamw", inner.inner_batch, times * inner.learning_rate) for times in (0.5, 1.0))
    return (
        *adamw,
        *(
            GridPoint(
                "muon", inner.inner_batch, times * inner.muon_learning_rate, inner.learning_rate, inner.muon_momentum
            )
            for times in (1.0, 2.0, 4.0)
        ),
    )


@dataclass(frozen=True, slots=True)
class PlainRun:
    """A measured run: its evaluations, oldest first. Core and wall seconds are those of `machine`."""

    setting: GridPoint
    seed: int
    threads: int
    machine: str
    looks: tuple[LossPoint, ...]


@dataclass(frozen=True, slots=True)
class GridConditions:
    """Settings shared by all plain runs of a bench."""

    signed: Path
    cache: Path
    manifest: Manifest
    bf16: bool
    device: str = "cpu"
    data: Path | None = None  # folder of the run's data set or tokenizer

    def key(self, setting: GridPoint, seed: int, threads: int) -> str:
        """Key of a run's result: the model, the tokens and their order, the setting and the code's version."""
        manifest = self.manifest
        what = {
            "version": VERSION,
            "model": dataclasses.asdict(manifest.model),
            "tokens": open_text(manifest, self.data, self.cache).digest.hex(),
            "order": manifest.seed + seed,
            "held out": manifest.pipeline.validation_samples,
            "weight decay": manifest.inner.weight_decay,
            "setting": dataclasses.asdict(setting),
            "threads": threads,
            "bf16": self.bf16,
        }
        what |= {} if self.device == "cpu" else {"device": self.device}
        return digest(json.dumps(what, sort_keys=True)).hex()[:32]


class Journal:
    """Runs in a file of JSON lines, so that no run is measured twice."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lines: list[dict[str, Any]] = read_lines(path) if path else []

    def find(self, key: str, samples: int) -> PlainRun | None:
        """The longest run of `key`, if it has at least `samples` samples; of equally long ones the newest."""
        mine = [line for line in reversed(self._lines) if line.get("key") == key]
        line = max(mine, key=lambda line: int(line["looks"][-1][0]), default=None)
        if line is None or line["looks"][-1][0] < samples:
            return None
        looks = tuple(LossPoint(*look) for look in line["looks"])
        return PlainRun(GridPoint(**line["setting"]), line["seed"], line["threads"], line["machine"], looks)

    def add(self, key: str, run: PlainRun) -> None:
        line = {
            "key": key,
            "setting": dataclasses.asdict(run.setting),
            "seed": run.seed,
            "threads": run.threads,
            "machine": run.machine,
            "looks": [dataclasses.astuple(look) for look in run.looks],
        }
        self._lines.append(line)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def measure(
    ground: GridConditions,
    wanted: Iterable[tuple[GridPoint, int, int]],
    journal: Journal,
    say: Callable[[str], None],
    *,
    fresh: bool = False,
) -> list[PlainRun]:
    """A run of each (setting, samples, seed) in `wanted`, from the journal unless it is missing there, or `fresh`."""
    found = []
    for setting, samples, seed in wanted:
        key = ground.key(setting, seed, 1)
        run = None if fresh else journal.find(key, samples)
        if measured := run is None:
            run = plain_run(ground, setting, samples=samples, seed=seed)
            journal.add(key, run)
        last = run.looks[-1]
        how = f"{last.core_s:.0f} CPU s" if measured else "from the journal"
        say(f"plain {setting}, seed {seed}: {last.nats:.4f} nats after {last.samples} samples, {how}")
        found.append(run)
    return found


def plain_run(
    ground: GridConditions,
    setting: GridPoint,
    *,
    samples: int = 1 << 40,
    seconds: float | None = None,
    threads: int = 1,
    seed: int = 0,
) -> PlainRun:
    """Train one plain process now. Raises LocalFault when it fails."""
    data = "" if ground.data is None else str(ground.data)
    task = TrainingTask(
        str(ground.signed),
        str(ground.cache),
        setting,
        samples,
        seconds,
        threads,
        seed,
        ground.bf16,
        ground.device,
        data,
    )
    command = [sys.executable, "-m", "benchmarks.swarm.pytorch_learning", task.to_json()]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise LocalFault(f"the plain process ({setting}) ended with {done.returncode}: {last}")
    looks = tuple(LossPoint(**look) for look in json.loads(done.stdout)["looks"])
    return PlainRun(setting, seed, threads, machine(), looks)


def machine() -> str:
    """Processor and PyTorch version of the measured seconds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()}, PyTorch {torch.__version__}"

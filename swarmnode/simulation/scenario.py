"""A scenario: a run, a fleet, a net, and what befalls them. A small TOML file."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from swarmnode.errors import UsageError
from swarmnode.manifest import Manifest
from swarmnode.manifest.text import from_tree
from swarmnode.simulation.directory import Habits
from swarmnode.simulation.fleet import Kind, parse_fleet, read_fleet
from swarmnode.simulation.network import Weather

FAKED = ("noloco", "average", "none")
"""Methods whose outer steps fake replicas take (simulation/replica.py)."""

FOLDERS = (Path("examples"), Path(__file__).resolve().parents[2] / "examples")


@dataclass(frozen=True, slots=True)
class FaultSpec:
    """How often something goes wrong and how badly. `per_node_hour` counts machines, `per_hour` the whole world;
    `at_s` are moments it surely happens. What the other numbers mean is said in fault.py."""

    per_node_hour: float = 0.0
    per_hour: float = 0.0
    at_s: tuple[float, ...] = ()
    seconds: float = 60.0
    share: float = 1.0 / 3.0
    factor: float = 0.0
    back_s: float = 60.0
    count: int = 0
    stage: int = -1
    notices_s: tuple[float, ...] = (120.0, 30.0, 5.0, 0.0)
    modes: tuple[str, ...] = ("huge", "nan", "stale", "shape", "sign", "zero")


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is demanded after the storm. Shares are of what the living machines can do where they are."""

    served_s: float = 120.0  # every stage is served again
    training_s: float = 300.0  # every living node trains
    window_s: float = 300.0  # over which throughput is measured
    throughput: float = 0.5  # guess: routes, windows and recomputed tapes cost something
    spread: float = 0.05  # of slow weights in a stage, fake tensors (an inner step trembles by 0.001)


@dataclass(frozen=True, slots=True)
class Scenario:
    """`seconds` of storm, then calm until the bounds hold."""

    name: str
    about: str = ""
    seconds: float = 600.0
    join_s: float = 5.0  # over which the first nodes arrive
    tensors: str = "fake"
    text: str = "pattern"  # of real tensors: "pattern", a small random graph of tokens; "data", what manifest.data says
    work_factor: float = 1.0  # arithmetic a sample costs, times this: a small model stands for a large one
    state_share: float = 1.0  # share of a state's bytes kept in memory here; on the wire all of them count
    memory_gbps: float = 100.0  # memory traffic, GB/s
    processors: int = 0  # that all nodes share, as far as they know; 0: each machine is its own
    noise: float = 0.05  # spread of compute times
    checkpoints: bool = False  # nodes save the run on a disk that all share
    placement: str = "balanced"  # of the first nodes; "chosen": each chooses
    fleet: tuple[Kind, ...] = ()
    manifest: Manifest = field(default_factory=Manifest)
    weather: Weather = field(default_factory=Weather)
    directory: Habits = field(default_factory=Habits)
    faults: Mapping[str, FaultSpec] = field(default_factory=dict)
    bounds: Bounds = field(default_factory=Bounds)

    @property
    def nodes(self) -> int:
        return sum(kind.count for kind in self.fleet)


Row = TypeVar("Row")


def find(name: str) -> Path:
    """The file of scenario `name`: a path, or a name from examples/. Raises UsageError that lists what there is."""
    path = Path(name)
    if path.suffix == ".toml" or path.is_file():
        return path
    for folder in FOLDERS:
        if (folder / f"{name}.toml").is_file():
            return folder / f"{name}.toml"
    known = sorted({found.stem for folder in FOLDERS for found in folder.glob("*.toml")})
    raise UsageError(f"no scenario {name[:60]!r}: a path of a TOML file, or one of {', '.join(known) or 'examples/'}")


def read_scenario(path: Path) -> Scenario:
    """Raises UsageError or ManifestError that names the file, the key and what belongs there."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not TOML: {error}") from None
    return parse_scenario(tree, str(path), path.parent, path.stem)


def parse_scenario(tree: dict[str, Any], origin: str, folder: Path, name: str) -> Scenario:
    tree = dict(tree)
    fleet = tree.pop("fleet", None)
    if isinstance(fleet, str):
        kinds = read_fleet(folder / fleet)
    elif isinstance(fleet, list) and fleet:
        kinds = parse_fleet([{key: str(value) for key, value in row.items()} for row in fleet], origin)
    else:
        raise UsageError(f'{origin}: fleet is missing: fleet = "file.csv" or [[fleet]] tables')
    faults = {}
    for kind, given in _table(tree, "faults", origin).items():
        faults[kind] = _fill(FaultSpec, given, f"{origin}: faults.{kind}")
    parts = {
        "manifest": from_tree(_table(tree, "manifest", origin), f"{origin}: manifest"),
        "weather": _fill(Weather, _table(tree, "weather", origin), f"{origin}: weather"),
        "directory": _fill(Habits, _table(tree, "directory", origin), f"{origin}: directory"),
        "bounds": _fill(Bounds, _table(tree, "bounds", origin), f"{origin}: bounds"),
        "faults": faults,
        "fleet": kinds,
    }
    tree.setdefault("name", name)
    scenario = dataclasses.replace(_fill(Scenario, tree, origin, skip=tuple(parts)), **parts)  # type: ignore[arg-type]
    _check(scenario, origin)
    return scenario


def _check(scenario: Scenario, origin: str) -> None:
    from swarmnode.simulation.fault import FAULTS

    unknown = [kind for kind in scenario.faults if kind not in FAULTS]
    if unknown:
        raise UsageError(f"{origin}: no fault {unknown[0]!r}; faults are {', '.join(sorted(FAULTS))}")
    if scenario.tensors not in ("fake", "torch"):
        raise UsageError(f'{origin}: tensors = {scenario.tensors!r}; "fake" or "torch" belong there')
    method = scenario.manifest.gossip.method
    if scenario.tensors == "fake" and method not in FAKED:
        raise UsageError(
            f'{origin}: gossip.method = {method!r} with tensors = "fake"; these take the steps of {", ".join(FAKED)}'
            ' alone: say tensors = "torch"'
        )
    if scenario.text not in ("pattern", "data"):
        raise UsageError(f'{origin}: text = {scenario.text!r}; "pattern" or "data" belong there')
    if scenario.placement not in ("balanced", "chosen"):
        raise UsageError(f'{origin}: placement = {scenario.placement!r}; "balanced" or "chosen" belong there')
    stages = scenario.manifest.pipeline.stages
    if any(kind.stage is not None and kind.stage >= stages for kind in scenario.fleet):
        raise UsageError(f"{origin}: a machine at stage {stages} or above; there are stages 0 to {stages - 1}")
    if scenario.nodes < stages:
        raise UsageError(f"{origin}: {scenario.nodes} machines for {stages} stages; one a stage is the least")


def _table(tree: dict[str, Any], key: str, origin: str) -> dict[str, Any]:
    found = tree.pop(key, {})
    if not isinstance(found, dict):
        raise UsageError(f"{origin}: {key} is a table, written [{key}]")
    return found


def _fill(kind: type[Row], given: object, where: str, skip: tuple[str, ...] = ()) -> Row:
    """`kind` with the values `given`, each of the type of its default."""
    if not isinstance(given, dict):
        raise UsageError(f"{where}: a table is due")
    known = {f.name: f for f in dataclasses.fields(kind) if f.name not in skip}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in known:
            raise UsageError(f"{where}: no key {key!r}; keys are {', '.join(known)}")
        default = known[key].default
        if isinstance(default, float) and type(value) in (int, float) and math.isfinite(value) and value >= 0:
            values[key] = float(value)
        elif isinstance(default, tuple) and isinstance(value, list):
            values[key] = tuple(float(item) if type(item) is int else item for item in value)
        elif type(value) is type(default) or (default is dataclasses.MISSING and isinstance(value, str)):
            values[key] = value
        else:
            raise UsageError(f"{where}: {key} = {value!r}; the default is {default!r}")
    return kind(**values)


def shorter(scenario: Scenario, seconds: float) -> Scenario:
    """The same storm for `seconds`."""
    return dataclasses.replace(scenario, seconds=seconds)

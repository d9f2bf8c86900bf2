"""A scenario: a run, a fleet, a network and faults, in a small TOML file."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from swarmnode.app.planner.fleet import MachineKind, parse_fleet, read_fleet, scaled
from swarmnode.app.planner.stage_memory import ADVICE, shortages, tightest
from swarmnode.base.errors import UsageError
from swarmnode.base.text_file import decoded
from swarmnode.run.manifest import Manifest
from swarmnode.run.manifest.text import from_tree
from swarmsim.directory import DirectoryFaults
from swarmsim.network import Weather

FAKED = ("noloco", "average", "none")
"""Methods whose outer steps fake replicas implement (swarmsim/replica.py)."""

FAULT_NAMES = (
    "crash",
    "gone",
    "preempt",
    "reclaim",
    "exodus",
    "crowd",
    "stage_lost",
    "slow",
    "hang",
    "gray",
    "clog",
    "partition",
    "one_way",
    "bridge",
    "skew",
    "corrupt",
    "liar",
    "overclaim",
    "full",
    "blackout",
    "forget",
    "bootstrap_gone",
    "everyone_leaves",
    "meeting_point_gone",
)
"""Kinds of faults; swarmsim/fault.py has a coroutine for each."""

_HERE = Path(__file__).resolve()
FOLDERS = (Path("examples"), _HERE.parents[1] / "examples", _HERE.parent / "examples")  # the last: of a wheel


@dataclass(frozen=True, slots=True)
class FaultSpec:
    """Rate and severity of a fault. `per_node_hour` is per machine, `per_hour` for the whole world; `at_s` are fixed
    times. fault.py defines the other numbers."""

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
class RecoveryBounds:
    """Demands after the storm. Shares are of what the living machines can do in their stages."""

    served_s: float = 120.0  # every stage is served again
    training_s: float = 300.0  # every living node trains
    window_s: float = 300.0  # over which throughput is measured
    throughput: float = 0.5  # guess: routes, windows and recomputed tapes cost something
    spread: float = 0.05  # of slow weights in a stage, fake tensors (an inner step has noise of 0.001)


@dataclass(frozen=True, slots=True)
class Scenario:
    """`seconds` of storm, then calm until the bounds hold."""

    name: str
    about: str = ""
    seconds: float = 600.0
    join_s: float = 5.0  # time over which the first nodes arrive
    tensors: str = "fake"
    # text for real tensors: "pattern", a small random graph of tokens; "data", the manifest's data
    text: str = "pattern"
    work_factor: float = 1.0  # factor on a sample's arithmetic: a small model stands for a large one
    state_share: float = 1.0  # share of a state's bytes kept in memory; on the wire all of them count
    memory_gbps: float = 100.0  # memory traffic, GB/s
    processors: int = 0  # shared by all nodes, as far as they know; 0: each machine has its own
    noise: float = 0.05  # spread of compute times
    checkpoints: bool = False  # nodes save the run on a shared disk
    placement: str = "balanced"  # of the first nodes; "chosen": each chooses its stage
    fleet: tuple[MachineKind, ...] = ()
    manifest: Manifest = field(default_factory=Manifest)
    weather: Weather = field(default_factory=Weather)
    directory: DirectoryFaults = field(default_factory=DirectoryFaults)
    faults: Mapping[str, FaultSpec] = field(default_factory=dict)
    bounds: RecoveryBounds = field(default_factory=RecoveryBounds)

    @property
    def nodes(self) -> int:
        return sum(kind.count for kind in self.fleet)


Row = TypeVar("Row")


def find(name: str) -> Path:
    """The file of scenario `name`: a path, or a name from examples/. Raises UsageError that lists the known names."""
    path = Path(name)
    if path.suffix == ".toml" or path.is_file():
        return path
    for folder in FOLDERS:
        if (folder / f"{name}.toml").is_file():
            return folder / f"{name}.toml"
    known = sorted({found.stem for folder in FOLDERS for found in folder.glob("*.toml")})
    raise UsageError(
        f"unknown scenario {name[:60]!r}; give the path of a TOML file, or one of {', '.join(known) or 'examples/'}"
    )


def read_scenario(path: Path, changes: Mapping[str, object] = MappingProxyType({})) -> Scenario:
    """The scenario in `path`, with `changes` of its manifest (`{"gossip.method": "diloco"}`). Raises UsageError or
    ManifestError that names the file, the key and the expected value."""
    try:
        tree = tomllib.loads(decoded(path.read_bytes()))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not TOML: {error}") from None
    for name, value in changes.items():
        table, _, key = name.rpartition(".")
        tree.setdefault("manifest", {}).setdefault(table, {})[key] = value
    return parse_scenario(tree, str(path), path.parent, path.stem)


def chosen(
    name: str,
    nodes: int | None = None,
    for_s: float | None = None,
    changes: Mapping[str, object] = MappingProxyType({}),
) -> Scenario:
    """Scenario `name` (`find`) with `changes` of its manifest, its fleet scaled to `nodes`, its storm `for_s` long."""
    scenario = read_scenario(find(name), changes)
    if nodes is not None:
        stages = scenario.manifest.pipeline.stages
        if nodes < stages:
            raise UsageError(f"--nodes: {nodes} nodes for {stages} stages; each stage needs at least one")
        scenario = dataclasses.replace(scenario, fleet=scaled(scenario.fleet, nodes))
    return scenario if for_s is None else shorter(scenario, for_s)


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
        "directory": _fill(DirectoryFaults, _table(tree, "directory", origin), f"{origin}: directory"),
        "bounds": _fill(RecoveryBounds, _table(tree, "bounds", origin), f"{origin}: bounds"),
        "faults": faults,
        "fleet": kinds,
    }
    tree.setdefault("name", name)
    scenario = dataclasses.replace(_fill(Scenario, tree, origin, skip=tuple(parts)), **parts)  # type: ignore[arg-type]
    _check(scenario, origin)
    return scenario


def _check(scenario: Scenario, origin: str) -> None:
    unknown = [kind for kind in scenario.faults if kind not in FAULT_NAMES]
    if unknown:
        raise UsageError(f"{origin}: unknown fault {unknown[0]!r}; faults are {', '.join(sorted(FAULT_NAMES))}")
    if scenario.tensors not in ("fake", "torch"):
        raise UsageError(f'{origin}: tensors = {scenario.tensors!r}; expected "fake" or "torch"')
    method = scenario.manifest.gossip.method
    if scenario.tensors == "fake" and method not in FAKED:
        raise UsageError(
            f'{origin}: gossip.method = {method!r} with tensors = "fake"; these only support {", ".join(FAKED)};'
            ' set tensors = "torch"'
        )
    if scenario.text not in ("pattern", "data"):
        raise UsageError(f'{origin}: text = {scenario.text!r}; expected "pattern" or "data"')
    if scenario.placement not in ("balanced", "chosen"):
        raise UsageError(f'{origin}: placement = {scenario.placement!r}; expected "balanced" or "chosen"')
    stages = scenario.manifest.pipeline.stages
    if any(kind.stage is not None and kind.stage >= stages for kind in scenario.fleet):
        raise UsageError(f"{origin}: a machine at stage {stages} or above; stages are 0 to {stages - 1}")
    if short := shortages(scenario.manifest, scenario.fleet):
        raise UsageError(f"{origin}: {short[0]}; {ADVICE}")
    if (worst := tightest(scenario.manifest, scenario.fleet)) is not None:
        raise UsageError(f"{origin}: {worst[1]}")
    if scenario.nodes < stages:
        raise UsageError(f"{origin}: {scenario.nodes} machines for {stages} stages; each stage needs at least one")


def _table(tree: dict[str, Any], key: str, origin: str) -> dict[str, Any]:
    found = tree.pop(key, {})
    if not isinstance(found, dict):
        raise UsageError(f"{origin}: {key} is a table, written [{key}]")
    return found


def _fill(kind: type[Row], given: object, where: str, skip: tuple[str, ...] = ()) -> Row:
    """A `kind` with the values `given`, each of its default's type. Raises UsageError."""
    if not isinstance(given, dict):
        raise UsageError(f"{where}: expected a table")
    known = {f.name: f for f in dataclasses.fields(kind) if f.name not in skip}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in known:
            raise UsageError(f"{where}: unknown key {key!r}; keys are {', '.join(known)}")
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
    """The same scenario with a storm of `seconds`."""
    return dataclasses.replace(scenario, seconds=seconds)

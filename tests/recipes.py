"""Carry out recipes of docs/architecture.md on a copy of the tree: each adds what the page says, in the files that it
names, and the tests that it names pass without any other change.

    python -m tests.recipes              # all
    python -m tests.recipes flag panel   # some

The seconds and the output of each are printed; the code is 1 if one fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
RUFF = ("-m", "ruff", "check", "--no-cache", "-q", "swarmnode", "swarmnode_methods", "tests")
FORMAT = ("-m", "ruff", "format", "--no-cache", "--check", "-q", "swarmnode", "swarmnode_methods", "tests")
TIDY = (*PYTEST, "tests/tidy/test_words.py", "tests/tidy/test_size.py", "tests/tidy/test_statements.py")
BOUND_S = 900.0


@dataclass(frozen=True, slots=True)
class Insertion:
    """Lines that a recipe adds to a file behind the first one that contains `after`."""

    path: str
    after: str
    lines: str


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a contributor adds, and the commands (arguments of Python, in the copy) that must then succeed. `package`: a
    folder of the tree whose modules are installed, with its entry points."""

    commands: tuple[tuple[str, ...], ...]
    insertions: tuple[Insertion, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    package: str = ""
    entry_points: str = ""


METHOD = '''"""Halfway averaging: replicas of a stage move half of the way to their mean.

D   = the mean of theta - phi over the group
phi <- phi + D / 2
"""

from __future__ import annotations

from typing import ClassVar

import torch

from swarmnode_methods.mean import DeltaMean


class Halfway(DeltaMean):
    """A step of half the mean pseudo-gradient, without momentum."""

    name: ClassVar[str] = "halfway"

    def _advance(self, phi: torch.Tensor, m: torch.Tensor, mean: torch.Tensor, start: int) -> None:
        phi.add_(mean, alpha=0.5)
'''

METHOD_TEST = '''"""The equation of halfway averaging."""

import torch

from swarmnode.run.manifest import GossipSpec
from swarmnode.train.gossip.outer import outer


def test_a_lone_replica_moves_half_of_the_way() -> None:
    method = outer(GossipSpec(method="halfway", codec="fp32", group=0), torch.tensor([1.0, -2.0]))
    method.phi.zero_()
    method.message(1)
    method.apply(1, 1.0, [])
    assert method.phi.tolist() == [0.5, -1.0]
'''

FLAG_TEST = '''"""`join --nice`."""

import os
from unittest import mock

from swarmnode.app.cli.join import command
from swarmnode.app.daemon.process import use_niceness


def test_a_volunteer_says_how_nice_the_process_is() -> None:
    with mock.patch.object(os, "nice") as nice:
        use_niceness(7)
        use_niceness(0)
    assert [call.args for call in nice.call_args_list] == [(7,)]
    assert "--nice" in {option for parameter in command.params for option in parameter.opts}
'''

LIMIT_TEST = '''"""The limit on the traffic of the node itself."""

from dataclasses import replace

from swarmnode.train.node.limits import Limits, SensorReading, change, decide


def test_a_node_that_moves_too_much_pauses() -> None:
    limits = change(Limits(), {"max-traffic": "8Mbit"})
    reading = SensorReading(0.0, 0, nbytes_per_s=2e6)
    assert not decide(limits, reading).running
    assert decide(limits, replace(reading, nbytes_per_s=5e5)).running
'''

LIMIT_CHECK = """

def _traffic(limits: Limits, reading: SensorReading) -> LimitVerdict | None:
    if limits.max_traffic_bps is None or 8.0 * reading.nbytes_per_s <= limits.max_traffic_bps:
        return None
    return LimitVerdict(False, None, f"it moves more than {show_rate(limits.max_traffic_bps)}")
"""

LIMIT_ROW = """    "max-traffic": LimitKind(
        "max_traffic_bps", parse_rate, show_rate, "50Mbit", "Pause while this node moves more, both ways together."
    ),
"""

FLAG_FUNCTION = '''

def use_niceness(nice: int) -> None:
    """Let other programs go first."""
    if nice:
        os.nice(nice)
'''

FLAG_OPTION = """@click.option("--nice", type=click.IntRange(0, 19), default=0, help="Niceness, as of nice(1).")
"""

METRIC = """VERDICTS: Final = _metric(
    MetricKind.COUNTER,
    "swarmnode_limit_verdicts_total",
    "verdicts",
    "Times that a limit paused the node or let it go on.",
)
"""

PANEL = """            Panel(
                "Pauses and resumptions by limits",
                "ops",
                ((f"sum(rate(swarmnode_limit_verdicts_total{FROM}[1h]))", "verdicts"),),
            ),
"""

RECIPES: Mapping[str, Recipe] = {
    "codec": Recipe(
        package="examples/own-codec",
        entry_points="[swarmnode.codecs]\nhalf = half_rules:CODECS\n",
        commands=(
            (
                *PYTEST,
                "tests/gossip/test_codec_contract.py",
                "tests/gossip/test_draft.py",
                "tests/gossip/test_outer.py",
                "-k",
                "half",
            ),
            ("-c", "from benchmarks.micro.codec import run; assert run(('half',), 1 << 18, 1)['codecs']"),
        ),
    ),
    "method": Recipe(
        files={"swarmnode_methods/halfway.py": METHOD, "tests/gossip/test_halfway.py": METHOD_TEST},
        insertions=(
            Insertion(
                "swarmnode_methods/rules.py",
                "METHODS = (",
                '    MethodRules("halfway", "swarmnode_methods.halfway:Halfway", WEIGHTS, of_progress=True),\n',
            ),
        ),
        commands=(
            (*PYTEST, "tests/gossip", "-k", "halfway"),
            (*PYTEST, "tests/tidy/test_floors.py"),
            TIDY,
        ),
    ),
    "flag": Recipe(
        insertions=(
            Insertion("swarmnode/app/cli/join.py", '@click.option("--credit"', FLAG_OPTION),
            Insertion("swarmnode/app/daemon/options.py", "    credited: bool", "    nice: int = 0\n"),
            Insertion("swarmnode/app/daemon/process.py", "PAUSE_BYTES_MAX =", FLAG_FUNCTION),
            Insertion(
                "swarmnode/app/daemon/process.py",
                "    check_device(options.device)",
                "    use_niceness(options.nice)\n",
            ),
            Insertion("docs/volunteer.md", "| `--on-ac-only` |", "| `--nice 10` | lets other programs go first |\n"),
        ),
        files={"tests/daemon/test_nice.py": FLAG_TEST},
        commands=(
            (*PYTEST, "tests/daemon/test_nice.py"),
            (*PYTEST, "tests/docs/test_accepted.py", "-k", "volunteer"),
            (*PYTEST, "tests/cli/test_command.py", "tests/cli/test_config_file.py", "-k", "help or join or source"),
        ),
    ),
    "limit": Recipe(
        insertions=(
            Insertion(
                "swarmnode/train/node/limits.py",
                "    max_load: float | None = None",
                "    max_traffic_bps: float | None = None\n",
            ),
            Insertion(
                "swarmnode/train/node/limits.py", '    return LimitVerdict(False, None, "on battery")', LIMIT_CHECK
            ),
            Insertion("swarmnode/train/node/limits.py", "    _battery,", "    _traffic,\n"),
            Insertion("swarmnode/train/node/limits.py", "LIMIT_KINDS: Mapping[str, LimitKind] = {", LIMIT_ROW),
            Insertion(
                "docs/volunteer.md", "| `--on-ac-only` |", "| `--max-traffic 50Mbit` | pauses while it moves more |\n"
            ),
        ),
        files={"tests/node/test_traffic_limit.py": LIMIT_TEST},
        commands=(
            (*PYTEST, "tests/node/test_traffic_limit.py", "tests/node/test_limits.py"),
            (*PYTEST, "tests/docs/test_accepted.py", "-k", "volunteer"),
            (*PYTEST, "tests/cli/test_command.py", "tests/cli/test_config_file.py", "-k", "help or limit or source"),
            TIDY,
        ),
    ),
    "panel": Recipe(
        insertions=(
            Insertion("swarmnode/base/metrics/name.py", "# The node.", METRIC),
            Insertion(
                "swarmnode/train/node/regulator.py",
                "from swarmnode.base.errors import",
                "from swarmnode.base.metrics import name\n",
            ),
            Insertion(
                "swarmnode/train/node/regulator.py",
                '            self.telemetry.event("limits.verdict"',
                "            self.telemetry.count(name.VERDICTS)\n",
            ),
            Insertion("deploy/grafana/board.py", 'Panel("Resident memory"', PANEL),
        ),
        commands=(
            ("docs/generate.py",),
            ("deploy/grafana/board.py",),
            (*PYTEST, "tests/metrics/test_name.py", "tests/metrics/test_operations.py", "-k", "not promtool"),
            (*PYTEST, "tests/tidy/test_tools.py", "-k", "generated"),
        ),
    ),
}


def copy_tree(folder: Path) -> None:
    """The files of this checkout that git knows, or would."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def insert(folder: Path, insertion: Insertion) -> None:
    """Add the lines. Raises AssertionError if the tree has no such place any more."""
    path = folder / insertion.path
    lines = path.read_text().splitlines(keepends=True)
    place = next((number for number, line in enumerate(lines, 1) if insertion.after in line), None)
    assert place is not None, f"{insertion.path} has no line with {insertion.after!r}: mend the recipe and its page"
    lines.insert(place, insertion.lines)
    path.write_text("".join(lines))


def install(folder: Path, recipe: Recipe) -> list[str]:
    """Leave what pip would leave of the recipe's package; returns the folders where its modules are."""
    if not recipe.package:
        return []
    info = folder / "site" / "recipe-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: recipe\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(recipe.entry_points)
    return [str(folder / "site"), str(folder / recipe.package)]


def carry_out(name: str, folder: Path) -> str:
    """Follow a recipe on a copy of the tree in `folder`. Returns the output of the command that failed, or ""."""
    recipe = RECIPES[name]
    copy_tree(folder)
    for insertion in recipe.insertions:
        insert(folder, insertion)
    for path, text in recipe.files.items():
        assert not (folder / path).exists(), f"{path} is there already: mend the recipe"
        (folder / path).write_text(text)
    paths = [*install(folder, recipe), str(folder)]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "SWARMNODE_NIGHTLY": "1"}
    for command in (RUFF, FORMAT, *recipe.commands):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=folder,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=BOUND_S,
            check=False,
        )
        if done.returncode:
            return f"{' '.join(command)}\n{done.stdout}"
    return ""


def main(names: Sequence[str]) -> int:
    unknown = set(names) - set(RECIPES)
    if unknown:
        print(f"usage: python -m tests.recipes [{'|'.join(RECIPES)}]...", file=sys.stderr)
        return 2
    code = 0
    for name in names or RECIPES:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="recipe-") as folder:
            output = carry_out(name, Path(folder))
        print(f"{name}: {'fails' if output else 'green'}, {time.monotonic() - begun:.0f} s\n{output}", flush=True)
        code = code or int(bool(output))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Counts the calls of our own functions that a microbatch takes at one node, without its network.

`python -m tests.support.calls [MICROBATCHES]` prints them, by module and function.
"""

import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from swarmnode.base.work import SampleCount
from swarmnode.run.manifest import LimitsSpec, Manifest
from tests.support.village import VillageLoop, manifest, village

ROOT = Path(__file__).parents[2]
OURS = tuple(f"{ROOT / package}/" for package in ("swarmnode", "swarmnode_methods"))
NETWORK = f"{ROOT / 'swarmnode/net/transport'}/"  # memory stands in for it, so little of it is called
STAGES = 3
MICROBATCHES = 512  # so that what happens once a round or once a second is below USUAL
USUAL = 0.8  # calls a microbatch at each node: of what happens in every one at every stage, at least


@dataclass(frozen=True)
class Calls:
    """Calls of a function for a microbatch at one node, the mean of all stages, by module and name. A resumed coroutine
    or generator counts again."""

    of: dict[tuple[str, str], float]

    @property
    def total(self) -> float:
        return sum(self.of.values())

    @property
    def modules(self) -> dict[str, float]:
        """Calls into each module, the most first."""
        sums = Counter[str]()
        for (module, _), count in self.of.items():
            sums[module] += count  # type: ignore[assignment]
        return dict(sums.most_common())

    def table(self) -> str:
        lines = [
            f"{len(self.modules)} modules, {len(self.of)} functions, {self.total:.0f} calls a microbatch at a node"
        ]
        for module, count in self.modules.items():
            lines.append(f"{count:7.1f}  {module}")
            here = sorted(((n, name) for (where, name), n in self.of.items() if where == module), reverse=True)
            lines += [f"          {n:5.1f}  {name}" for n, name in here]
        return "\n".join(lines)


class Counting:
    """Counts calls in this thread while it is the context."""

    def __init__(self) -> None:
        self.seen = Counter[CodeType]()

    def __enter__(self) -> "Counting":
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            self.seen[frame.f_code] += 1

    def each(self, served: int) -> Calls:
        """The calls for each of so many microbatches `served` by a node, of functions that are called for every one."""
        of = dict[tuple[str, str], float]()
        for code, count in self.seen.items():
            path = code.co_filename
            if path.startswith(OURS) and not path.startswith(NETWORK) and count >= USUAL * served:
                of[str(Path(path).relative_to(ROOT)), f"{code.co_qualname}:{code.co_firstlineno}"] = count / served
        return Calls(of)


def quiet() -> Manifest:
    """A run in which nothing but microbatches happens often: records and looks at their usual periods, few
    steps, no round."""
    run = manifest(stages=STAGES, round_samples=1 << 20)
    pipeline = replace(run.pipeline, validation_every_samples=1 << 20)
    inner = replace(run.inner, inner_batch=512)
    return replace(run, pipeline=pipeline, inner=inner, limits=LimitsSpec())


async def calls_of_a_microbatch(microbatches: int = MICROBATCHES) -> Calls:
    """The calls that a microbatch takes at a node, in a village of a node a stage."""
    async with village(quiet(), stages=range(STAGES)) as v:
        await v.fed(SampleCount(128))
        feeder = v.people[0].served.parts.feeder
        assert feeder is not None
        before = feeder.done
        with Counting() as counting:
            await v.until(lambda: feeder.done >= before + microbatches, "microbatches", timeout_s=600.0)
            done = feeder.done - before
        return counting.each(done * STAGES)


if __name__ == "__main__":
    print(VillageLoop().run(calls_of_a_microbatch(*map(int, sys.argv[1:]))).table())

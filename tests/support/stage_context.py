"""A StageContext for tests, with the parts that they need."""

from typing import Any

from swarmnode.base.ids import RunId
from swarmnode.net.membership.swarm import StageContext, Swarm
from swarmnode.run.manifest import Manifest


def stage_context(manifest: Manifest, stage: int, run_id: str, **parts: Any) -> StageContext:
    """The context of a replica of `stage` with `parts`; an empty swarm that has trained nothing, and nothing else."""
    nobody = Swarm.of([], manifest.pipeline.stages)
    known: dict[str, Any] = dict.fromkeys(("replica", "transport", "compute", "identity", "telemetry"))
    known |= {"swarm": lambda: nobody, "samples_total": lambda: 0}
    return StageContext(manifest, RunId(run_id), stage, **known | parts)

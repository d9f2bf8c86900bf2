"""A replica that lies in a swarm of real processes is excluded by those that send to it, and nobody else is."""

from benchmarks.swarm.pipeline_attack import PipelineLife, live
from swarmnode.daemon.clock import SystemClock


def test_a_liar_in_a_swarm_of_processes_is_excluded_and_nobody_else() -> None:
    life = PipelineLife("flip", number=1, replicas=2, stage=1, samples=2000, every=1, seed=0)
    row = live(life, SystemClock(), print)
    (liar,) = row["liars"]
    assert liar["out of"] >= 1, row
    assert row["honest excluded"] == 0, row

"""An outer step in parts: of the slow weights in main memory, beside the device, and of the fast ones on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from swarmnode.gossip.outer import NoLoCo
from swarmnode.model.stage import StageReplica
from swarmnode.parted_work import Parts, run_whole
from swarmnode.ports import OuterReport


def slow_and_fast(
    stage: StageReplica,
    outer: NoLoCo,
    slow_step: Callable[[], OuterReport],
    again_beside: Callable[[Callable[[], Any]], Parts[Any]],
    *,
    lone: bool,
) -> Parts[OuterReport]:
    """The parts of `slow_step`, which is `outer.apply_slow`, and of what follows on the device of `stage`.

    `again_beside` does its argument beside the device, once more where memory ran out. `lone`: as in `apply`."""

    def slow() -> OuterReport:
        report = slow_step()
        if lone or report.believed:
            stage.hold(outer.phi)
        return report

    report: OuterReport = yield from again_beside(slow)
    if lone or report.believed:
        stage.stash.before_step(inner=False)
        run_whole(again_beside(outer.follow))
        run_whole(again_beside(lambda: stage.hold(outer.theta)))
    return report

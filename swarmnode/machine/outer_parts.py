"""An outer step in parts: of the slow weights in main memory, beside the device, and of the fast ones on it."""

from __future__ import annotations

from collections.abc import Callable

from swarmnode.gossip.outer import NoLoCo
from swarmnode.model.stage import StageReplica
from swarmnode.parted_work import Parts
from swarmnode.ports import OuterReport


def slow_and_fast(
    stage: StageReplica,
    outer: NoLoCo,
    slow_step: Callable[[], OuterReport],
    again: Callable[[Callable[[], None]], None],
    *,
    lone: bool,
) -> Parts[OuterReport]:
    """The parts of `slow_step`, which is `outer.apply_slow`, and of what follows on the device of `stage`.

    `again` calls its argument once more where memory ran out. `lone`: as in `apply`."""

    def slow() -> OuterReport:
        report = slow_step()
        if lone or report.believed:
            stage.hold(outer.phi)
        return report

    report: OuterReport = yield slow
    if lone or report.believed:
        stage.stash.before_step(inner=False)
        again(outer.follow)
        again(lambda: stage.hold(outer.theta))
    return report

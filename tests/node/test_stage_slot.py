"""What a node says of its validation once the work that made it has ended."""

from __future__ import annotations

from tests.support.village import manifest, village


async def test_the_last_validation_outlives_the_stage() -> None:
    async with village(manifest(stages=2)) as v:
        feeder = v.add(0)
        v.add(1)
        await v.until(lambda: (feeder.node.stage_status().loss_validation_samples) > 0, "it validates")
        before = feeder.node.stage_status()
        await v.leave()
        after = feeder.node.stage_status()
        assert feeder.node.served is None and after.loss_train is None
        assert after.loss_validation_first == before.loss_validation_first
        assert after.loss_validation is not None and after.loss_validation_samples >= before.loss_validation_samples

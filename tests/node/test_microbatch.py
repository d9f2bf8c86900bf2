"""Whole nodes choose how their share of the batch travels: what is learned stays the sum over the share."""

import math
from collections import Counter

from swarmnode.pipeline.microbatch_size import PUT_OFF
from swarmnode.ports import WireTensor
from tests.support.village import Recording, manifest, village

SHARE = 4  # inner batches of eight, two replicas a stage
SAMPLE_S = 0.05  # far above a piece of work without samples: as of a large model, of which one keeps a device busy


class Sized(Recording):
    """Counts the gradients of each size, and samples between two inner steps."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.travelled: Counter[int] = Counter()
        self.stepped: list[int] = []

    def backward(self, tape: object, gradient: WireTensor, samples: int, **options: bool) -> WireTensor | None:
        self.travelled[samples] += options.get("accumulate", True)  # checks of others' work are not added
        return super().backward(tape, gradient, samples, **options)  # type: ignore[arg-type]

    def step(self, samples_total: int, batch: float = math.inf, averaged: int = 1) -> object:  # type: ignore[override]
        self.stepped.append(self.accumulated)
        return super().step(samples_total, batch)


async def test_six_nodes_with_devices_of_their_own_let_shares_travel_in_pieces() -> None:
    async with village(manifest()) as v:
        v.sample_s = SAMPLE_S
        for index in range(6):
            v.add(index % 3, Sized)
        # Choices made before all are there are for other shares.
        await v.until(lambda: all(sum(p.node.presence.peer_table.swarm().sizes) == 6 for p in v.people), "all know all")
        await v.trains(256, "256 samples")
        await v.leave()
        fed = v.total()
        for stage in (0, 1):
            replicas = [p.replica for p in v.people if p.node.stage == stage]
            travelled: Counter[int] = Counter()
            for replica in replicas:
                assert isinstance(replica, Sized)
                travelled += replica.travelled
                largest = max(SHARE + max(replica.travelled) - 1, int(PUT_OFF * 2 * SHARE))
                assert all(SHARE <= samples <= largest for samples in replica.stepped[4:]), replica.stepped
            assert sum(size * count for size, count in travelled.items()) == fed, "each gradient once"
            assert travelled[1] + travelled[2] > travelled[4], travelled
        said = [fields for p in v.people for event, fields in p.quiet.events if event == "feeder.window"]
        assert any(int(str(fields["microbatch"])) < SHARE for fields in said)
        assert all("samples/s predicted by size" in str(fields["reason"]) for fields in said)

"""Whole nodes that meet with each codec: real coroutines and replicas, transport in memory (support/village.py)."""

import math

import pytest
import torch

from benchmarks.memory_network import MemoryTransport
from swarmnode.base.errors import Unavailable
from swarmnode.base.ids import PeerId
from swarmnode.base.ports import Answer, Call
from swarmnode.base.wire import record_pb2
from tests.support.village import Villager, losses, manifest, told, village, with_recovery

pytestmark = [pytest.mark.node, pytest.mark.loop("village")]


async def test_a_swarm_trains_by_fragments() -> None:
    """A joiner comes while rounds go on: it receives one of each fragment before it gives."""
    ways = {"fragments": 3, "method": "average", "round_samples": 32, "acceptance": "clipped"}

    async with village(manifest(stages=2, **ways)) as v:  # type: ignore[arg-type]
        for index in range(4):
            v.add(index % 2)

        def met() -> int:
            return sum(event == "exchange.paired" for p in v.people for event, _ in p.quiet.events)

        await v.until(lambda: met() >= 12, "12 outer steps in pairs")
        joiner = v.add(1)
        await v.until(lambda: joiner.node.state == record_pb2.NODE_STATE_TRAINING, "the joiner works")
        await v.until(lambda: v.total() >= 640, "640 samples")
        await v.leave()
        assert losses(v)[-1] < math.log(v.run.model.vocabulary) - 0.5, "below a guess at random"
        refused = [f for p in v.people for e, f in p.quiet.events if e == "exchange.refused"]
        assert not refused, refused
        told = [fields for event, fields in joiner.quiet.events if event == "receipt.got"]
        received = {int(str(fields["round"])) for fields in told if fields["step"] == "newcomer"}
        trained = dict[int, int]()  # by round of the joiner: samples, of this round and the two before
        rounds = [f for e, f in joiner.quiet.events if e in ("exchange.paired", "exchange.lone")]
        for before, fields in enumerate(rounds):
            last = [int(str(one["samples"])) for one in rounds[max(0, before - 2) : before + 1]]
            trained[int(str(fields["round"]))] = sum(last)
        worked = {number for number in received if trained.get(number)}
        assert len(worked) == len({number % 3 for number in worked}), "a second round of a fragment at weight 0"


@pytest.mark.parametrize(
    ("method", "codec"), [("partial_average", "topk"), ("sparseloco", "topk64"), ("diloco", "e3m0"), ("desloc", "int8")]
)
async def test_a_whole_stage_meets_with(method: str, codec: str) -> None:
    """Packets of pseudo-gradients, and moments; a joiner comes while rounds go on, and nobody drifts away."""
    # DiLoCo's own momentum of 0.9 is for rounds of hundreds of steps: with these few the tiny model diverges.
    own = {"alpha": 0.5, "beta": 0.7} if method == "diloco" else {}
    ways = {"method": method, "codec": codec, "group": 0, "round_samples": 64, **own}

    async with village(manifest(stages=2, **ways)) as v:  # type: ignore[arg-type]
        for index in range(4):
            v.add(index % 2)

        def met(how: str) -> int:
            return sum(event == how for p in v.people for event, _ in p.quiet.events)

        await v.until(lambda: met("exchange.paired") >= 8, "8 outer steps with others")
        joiner = v.add(1)
        await v.until(lambda: met("exchange.group") >= 6, "6 outer steps of three")

        def together() -> bool:
            """Whoever joined late, or stepped alone when it believed it was, is back."""
            rounds = [
                [fields for event, fields in p.quiet.events if event == "exchange.paired"]
                for p in v.people
                if any(event == "exchange.group" for event, _ in p.quiet.events)
            ]
            if len(rounds) < 3 or method == "desloc":
                return len(rounds) == 3
            learned = max(float(str(fields["delta_norm"])) for mine in rounds for fields in mine)
            apart = [[fields["apart"] for fields in mine if fields["apart"] is not None] for mine in rounds]
            return all(mine and float(str(mine[-1])) < 0.5 * learned for mine in apart)

        await v.until(lambda: v.total() >= 1024 and together(), "1024 samples, and slow weights that agree")
        await v.leave()
        assert joiner.replica is not None
        assert losses(v)[-1] < math.log(v.run.model.vocabulary) - 0.5, "below a guess at random"
        refused = [f for p in v.people for e, f in p.quiet.events if e == "exchange.refused"]
        assert not [f for f in refused if f["step"] != "loss"], refused


@pytest.mark.parametrize(("method", "coding"), [("sparseloco", "topk64"), ("eager", "int8")])
async def test_a_newcomer_that_misses_its_first_round_takes_the_state_again(
    method: str, coding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packets of pseudo-gradients do not bring the outer step that it missed: its weights would stay apart, and others
    would take its answers for lies."""
    joiners = list[Villager]()
    real = MemoryTransport.call

    async def call(
        self: MemoryTransport, peer: PeerId, call: Call, *, timeout_s: float, reply_bytes_max: int
    ) -> Answer:
        for joiner in joiners:
            missed = told(joiner, "exchange.lone")
            if call.header.HasField("exchange") and joiner.node.me in (self.peer_id, peer) and not missed:
                raise Unavailable("the line is cut")
        return await real(self, peer, call, timeout_s=timeout_s, reply_bytes_max=reply_bytes_max)

    monkeypatch.setattr(MemoryTransport, "call", call)
    ways = {"method": method, "codec": coding, "group": 0, "round_samples": 512}
    async with village(manifest(stages=2, **ways)) as v:  # type: ignore[arg-type]
        for stage in (0, 1, 1):
            v.add(stage)
        await v.until(lambda: all(told(p, "exchange.paired") for p in v.people[1:]), "both replicas met")
        joiners.append(joiner := v.add(1))

        def loads_and_meetings() -> list[tuple[str, dict[str, object]]]:
            """Without the states that it keeps for the other stage."""
            said = (e for e in joiner.quiet.events if e[0] in ("state.downloaded", "exchange.paired"))
            return [(event, fields) for event, fields in said if fields.get("stage", 1) == 1]

        def met_after_a_later_load() -> bool:
            lone = told(joiner, "exchange.lone")
            *before, (last, _) = loads_and_meetings() or [("nothing", {})]
            loaded = [int(str(fields["round"])) for event, fields in before if event == "state.downloaded"]
            return last == "exchange.paired" and bool(lone) and max(loaded) >= int(str(lone[0]["round"]))

        await v.until(met_after_a_later_load, "the newcomer meets others with a later state")
        await v.leave()
    missed = int(str(told(joiner, "exchange.lone")[0]["round"]))
    events = loads_and_meetings()
    loaded = [at for at, (event, _) in enumerate(events) if event == "state.downloaded"]
    rounds = [int(str(events[at][1]["round"])) for at in loaded]  # of round 0 it takes the rest afterwards
    assert rounds[0] < missed <= rounds[-1]
    event, fields = events[loaded[-1] + 1]
    assert event == "exchange.paired"
    assert float(str(fields["apart"])) < 1e-3, "it has the others' slow weights"


async def test_a_newcomer_whose_first_packet_is_clipped_takes_the_state_again() -> None:
    """The slow weights that it began from are far from the fast ones: the replica was restored, and has had no round
    since. Clipped, its packet leaves the newcomer there, which would serve and show the loss of weights long gone."""
    run = with_recovery(manifest(stages=2, method="average", round_samples=256), keepers=0)
    async with village(run) as v:
        old = v.add(0)
        _ = v.add(1)
        await v.heard(272)
        assert old.served.gossip.done == 1 and old.replica is not None
        phi = old.replica.outer.phi
        phi.add_(torch.randn(phi.shape, generator=torch.Generator().manual_seed(1)) * phi.square().mean().sqrt())
        joiner = v.add(0)
        await v.until(lambda: joiner.node.state == record_pb2.NODE_STATE_TRAINING, "the joiner serves")
        assert joiner.replica is not None and told(joiner, "exchange.clipped"), "not far enough for this test"
        assert len(told(joiner, "exchange.paired")) == 1, "it has that round with the state, and waits for no other"
        apart = (joiner.replica.outer.theta - old.replica.outer.theta).norm() / old.replica.outer.theta.norm()
        assert float(apart) < 0.1, f"{apart:.2g} of its length from the other's weights"


async def test_a_newcomer_whose_state_is_a_round_old_receives_one_before_it_serves() -> None:
    """The round that ended while it downloaded is over for all others: a step alone in that one brings it nothing."""
    async with village(manifest(stages=2, method="average", round_samples=64)) as v:
        v.add(0)
        v.add(1)
        await v.heard(400)
        joiner = v.add(0)
        await v.until(lambda: joiner.node.state == record_pb2.NODE_STATE_TRAINING, "the joiner serves")
        assert joiner.node.presence.progress.total // 64 > int(str(told(joiner, "state.downloaded")[0]["round"]))
        assert told(joiner, "exchange.paired") and not told(joiner, "exchange.lone")

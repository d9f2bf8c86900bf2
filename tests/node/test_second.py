"""A state is taken on more than one word: what strangers offer, hand over or promise costs a joiner little."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from swarmnode.base.errors import Busy, RemoteFault, SwarmnodeError
from swarmnode.base.ids import PeerId
from swarmnode.base.ports import Answer, Call
from swarmnode.base.wire import call_pb2, record_pb2
from swarmnode.keep.transfer.donor import SnapshotDonor
from swarmnode.keep.transfer.snapshot import newcomer_part
from swarmnode.keep.transfer.state_slices import APART_MAX, apart
from swarmnode.model.section import section_sizes, snapshot_nbytes
from swarmnode.model.split import stages_of
from tests.support.false_donor import SOON, giving
from tests.support.stranger import Stranger
from tests.support.village import RUN, Villager, lose, manifest, told, village, with_recovery

FUTURE = 2**40


def noise(phi: np.ndarray) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(len(phi)) * float(np.std(phi))


def same(phi: np.ndarray) -> np.ndarray:
    return phi


def far(joiner: Villager, honest: Villager) -> float:
    assert joiner.replica is not None and honest.replica is not None
    one, other = (person.replica.snapshot(packed=True).sections["phi"] for person in (joiner, honest))  # type: ignore[union-attr]
    return apart(one, other)


@pytest.mark.parametrize(
    ("spoil", "at"),
    [
        (same, FUTURE),
        pytest.param(noise, 0, marks=pytest.mark.nightly),
        pytest.param(noise, SOON, marks=pytest.mark.nightly),
    ],
    ids=["of the future", "noise", "noise some rounds ahead"],
)
async def test_a_donor_that_announces_the_highest_speed_and_lies_misleads_no_joiner(
    spoil: Callable[[np.ndarray], np.ndarray], at: int
) -> None:
    """Whoever is drawn first: two strangers, and as many honest replicas of the stage."""
    run = manifest()

    async with village(run, stages=(0, 1, 2, 2)) as v:
        await v.heard(256)
        stranger = Stranger(v, 1)
        giving(v, stranger, run, 2, spoil, at)
        await stranger.say(v, stage=2, samples_per_second=1e8, round=max(0, at))
        late = [v.add(2), v.add(2)]
        for joiner in late:
            await v.until(lambda joiner=joiner: bool(told(joiner, "exchange.paired")), "it meets somebody")  # type: ignore[misc]
            assert joiner.node.samples_total() < 8 * v.total()
            assert stranger.me not in {f["peer"] for f in told(joiner, "state.downloaded")}


def noise_of_a_third(phi: np.ndarray) -> np.ndarray:
    return phi + 0.35 * noise(phi)


async def test_a_donor_whose_noise_is_within_what_honest_replicas_may_differ_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two honest replicas, which are much nearer to each other, contradict it; they are busy until then."""
    run = manifest()
    offer = SnapshotDonor.offer
    refused = False

    async def busy(donor: SnapshotDonor, peer: PeerId, call: Call) -> Answer:
        whole = not call.header.snapshot.count  # not some slices of a check
        if donor is not false and whole and not refused:
            raise Busy("others download here", 1.0)
        return await offer(donor, peer, call)

    async with village(run, stages=(0, 1, 2, 2)) as v:
        await v.heard(256)
        stranger = Stranger(v, 1)
        monkeypatch.setattr(SnapshotDonor, "offer", busy)
        false = giving(v, stranger, run, 2, noise_of_a_third, 0)
        await stranger.say(v, stage=2, samples_per_second=1e8)
        joiner = v.add(2)
        liars = lambda: {f["peer"] for f in told(joiner, "state.failed") if f["lied"]}  # noqa: E731
        await v.until(lambda: bool(liars()), "a donor is refused")
        refused = True
        await v.until(lambda: bool(told(joiner, "node.ready")), "it serves")
        assert liars() == {stranger.me} and far(joiner, v.people[2]) < APART_MAX


async def test_a_third_that_says_little_makes_no_joiner_refuse_honest_donors() -> None:
    """Two keys said one sample: the joiner took all honest donors for liars, and the state of the keys."""
    run = manifest(round_samples=8)

    async with village(run, stages=(0, 1, 2, 2)) as v:
        # Beyond what a joiner believes in any case: four rounds, and what machines do between two looks.
        await v.fed(768)
        strangers = [Stranger(v, number) for number in range(2)]
        giving(v, strangers[0], run, 2, noise, 1)
        for number, stranger in enumerate(strangers):
            said = record_pb2.Progress(total=1)
            await stranger.say(v, stage=2 - number, samples_per_second=1.0, round=1, progress=said)
        joiner = v.add(2)
        await v.until(lambda: bool(told(joiner, "node.ready")), "it serves")
        assert [f["method"] for f in told(joiner, "recovery.done")] == ["replica"]
        liars = {f["peer"] for f in told(joiner, "state.failed") if f["lied"]}
        assert liars <= {strangers[0].me}, "no honest donor was taken for a liar"
        assert far(joiner, v.people[2]) < APART_MAX


async def test_a_donor_that_gives_other_fast_weights_and_moments_changes_nothing() -> None:
    """It is the only one that answers: the newcomer takes its slow weights, which others confirm."""
    run = manifest()
    async with village(run, stages=(0, 1, 2)) as v:
        await v.heard(256)
        stranger = Stranger(v, 1)
        giving(v, stranger, run, 2, same, 0)
        await stranger.say(v, stage=2, samples_per_second=1e8, round=0)
        joiners = [v.add(2) for _ in range(4)]
        for joiner in joiners:
            await v.until(lambda joiner=joiner: bool(told(joiner, "node.ready")), "it serves")  # type: ignore[misc]
        given = [f for joiner in joiners for f in told(joiner, "recovery.done")]
        sizes = section_sizes(run, stages_of(run)[2])
        outer = snapshot_nbytes(newcomer_part(run.gossip, sizes).sizes(sizes))
        assert {f["nbytes"] for f in given if f["method"] == "replica"} == {outer}
        assert all(far(joiner, v.people[2]) < APART_MAX for joiner in joiners)


@pytest.mark.parametrize("record", [False, True], ids=["a bare key", "a key with a record"])
async def test_a_node_without_a_stage_hands_nothing_over(record: bool) -> None:
    run = with_recovery(manifest())

    async with village(run, stages=(0, 1, 2)) as v:
        await v.heard(256)
        stranger = Stranger(v, 1)
        backup = v.people[0]
        giving(v, stranger, run, 1, noise, FUTURE)
        if record:
            await stranger.say(v, stage=1)
        request = call_pb2.Request(run_id=RUN, handover=call_pb2.Handover(stage=1))
        with pytest.raises((RemoteFault, SwarmnodeError)):
            await stranger.transport.call(backup.node.me, Call(request), timeout_s=60.0, reply_bytes_max=0)
        kept = backup.served.backup.snapshot
        assert kept is None or kept.round_index <= v.total() // run.gossip.round_samples


async def test_an_endless_restore_claim_delays_no_other_node() -> None:
    run = with_recovery(manifest())
    run = replace(run, limits=replace(run.limits, announce_period_s=0.2))

    async with village(run, stages=(0, 1, 2, 0, 1, 2)) as v:
        await v.heard(256)
        strangers = [Stranger(v, number) for number in range(3)]
        await lose(v, 1)
        states = (record_pb2.NODE_STATE_SYNCING, record_pb2.NODE_STATE_JOINING, record_pb2.NODE_STATE_JOINING)
        for number, (stranger, state) in enumerate(zip(strangers, states, strict=True)):
            await stranger.say(v, stage=1, state=state, joined_unix_ms=1 + number)
        joiner = v.add(1)
        training = record_pb2.NODE_STATE_TRAINING
        await v.until(lambda: joiner.node.state == training, "the stage is served again")
        assert any("brings stage 2 back" in str(f["reason"]) for f in told(joiner, "recovery.waiting"))
        await v.trains(128, "training goes on")

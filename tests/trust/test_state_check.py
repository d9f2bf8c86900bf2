"""Words of others on a state: near ones confirm it, two far ones that agree refuse it, one alone is only told."""

import asyncio

import numpy as np
import pytest

from swarmnode.base.errors import RemoteFault, Unavailable
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.ports import State
from swarmnode.base.wire import call_pb2
from swarmnode.keep.recovery.state_check import StateCheck, StateSample
from swarmnode.keep.transfer.download import DonorClient
from swarmnode.keep.transfer.state_slices import ALIGN, APART_MAX, ELEMENTS, apart, cuts, drawn_now, slices_of
from swarmnode.net.membership.liveness import TRIES
from tests.support.fake_telemetry import Quiet

RUN = RunId("ab" * 32)
COUNT = 50_000
TRUE = np.random.default_rng(1).standard_normal(COUNT).astype("<f4")
FALSE = np.random.default_rng(2).standard_normal(COUNT).astype("<f4")


def near(seed: int) -> np.ndarray:
    return (TRUE + 0.05 * np.random.default_rng(seed).standard_normal(COUNT)).astype("<f4")


class Asked(StateCheck):
    """Others answer from memory: `said` by peer, None: it cannot be reached. Whole nodes do it in tests/node."""

    said: dict[str, np.ndarray | None]
    asked: list[str]
    momentum: dict[str, float]

    async def _ask(self, peer: PeerId, at: object) -> StateSample:
        self.asked.append(peer)
        if (phi := self.said[peer]) is None:
            raise Unavailable("away")
        round_index = 90 if peer.startswith("old") else 3
        slices = slices_of(phi.data.cast("B"), at)  # type: ignore[arg-type]
        momentum = self.momentum.get(peer)
        return StateSample(peer, slices, round_index, 300, momentum)


def compared(
    state: np.ndarray,
    *,
    momentum: np.ndarray | None = None,
    said_momentum: float | None = None,
    **said: np.ndarray | None,
) -> tuple[list[StateSample], list[str], Quiet]:
    """What `said` make of `state` of round 4; names that begin with "kept" are those of keepers of snapshots."""
    quiet = Quiet()

    class Transport:
        peer_id = PeerId("me")

    keepers = [PeerId(name) for name in said if "kept" in name]
    serving = [PeerId(name) for name in said if "kept" not in name]
    client = DonorClient(Transport(), RUN, 1, {"phi": COUNT}, quiet, lambda: 9.0)  # type: ignore[arg-type]
    second = Asked(client, lambda: serving, apart, keepers=lambda: keepers)
    second.said = said
    second.asked = []
    second.momentum = {} if said_momentum is None else dict.fromkeys(said, said_momentum)
    sections = {"phi": memoryview(state.tobytes())}
    if momentum is not None:
        sections["momentum"] = memoryview((momentum.view("<u4") >> 16).astype("<u2").tobytes())
    found = asyncio.run(
        second.compare(State(sections, 1, 0.0, packed=True), call_pb2.Snapshot(id=b"x", round=4), {PeerId("giver")})
    )
    return found, second.asked, quiet


def test_a_near_replica_confirms() -> None:
    words, asked, quiet = compared(TRUE, b=near(3), c=near(4))
    assert [(word.peer, word.total) for word in words] == [("b", 300)] and asked == ["b"] and not quiet.events


def test_two_who_agree_with_one_another_refuse() -> None:
    with pytest.raises(RemoteFault, match="of their length from those of b and c, who agree"):
        compared(FALSE, b=near(3), c=near(4))


def noised(share: float, seed: int = 7) -> np.ndarray:
    noise = np.random.default_rng(seed).standard_normal(COUNT)
    return (TRUE + share * np.linalg.norm(TRUE) * noise / np.linalg.norm(noise)).astype("<f4")


@pytest.mark.parametrize("share", [0.15, 0.35, 0.4])
def test_noise_hides_among_replicas_that_differ_and_not_beside_two_that_agree(share: float) -> None:
    with pytest.raises(RemoteFault, match="slow weights .* of their length from those of b and c, who agree"):
        compared(noised(share), b=noised(0.01, 3), c=noised(0.01, 4))
    words, asked, quiet = compared(noised(share), b=noised(share, 3), c=noised(share, 4))
    assert [word.peer for word in words] == ["b"] and asked == ["b", "c"] and not quiet.events, "all differ"
    assert len(compared(noised(share), b=noised(0.01, 3))[0]) == 1, "of two nobody knows which one it is"
    assert len(compared(noised(share), old1=noised(0.01, 3), old2=noised(0.01, 4))[0]) == 1, "of another time"
    assert [word.peer for word in compared(noised(share), liar1=FALSE, liar2=FALSE, c=TRUE)[0]] == ["c"]


def test_a_third_replica_decides_between_two_that_contradict_each_other() -> None:
    words, _, _ = compared(TRUE, liar=FALSE, c=near(4))
    assert [word.peer for word in words] == ["c"], "the liar that was asked is in nobody's way"
    with pytest.raises(RemoteFault, match="b and c"):
        compared(FALSE, other=np.random.default_rng(9).standard_normal(COUNT).astype("<f4"), b=near(3), c=near(4))


def test_a_lone_replica_cannot_refuse_and_says_so() -> None:
    words, asked, quiet = compared(TRUE, liar=FALSE)
    assert words == [] and asked == ["liar"]
    assert [event for event, _ in quiet.events] == ["state.doubted"] and "liar" in str(quiet.events[0][1]["reason"])


def test_snapshots_of_other_rounds_confirm_and_contradict_nothing() -> None:
    assert compared(TRUE, oldkept1=FALSE, oldkept2=FALSE)[:2] == ([], ["oldkept1", "oldkept2"])
    assert [word.peer for word in compared(TRUE, oldkept1=FALSE, oldkept2=near(3))[0]] == ["oldkept2"]


def test_a_round_of_its_own_helps_no_donor_against_replicas_that_serve() -> None:
    """A planted state of five rounds ahead of six honest replicas was accepted."""
    with pytest.raises(RemoteFault, match="those of old1 and old2, who agree"):
        compared(FALSE, old1=near(3), old2=near(4))


def test_an_outer_momentum_is_not_much_longer_than_others() -> None:
    own = np.ones(COUNT, "<f4")
    length = float(np.sqrt(min(ELEMENTS, COUNT) * 4))
    for factor in (0.1, 1.0, 10.0, 100.0):
        assert len(compared(TRUE, momentum=own, said_momentum=factor * length, b=near(3))[0]) == 1
    assert len(compared(TRUE, momentum=own, said_momentum=0.0, b=near(3))[0]) == 1, "it came a moment ago"
    with pytest.raises(RemoteFault, match="an outer momentum .* long, not .*, from those of b and c"):
        compared(TRUE, momentum=own, said_momentum=0.05 * length, b=near(3), c=near(4))
    assert not compared(TRUE, momentum=np.full(COUNT, np.nan, "<f4"), said_momentum=length, b=near(3))[0]


def test_all_that_are_asked_are_heard_before_two_refuse() -> None:
    assert [word.peer for word in compared(TRUE, liar1=FALSE, liar2=FALSE, c=near(4))[0]] == ["c"]


@pytest.mark.parametrize(("first", "count"), [(0, 64), (100, 5000), (64, 10_000), (130, 20), (1, 1)])
def test_slices_of_a_part_are_within_it(first: int, count: int) -> None:
    section = np.arange(first, first + count, dtype="<f4")
    for number in range(20):
        for cut in cuts(count, number, first=first):
            assert cut.count is not None and first <= cut.first and cut.first + cut.count <= first + count
            assert cut.first % ALIGN == 0 or count < ALIGN
            given = np.frombuffer(slices_of(section.data.cast("B"), [cut], first), "<f4")
            assert given[0] == cut.first and len(given) == cut.count


def test_an_undecided_witness_is_asked_again_but_not_for_ever() -> None:
    words, asked, quiet = compared(TRUE, b=None)
    assert words == [] and asked == ["b"] * TRIES and [event for event, _ in quiet.events] == ["state.doubted"]
    assert compared(TRUE)[0] == [] and not compared(TRUE)[2].events, "nobody else is there"


def test_the_distance_is_one_of_lengths_and_infinite_where_a_number_is_none() -> None:
    one = TRUE.tobytes()
    assert apart(one, one) == 0.0 and apart(one, (-TRUE).tobytes()) == pytest.approx(2.0)
    assert apart(one, FALSE.tobytes()) > APART_MAX > apart(one, near(5).tobytes())
    assert apart(one, (TRUE * np.float32("nan")).tobytes()) == float("inf")
    assert apart(bytes(8), bytes(8)) == 0.0


async def test_slices_are_unpredictable() -> None:
    """A donor knows the joiner's name and chooses the state, so its id: the slices differ all the same."""
    first, second = (drawn_now(10**9, "me", "the state's id") for _ in range(2))
    assert first != second

"""Replicas that were never met are partners like others while they come; a flood of keys gets one round in four."""

from swarmnode.gossip.exchange import OPEN_EVERY, TRIES, Strangers
from swarmnode.gossip.pairing import partners
from swarmnode.ids import PeerId, RunId

RUN, ME, MATE = RunId("f" * 64), PeerId("me"), PeerId("mate")
KEYS = tuple(PeerId(f"key {number:03}") for number in range(100))


def test_strangers_meet_in_all_rounds_while_most_of_them_come() -> None:
    strangers = Strangers(RUN, 1, lambda peer: int(peer == MATE))
    assert strangers.come and not strangers.kept_out((ME, MATE, *KEYS), ME)
    for came in (False, True, True, False):
        strangers.record_try(came)
    assert strangers.come and not strangers.kept_out((ME, MATE, *KEYS), ME)


def test_beside_a_flood_of_keys_those_who_have_met_meet() -> None:
    """Of two replicas beside a hundred keys one in a hundred rounds was with each other."""
    met, rounds = 0, 2000
    strangers = Strangers(RUN, 1, lambda peer: int(peer == MATE))
    members = tuple(sorted((ME, MATE, *KEYS)))
    for round_index in range(rounds):
        out = strangers.kept_out(members, ME)
        here = members if strangers.is_open(round_index) else tuple(peer for peer in members if peer not in out)
        others, _ = partners(RUN, 1, round_index, here, ME)
        met += others == (MATE,)
        for other in others:
            if other != MATE:
                strangers.record_try(False)
    assert abs(met / rounds - (1 - 1 / OPEN_EVERY)) < 0.05


def test_a_replica_among_strangers_excludes_none() -> None:
    strangers = Strangers(RUN, 1, lambda peer: 0)
    for _ in range(TRIES):
        assert strangers.come, "a few that do not come are no flood"
        strangers.record_try(False)
    assert not strangers.come and not strangers.kept_out((ME, *KEYS), ME)


def test_all_replicas_name_the_same_open_rounds_of_each_stride() -> None:
    for stride in (1, 2, 8, 64):
        found = [
            Strangers(RUN, 0, lambda peer: 0).is_open(round_index) for round_index in range(0, 400 * stride, stride)
        ]
        assert 0.15 < sum(found) / len(found) < 0.35

"""Calls of the DHT: one peer cannot have more verified than its share, nor many keys more than all need."""

from __future__ import annotations

import pytest

from swarmnode.errors import Busy
from swarmnode.remembered import REMEMBERED_MAX
from swarmnode.transport.stranger_limit import ALL_BURST, ALL_PER_S, KEYS_BURST, KEYS_PER_S, DhtLimit


def test_a_peer_and_all_peers_together_have_their_rates() -> None:
    limit = DhtLimit()
    assert limit.take("one", int(KEYS_BURST), 0.0) and not limit.take("one", 1, 0.0)
    assert limit.take("other", 1, 0.0), "a flood of one peer costs others nothing"
    assert sum(limit.take("one", 1, 10.0) for _ in range(2 * int(10 * KEYS_PER_S))) == 10 * KEYS_PER_S
    keys = [limit.take(f"key {number}", 1, 10.0) for number in range(2 * int(ALL_BURST))]
    assert sum(keys) <= ALL_BURST + 10.0 * ALL_PER_S and not keys[-1]


def test_it_remembers_a_bounded_number_of_peers() -> None:
    limit = DhtLimit()
    for number in range(2 * REMEMBERED_MAX):
        limit.take(number, 0, 1e6 * number)
    assert len(limit._budget) == REMEMBERED_MAX


class Context:
    remote_id = "one"


class Store:
    keys = (b"key",) * int(KEYS_BURST)


async def test_beyond_it_the_handler_is_not_reached() -> None:
    served = []

    async def handler(request: Store, context: Context) -> str:
        served.append(request)
        return "stored"

    limited = DhtLimit().limited(handler)
    assert await limited(Store(), Context()) == "stored"
    with pytest.raises(Busy):
        await limited(Store(), Context())
    assert len(served) == 1

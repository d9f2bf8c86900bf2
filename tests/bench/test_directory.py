"""What the directory costs, and how soon a death is known: in virtual time, and with real DHT nodes."""

import pytest

from benchmarks.swarm import directory, live_directory

KBITS_MAX = 200.0  # of the busiest node
KNOWN_S_MAX = 10.0


@pytest.mark.parametrize("nodes", [12, pytest.param(96, marks=pytest.mark.nightly)])
def test_no_node_is_busy_with_records_and_callers_soon_know_of_a_death(nodes: int) -> None:
    row = directory.run(nodes)
    assert not row["failures"], row
    assert row["callers"] and not row["never"], row
    assert row["busiest_kbits"] <= KBITS_MAX and row["known_worst_s"] <= KNOWN_S_MAX, row


@pytest.mark.node
@pytest.mark.nightly
@pytest.mark.loop("uvloop")
@pytest.mark.timeout(900)
async def test_real_dht_nodes_know_of_a_death_and_send_little() -> None:
    row = await live_directory.run(24, 2, measured_s=30.0)
    assert row["callers"] and not row["never"], row
    assert row["busiest_kbits"] <= KBITS_MAX, row

import pytest

from benchmarks.micro.transport import TARGET_RATIO, run


@pytest.mark.live
@pytest.mark.nightly
def test_the_bench_measures_both_ways_of_sending() -> None:
    result = run(sizes_mib=(1, 2), seconds_per_size=0.2)
    assert result["target_ratio"] == TARGET_RATIO
    assert [row["mib"] for row in result["sizes"]] == [1, 2]
    for row in result["sizes"]:
        assert row["rounds"] >= 5
        assert row["ratio"] == pytest.approx(row["bare_s"] / row["ours_s"])

"""How `make test` deals test files to its parts, and reads what they left."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests import soak, suite

SECONDS = st.dictionaries(st.text("abc", min_size=1), st.floats(0.1, 100.0), max_size=30)


@given(SECONDS, st.integers(1, 8))
def test_each_file_is_in_one_part_and_no_part_could_give_one_away(seconds: dict[str, float], parts: int) -> None:
    files = [*seconds, "new"]
    lists = suite.dealt(files, seconds, parts)
    assert sorted(file for one in lists for file in one) == sorted(files)
    assert len(lists) <= parts
    totals = [sum(seconds.get(file, suite.UNKNOWN_S) for file in one) for one in lists]
    most = lists[totals.index(max(totals))]
    least = min(totals) if len(lists) == parts else 0.0
    shortest = min(seconds.get(file, suite.UNKNOWN_S) for file in most)
    assert max(totals) - shortest <= least + 1e-9


def test_results_name_seconds_by_file_and_count_errors_as_failures(tmp_path: Path) -> None:
    results = tmp_path / "part.xml"
    results.write_text(
        '<testsuites><testsuite tests="4" failures="1" errors="1" skipped="1">'
        '<testcase classname="tests.tidy.test_suite" name="a" time="1.5"/>'
        '<testcase classname="tests.tidy.test_suite.SomeClass" name="b" time="0.5"/>'
        "</testsuite></testsuites>"
    )
    assert suite.file_seconds(results) == {"tests/tidy/test_suite.py": 2.0}
    assert suite.counts(results) == (1, 2, 1)


def test_failures_have_names_by_which_pytest_runs_them_again(tmp_path: Path) -> None:
    results = tmp_path / "part.xml"
    results.write_text(
        '<testsuites><testsuite tests="3">'
        '<testcase classname="tests.tidy.test_suite.A" name="test_b[x - y.z]"><failure/></testcase>'
        '<testcase classname="tests.tidy.test_suite" name="test_c"/>'
        '<testcase classname="" name="tests.tidy.test_broken"><error/></testcase>'
        "</testsuite></testsuites>"
    )
    failed, passed, broken = suite.cases(results)
    assert failed.failed and failed.node_id == "tests/tidy/test_suite.py::A::test_b[x - y.z]"
    assert not passed.failed and passed.node_id == "tests/tidy/test_suite.py::test_c"
    assert broken.failed and not broken.name
    assert suite.summary("..F\n1 failed, 2 passed in 3.1s\n") == "1 failed, 2 passed in 3.1s"
    assert suite.summary("killed") == "did not finish"


def test_the_page_of_the_soak_keeps_the_rows_of_parts_that_did_not_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(soak, "PAGE", tmp_path / "soak.md")
    soak.write("fuzz", "| `fuzz` | old |")
    soak.write("storm", "| `storm` | first |")
    soak.write("fuzz", "| `fuzz` | new |")
    page = soak.PAGE.read_text()
    assert page.startswith(soak.HEAD) and "| `fuzz` | new |\n" in page and "| `storm` | first |\n" in page
    assert page.count("not run yet") == len(soak.PARTS) - 2 and "old" not in page

"""Old verbs still do what the words of today do, and say so."""

from pathlib import Path

import pytest

from swarmnode.app.cli.main import OLD, VERBS, current, main
from swarmnode.base.errors import NoDaemon


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("snooze 2h", "pause --for 2h"),
        ("snooze --home here 90s", "pause --home here --for 90s"),
        ("finish --home here", "leave --finish --home here"),
        ("drain --notice 45s --json", "leave --within 30s --notice 45s --json"),
        ("drain", "leave --within 30s"),
        ("top --every 2s", "status --live --every 2s"),
        ("status --json", "status --json"),
    ],
)
def test_old_words_become_those_of_today(before: str, now: str) -> None:
    assert current(before.split()) == now.split()


@pytest.mark.parametrize("verb", sorted(OLD))
def test_an_old_verb_names_its_successor(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    told = capsys.readouterr()
    assert f"say `swarmnode {' '.join(OLD[verb])}`" in told.err
    assert f"Usage: swarmnode {OLD[verb][0]} " in told.out
    assert verb not in VERBS


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("leave --finish --within 30s", "give one"),
        ("leave --json", "give --within"),
        ("status --live --json", "give one"),
        ("status --live", "needs a terminal"),
    ],
)
def test_words_that_do_not_go_together_are_one_line(
    words: str, says: str, tmp_path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main([*words.split(), "--home", str(tmp_path)])
    told = capsys.readouterr().err
    assert code != 0 and says in told, told


@pytest.mark.parametrize(
    "words",
    [
        ("pause",),
        ("pause", "--for", "2h"),
        ("resume",),
        ("leave",),
        ("leave", "--finish"),
        ("leave", "--within", "30s"),
        ("limit",),
        ("status",),
    ],
    ids=" ".join,
)
def test_a_verb_to_a_node_that_does_not_run_says_so(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--home", str(tmp_path)]) == NoDaemon.exit_code
    assert f"no node runs in {tmp_path}" in capsys.readouterr().err

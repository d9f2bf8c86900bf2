"""The command line: help for every verb, one line for every mistake, no imports that are not needed."""

import asyncio
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from swarmnode import __version__
from swarmnode.app.cli.main import VERBS, main
from swarmnode.app.cli.option.param import check_bootstrap, check_listen, check_run, parse_duration
from swarmnode.app.control.service import ControlServer
from swarmnode.base.errors import Unreachable
from swarmnode.base.wire.record_pb2 import NODE_STATE_TRAINING
from swarmnode.base.wire.report_pb2 import StatusReply

ROOT = pathlib.Path(__file__).parents[2]
PEER = "12D3KooWGjMC5gMvFTLdPsDkN6hGbVUhd2RoZ4TpUFQxb5xDkP5u"
BOOTSTRAP = f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}"


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"swarmnode {__version__}\n"


@pytest.mark.parametrize("words", [[], *([verb] for verb in VERBS), ["bench", "swarm"], ["bench", "transport"]])
def test_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--help"]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"Usage: {' '.join(['swarmnode', *words])}")
    assert max(len(text) for text in output.splitlines()) <= 110


@pytest.mark.parametrize("group", ["bench", "owner", "config", "data", "manifest"])
def test_the_help_of_a_group_cuts_no_sentence(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([group, "--help"]) == 0
    verbs = capsys.readouterr().out.partition("Commands:")[2]
    assert verbs.strip() and "..." not in verbs


def test_no_help_pays_for_heavy_imports() -> None:
    code = (
        "import sys; from swarmnode.app.cli.main import VERBS, main\n"
        "heavy = {'torch', 'hivemind', 'grpc', 'numpy', 'prometheus_client', 'rich', 'uvloop', 'transformers'}\n"
        "for words in ([], *([verb] for verb in VERBS)):\n"
        "    assert main([*words, '--help']) == 0, words\n"
        "    assert not heavy & set(sys.modules), (words, heavy & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-B", "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage: swarmnode") == 1 + len(VERBS)


BUCKET_THAT_IS_AWAY = {
    "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
    "AWS_ACCESS_KEY_ID": "k",
    "AWS_SECRET_ACCESS_KEY": "s",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "1",
    "no_proxy": "127.0.0.1",
}
MISTAKES = [
    (["fly"], 2, "No such command 'fly'"),
    (["up", "--nodes", "0"], 2, "--nodes"),
    (["up", "--nodes", "two"], 2, "--nodes"),
    (["up", "--nodes", "2", "--stages", "3"], 2, "--nodes 2 cannot serve 3 stages"),
    (["up", "--nodes", "2"], 2, "--nodes 2 cannot serve 3 stages"),
    (["up", "--for", "soon"], 2, "'soon': not a duration: use 90s"),
    (["up", "--kill", "0s"], 2, "more than 0"),
    (["up", "--rounds", "0"], 2, "--rounds"),
    (["up", "nowhere"], 2, "'nowhere' does not exist"),
    (["up", "."], 2, "neither manifest.toml nor manifest.signed"),
    (["up", "garbage"], 78, "garbage: "),
    (["up", "--resume", "nowhere"], 2, "--resume nowhere: no such folder"),
    (["up", "--resume", "."], 78, "no checkpoint there"),
    (["up", "--resume", "ftp://host/x"], 2, "is no place for checkpoints"),
    (["up", "--resume", "s3://swarm/x"], 70, "cannot list s3://swarm/x"),
    (["join"], 2, "no run given: paste the line"),
    (["join", "--run", "ab" * 32], 2, "with --run give a meeting point"),
    (["join", "swarm1.abc"], 2, "damaged invite"),
    (["join", "swarm9.abc"], 10, "install a newer swarmnode"),
    (["invite", "nowhere"], 2, "no such folder or file"),
    (["join", BOOTSTRAP], 2, "--run"),
    (["join", BOOTSTRAP, "--run", "abc"], 2, "neither a run id (64 hex digits) nor a signed manifest"),
    (["join", "127.0.0.1:4001", "--run", "ab" * 32], 2, "names no peer; write it like /ip4/"),
    (["join", BOOTSTRAP, "--run", "ab" * 32, "--listen", "/ip4/1.2.3/tcp/0"], 2, "'1.2.3' is not an ip4 address"),
    (["join", BOOTSTRAP, "--run", "ab" * 32, "--metrics-port", "70000"], 2, "--metrics-port"),
    (["join", BOOTSTRAP, "--run", "ab" * 32, "--stage", "-1"], 2, "--stage"),
    (["join", BOOTSTRAP, "--run", "ab" * 32, "--stage", "0"], 2, "stages count from 1"),
    (["bootstrap"], 2, "RUN"),
    (["manifest", "explain", "garbage", "inner.learning_rate"], 2, "`explain` takes fields alone, as inner.learning"),
    (["bench", "list"], 2, "protocol, scaling, swarm, transport, wan (see"),
    (["export", ".", "--out", "model"], 2, "no saved stage"),
    (["status", "--home", "here"], 69, "no node runs in here"),
]


@pytest.mark.parametrize(
    ("words", "code", "says"), MISTAKES, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_a_mistake_is_one_line_and_changes_nothing(
    words: list[str],
    code: int,
    says: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in BUCKET_THAT_IS_AWAY.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "garbage").write_bytes(b"\xff\x00 not a manifest")
    assert main(words) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("swarmnode: ")
    assert says in captured.err
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err
    assert [path.name for path in tmp_path.iterdir()] == ["garbage"]


def test_an_error_inside_a_task_group_reads_like_any_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(home: pathlib.Path) -> None:
        raise BaseExceptionGroup("tasks", [ExceptionGroup("inner", [Unreachable("nobody answers at /ip4/1.2.3.4")])])

    monkeypatch.setattr("swarmnode.app.control.client.status", fail)
    assert main(["status"]) == 21
    assert capsys.readouterr().err == "swarmnode: nobody answers at /ip4/1.2.3.4\n"
    monkeypatch.setenv("SWARMNODE_DEBUG", "1")
    with pytest.raises(BaseExceptionGroup):
        main(["status"])


def test_init_makes_a_run_and_overwrites_nothing(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert main(["init", str(folder), "--preset", "tiny"]) == 0
    assert capsys.readouterr().out.split() == [str(folder / "manifest.toml"), str(folder / "owner.key")]
    assert main(["init", str(folder)]) == 2
    assert "not overwritten" in capsys.readouterr().err


def test_a_bucket_whose_library_is_missing_names_the_package(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", str(tmp_path / "run"), "--preset", "tiny"]) == 0
    assert main(["up", str(tmp_path / "run"), "--checkpoints", "gs://b/x"]) == 2
    assert "needs the package gcsfs" in capsys.readouterr().err


HOME = ("--card", "12GB", "--up", "20Mbit")


def test_init_searches_the_settings_that_suit_the_machines(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight cards at home learn in one stage with long rounds; in three, over lines half as fast, they would be slower
    than one of them."""
    from swarmnode.run.manifest.folder import read_manifest

    folder = tmp_path / "run"
    asked = ("--parameters", "125000000", "--nodes", "8", *HOME)
    assert main(["init", str(folder), *asked]) == 0
    told = capsys.readouterr()
    made = read_manifest(folder / "manifest.toml")
    assert "one of these machines alone: " in told.out and "learning efficiency 0." in told.out
    assert re.search(r"^why steps of 512 samples: with 256, 512, 1,024 machines do ", told.out, re.MULTILINE)
    assert re.search(r"together they are 3\.\d to 4\.\d times as fast to a loss$", told.out, re.MULTILINE)
    assert "the model reads bytes: some 4 times the tokens" in told.err and "too small" not in told.out
    assert made.pipeline.stages == 1 and made.model.context == 1024
    assert made.inner.inner_batch == 512 and made.gossip.round_samples >= 8 * made.inner.inner_batch  # as fitted
    assert "Here: searched for 8 machines" in (folder / "manifest.toml").read_text().replace("\n# ", " ")
    thin = ("init", str(tmp_path / "thin"), *asked, "--up", "10Mbit", "--stages", "3")
    assert main([*thin]) == 2
    refused = capsys.readouterr().err.splitlines()[-1]
    assert "as fast to a loss as one of them alone" in refused and "Mbit/s up would carry it" in refused
    assert not (tmp_path / "thin").exists()
    assert main([*thin, "--anyway"]) == 0
    assert read_manifest(tmp_path / "thin" / "manifest.toml").pipeline.stages == 3


def test_init_refuses_what_contradicts_itself(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path / "none"), "--parameters", "1000"]) == 2
    assert "--parameters 1000: the nearest model" in capsys.readouterr().err
    (tmp_path / "fleet.csv").write_text("count,flops,up_mbps,down_mbps\n4,1e12,100,100\n")
    fleet = ("--fleet", str(tmp_path / "fleet.csv"))
    for wrong in (
        ("--samples", "9", "--tokens", "9"),
        (*fleet, "--nodes", "3"),
        ("--up", "20 miles"),
        ("--card", "0GB"),
    ):
        assert main(["init", str(tmp_path / "none"), *wrong]) == 2
        assert capsys.readouterr().err.count("\n") <= 4
    assert not (tmp_path / "none").exists()
    assert main(["init", str(tmp_path / "some"), *fleet]) == 0
    assert "4 machines: 1e+12 FLOP/s" in capsys.readouterr().out


def test_the_presets_of_init_are_those_of_the_manifest() -> None:
    from swarmnode.app.cli.init import PRESETS
    from swarmnode.run.manifest import recipe

    assert set(PRESETS) == set(recipe.PRESETS)


async def test_status_of_a_real_socket_as_table_and_json(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counters = {"swarmnode_samples_total": 5}
    reply = StatusReply(run_id="ab" * 32, run_name="tiny", stage=1, stages=3, counters=counters)
    reply.state = NODE_STATE_TRAINING
    monkeypatch.setenv("NO_COLOR", "1")

    async def ask(*flags: str) -> str:
        assert await asyncio.to_thread(main, ["status", "--home", str(tmp_path), *flags]) == 0
        return capsys.readouterr().out

    server = ControlServer(tmp_path, SimpleNamespace(status=lambda: reply, leave=lambda reason: None))
    await server.start()
    try:
        table = await ask()
        assert "tiny abababab" in table and "stage 2 of 3" in table and "\x1b" not in table
        found = json.loads(await ask("--json"))
        assert (found["stage"], found["counters"]) == (1, counters)
    finally:
        await server.stop()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90.0), ("90s", 90.0), ("1m30s", 90.0), ("2h", 7200.0), ("500ms", 0.5), ("1.5m", 90.0), (" 1D ", 86400.0)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


TO_LISTEN = ["/ip4/0.0.0.0/tcp/0", "/ip6/::1/tcp/65535"]
PEERS = [
    BOOTSTRAP,
    f"/dns4/a.example/tcp/1/p2p/{PEER}",
    f"/ip6/::1/tcp/1/p2p/{PEER}",
    f"{BOOTSTRAP}/p2p-circuit/p2p/{PEER}",
]
NO_DURATIONS = ["", "s", "-5", "5x", "1m1h", "1m 30s", "1m1m", "0", "nan", "inf", "1e3", "9999d", "s1"]
CHECKS: dict[Callable[[str], object], tuple[list[str], list[str], str]] = {
    parse_duration: ([], NO_DURATIONS, "duration"),
    check_listen: (TO_LISTEN, ["", "0.0.0.0:1", "/dns/a/tcp/1"], "write it like|address is needed"),
    check_bootstrap: (PEERS, ["", PEER, "/ip4/127.0.0.1/tcp/1"], "write it like|is not"),
}
"""Addresses in full: tests/transport/test_address.py."""


@pytest.mark.parametrize(("check", "text"), [(check, text) for check, (good, _, _) in CHECKS.items() for text in good])
def test_addresses_that_can_be_used_stay_as_they_are(check: Callable[[str], object], text: str) -> None:
    assert check(text) == text


@pytest.mark.parametrize(("check", "text"), [(check, text) for check, (_, bad, _) in CHECKS.items() for text in bad])
def test_malformed_durations_and_addresses_are_refused(check: Callable[[str], object], text: str) -> None:
    with pytest.raises(ValueError, match=CHECKS[check][2]):
        check(text)


def test_a_run_is_an_id_or_a_file(tmp_path: pathlib.Path) -> None:
    assert check_run("AB" * 32) == "ab" * 32
    (tmp_path / "manifest.signed").write_bytes(b"x")
    assert check_run(str(tmp_path)) == check_run(str(tmp_path / "manifest.signed")) == str(tmp_path / "manifest.signed")
    with pytest.raises(ValueError, match="64 hex digits"):
        check_run("ab" * 31)


def test_a_closed_pipe_is_no_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-B", "-m", "swarmnode.app.cli.main", "--help"]
    done = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert done.stderr == ""
    assert done.returncode == 1


def test_ctrl_c_that_came_in_a_callback_ends_the_command() -> None:
    """Python drops it there, says so in six lines, and goes on."""
    code = (
        "import signal, sys, time; signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        "from swarmnode.app.cli import main\n"
        "class Callback:\n"
        "    def __del__(self): raise KeyboardInterrupt\n"
        "def verb(**_):\n"
        "    Callback(); time.sleep(300)\n"
        "main.cli.main = verb\n"
        "sys.exit(main.main([]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def test_plan_says_where_one_machine_alone_is_faster(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", str(tmp_path / "run"), "--preset", "tiny"]) == 0
    fleet = tmp_path / "fleet.csv"
    row = "home,12,5e12,40,200,eu,25,open,10"
    fleet.write_text(f"name,count,flops,up_mbps,down_mbps,region,access_ms,nat,life_h\n{row}\n")
    capsys.readouterr()
    assert main(["plan", str(tmp_path / "run"), str(fleet), "--tokens", "1e8"]) == 0
    said = capsys.readouterr().out
    assert "so this model is too small for these lines: let one machine train it" in said
    assert "up, Mbit/s" in said and "join: what a newcomer takes to fetch the stage" in said

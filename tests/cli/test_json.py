"""What verbs print by --json holds to a schema."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
from google.protobuf.message import Message

from swarmnode.app.cli.main import VERBS, _load, main
from swarmnode.app.cli.schema import MESSAGES, SCHEMAS, schema_of
from swarmnode.app.control.verb import to_json
from swarmnode.base.identity import Identity
from swarmnode.base.ids import RunId
from swarmnode.base.metrics.events import EventLog
from swarmnode.base.wire.control_pb2 import DrainReply
from swarmnode.base.wire.record_pb2 import NODE_STATE_TRAINING
from swarmnode.base.wire.report_pb2 import LimitsReply, StatusReply
from swarmnode.net.membership.receipt import WorkDone, receipt_to_json, sign_receipt
from tests.support.clock import ManualClock

PLAIN = {
    "archive": "a folder, or a warrant's bytes",
    "bench memory": "tables",
    "bootstrap": "addresses, a line each",
    "chat": "a conversation",
    "completion": "a script",
    "config path": "a path",
    "coordinator": "addresses, a line each",
    "data check": "a hash",
    "data make": "a hash",
    "data show": "a document",
    "data tokenizer": "a path",
    "identity": "a peer id",
    "init": "paths; the plan is for people, and `plan --json` has it",
    "invite": "a line",
    "join": "nothing: `status --json`",
    "manifest explain": "a page; `manifest schema` has it",
    "manifest schema": "it is one",
    "manifest set": "a difference; `manifest diff --json`",
    "owner add": "a line; `amend --list --json`",
    "owner new": "a key",
    "owner rotate": "a line; `amend --list --json`",
    "schema": "it prints schemas",
    "ui": "an address",
}
"""What verbs without --json print: one value a line, or nothing to read."""


def verbs(name: str, command: click.Command | None) -> Iterator[tuple[str, click.Command]]:
    """`command` and its own ones, by the words that call them."""
    assert command is not None
    if not isinstance(command, click.Group):
        yield name, command
        return
    context = click.Context(command)
    for inner in command.list_commands(context):
        yield from verbs(f"{name} {inner}", command.get_command(context, inner))


def test_each_verb_prints_json_by_a_schema_or_one_value() -> None:
    found = dict(pair for verb in VERBS for pair in verbs(verb, _load(verb)))
    with_json = {name for name, command in found.items() if any("--json" in one.opts for one in command.params)}
    assert found.keys() - with_json == PLAIN.keys()
    for name in with_json:
        jsonschema.Draft202012Validator.check_schema(schema_of(name))
    assert {*SCHEMAS, *MESSAGES} <= with_json | {"bench"}


@pytest.mark.parametrize("reply", [StatusReply(), LimitsReply(), DrainReply()], ids=lambda one: type(one).__name__)
def test_what_a_daemon_answers_is_as_its_schema_says(reply: Message) -> None:
    verb = next(verb for verb, name in MESSAGES.items() if name == type(reply).__name__)
    jsonschema.validate(to_json(reply), schema_of(verb))
    if isinstance(reply, StatusReply):
        full = StatusReply(stage=1, state=NODE_STATE_TRAINING, tokens_total=2**40, loss_train=math.inf)
        full.waits.add(cause="stage", says="x")
        full.peers.add(peer_id="a", round=3)
        full.given.samples = 3
        jsonschema.validate(to_json(full), schema_of(verb))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(to_json(reply) | {"another": 1}, schema_of(verb))


def test_what_an_owner_reads_is_as_its_schema_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tmp_path / "run")
    assert main(["init", run, "--preset", "tiny"]) == 0
    assert main(["amend", run, "inner.clip_norm=0.5", "--from-round", "3"]) == 0
    capsys.readouterr()
    (row,) = checked(capsys, "amend", run, "--list")
    assert (row["serial"], row["from_round"], row["values"]) == (1, 3, {"inner.clip_norm": 0.5})
    peer = Identity.of_seed(bytes(32)).peer_id
    assert checked(capsys, "access", run, "--ban", peer)["banned"] == [peer]


def test_recipes_settings_and_lines_are_as_their_schemas_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [row["name"] for row in checked(capsys, "quickstart")] == ["chat", "continue", "small"]
    assert checked(capsys, "config", "show", "--home", str(tmp_path))["stage"]["origin"] == "default"
    log = EventLog(tmp_path / "events.jsonl", ManualClock(), "ab" * 32, "n")
    log.write("node.failed", level="error", fields={"reason": "x"})
    log.close()
    jsonschema.validate(json.loads((tmp_path / "events.jsonl").read_text()), schema_of("logs"))
    done = WorkDone(2, 8, 64, 32)
    receipt = sign_receipt(Identity.of_seed(bytes(32)), RunId("ab" * 32), Identity.generate().peer_id, done, 10, 20)
    jsonschema.validate(receipt_to_json(receipt), schema_of("receipts"))


def checked(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """What a verb prints with --json, which holds to its schema."""
    found = printed(capsys, *words, "--json")
    verb = " ".join(words[:2] if words[0] in ("config", "manifest") else words[:1])
    jsonschema.validate(found, schema_of(verb))
    return found


def printed(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> object:
    assert main(list(words)) == code
    return json.loads(capsys.readouterr().out)


def test_a_manifest_is_as_its_schema_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tmp_path / "run")
    assert main(["init", run, "--preset", "tiny"]) == 0
    capsys.readouterr()
    shown = printed(capsys, "manifest", "show", run, "--json")
    assert isinstance(shown, dict) and shown["pipeline"]["stages"] == 2
    schema = printed(capsys, "manifest", "schema")
    assert isinstance(schema, dict)
    jsonschema.validate(shown, schema)
    shown["pipeline"]["stages"] = "two"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(shown, schema)
    assert main(["manifest", "show", run, "--json", "--changed"]) == 2


def test_a_difference_has_both_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(tmp_path / name) for name in ("one", "two")]
    for run in runs:
        assert main(["init", run, "--preset", "tiny"]) == 0
    assert main(["manifest", "set", runs[1], "inner.clip_norm=0.5", "about.by=Ada"]) == 0
    capsys.readouterr()
    found = printed(capsys, "manifest", "diff", *runs, "--json", code=1)
    jsonschema.validate(found, schema_of("manifest diff"))
    assert isinstance(found, dict) and found["name"] == ["one", "two"]
    assert (found["inner.clip_norm"], found["about.by"]) == ([1.0, 0.5], ["", "Ada"])
    assert printed(capsys, "manifest", "diff", runs[0], runs[0], "--json") == {}


def test_what_is_kept_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    jsonschema.validate(printed(capsys, "uninstall", "--json"), schema_of("uninstall"))
    home = tmp_path / "swarmnode" / "node"
    home.mkdir(parents=True)
    (home / "node.key").write_text("key")
    found = printed(capsys, "uninstall", "--json")
    jsonschema.validate(found, schema_of("uninstall"))
    assert isinstance(found, list) and found and found[0]["nbytes"] >= 3

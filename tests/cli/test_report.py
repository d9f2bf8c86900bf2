"""Logs in one file without what is nobody's business, and as one timeline."""

from __future__ import annotations

import io
import ipaddress
import json
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.cli.main import main
from swarmnode.local import log_timeline
from swarmnode.local.bundle import HIDDEN, Redactor
from swarmnode.untrusted_text import readable

PEERS = (
    "12D3KooWAaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "12D3KooWBbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb",
)


def line(second: int, node: str, event: str, level: str = "info", **fields: object) -> str:
    at = f"2026-11-21T12:00:{second:02d}.000Z"
    whole = {"ts": at, "level": level, "event": event, "run": "ab", "node": node, "stage": 1, "fields": fields}
    return json.dumps(whole)


@pytest.fixture
def homes(tmp_path: Path) -> Path:
    for index, peer in enumerate(PEERS):
        home = tmp_path / "run" / f"node-{index:02d}"
        home.mkdir(parents=True)
        lines = [
            line(index, peer, "node.started", name=f"node-{index}", addresses=["/ip4/203.0.113.7/tcp/4001"]),
            line(20 - index, peer, "peer.banned", "warning", peer=PEERS[1 - index], reason="late"),
        ]
        (home / "events.jsonl").write_text("\n".join(lines) + "\n{torn")
        (home / "node.key").write_text("secret key")
        (home / "stderr.log").write_text("joined by swarm1." + "A" * 60 + " from 203.0.113.7\n")
    return tmp_path / "run"


def test_a_report_holds_logs_and_neither_keys_nor_addresses(homes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = homes.parent / "out.tar.gz"
    assert main(["report", str(homes), "--out", str(out)]) == 0
    with tarfile.open(out) as bundle:
        names = bundle.getnames()
        text = "".join(bundle.extractfile(name).read().decode() for name in names)  # type: ignore[union-attr]
    assert "00-node-00/events.jsonl" in names and not [name for name in names if "key" in name]
    assert "203.0.113.7" not in text and "AAAAAAAA" not in text and "secret key" not in text
    assert text.count("ip4-1") == 4, "the same address is the same word everywhere"
    assert PEERS[0] in text
    assert "hidden" in capsys.readouterr().err
    assert main(["report", str(homes), "--out", str(out), "--reveal"]) == 0
    assert main(["report", str(homes / "nothing"), "--out", str(out)]) == 2


@pytest.mark.parametrize("what", ["folder", "bundle", "files"])
def test_a_replay_is_one_timeline(homes: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    paths = [str(home / "events.jsonl") for home in sorted(homes.iterdir())] if what == "files" else [str(homes)]
    if what == "bundle":
        paths = [str(homes.parent / "out.tar.gz")]
        assert main(["report", str(homes), "--out", paths[0]]) == 0
        capsys.readouterr()
    assert main(["replay", *paths]) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert [row.split()[1] for row in lines] == ["node-0", "node-1", "node-1", "node-0"]
    assert "peer=node-0" in lines[2], "peers are called by their names"
    assert said.err.count("1 lines could not be read") == 2
    assert main(["replay", *paths, "--level", "warning", "--node", "node-1", "--json"]) == 0
    found = [json.loads(row) for row in capsys.readouterr().out.splitlines()]
    assert [(row["name"], row["event"]) for row in found] == [("node-1", "peer.banned")]
    assert main(["replay", *paths, "--event", "node.*"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_file_that_is_no_log_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").write_bytes(b"\x00\xff rubbish")
    assert main(["replay", str(tmp_path / "x")]) == 2
    assert "no events there" in capsys.readouterr().err


def bundle(path: Path, name: str, data: bytes) -> Path:
    with tarfile.open(path, "w:gz") as made:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        made.addfile(member, io.BytesIO(data))
    return path


def test_a_strangers_bundle_takes_neither_memory_nor_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_timeline, "BUNDLE_NBYTES_MAX", 1 << 20)
    bomb = bundle(tmp_path / "bomb.tar.gz", "a/events.jsonl", bytes((1 << 20) + 1))
    assert main(["replay", str(bomb)]) == 2
    assert "at most 1048576 are read" in capsys.readouterr().err
    data = (line(1, PEERS[0], "node.started") + "\n{torn").encode()
    named = bundle(tmp_path / "named.tar.gz", "\x1b]0;owned\x07/events.jsonl", data)
    assert main(["replay", str(named)]) == 0
    said = capsys.readouterr()
    assert "1 lines could not be read" in said.err and "\x1b" not in said.err + said.out


def test_a_models_words_move_no_cursor() -> None:
    """What a stranger's model says may be an escape sequence, such as one that writes to the clipboard."""
    assert readable("a\tb\n\x1b]52;c;cm0gLXJm\x07\x9b2J\u202eé") == "a\tb\n ]52;c;cm0gLXJm  2J é"


SPECIAL = ("127.", "0.", "169.254.169.254", "255.255.255.255")


@given(st.ip_addresses(), st.sampled_from(["", "a ", '{"held":3} ', "at 12:04:05.123Z "]))
def test_no_address_gets_through(address: ipaddress.IPv4Address | ipaddress.IPv6Address, before: str) -> None:
    text = str(address)
    if text.startswith(SPECIAL) or text in ("::", "::1"):
        return
    said = Redactor().text(f"{before}/ip/{text}/tcp/1")
    assert text not in said and said.startswith(before)


def test_a_report_hides_secrets_and_keeps_the_rest() -> None:
    hide = Redactor([("/home/ada", "~"), ("ada", "user")]).text
    assert hide("s3://key:pass@minio/x") == f"s3://{HIDDEN}@minio/x"
    assert hide('{"api_key": "abc", "tokens": 12}') == f'{{"api_key": "{HIDDEN}", "tokens": 12}}'
    assert hide("/home/ada/run of ada at 12:04:05Z, version 1.2.3") == "~/run of user at 12:04:05Z, version 1.2.3"
    assert hide("/dns4/home.example.org/tcp/1 127.0.0.1 ::1 AKIAABCDEFGHIJKLMNOP") == (
        f"/dns4/host-1/tcp/1 127.0.0.1 ::1 {HIDDEN}"
    )


LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
SECRETS = {
    "hugging face": "hf_{}",
    "github": "ghp_{}",
    "github app": "ghs_{}",
    "github fine": "github_pat_11AAAA_{}",
    "gitlab": "glpat-{}",
    "openai": "sk-{}",
    "openai project": "sk-proj-{}",
    "anthropic": "sk-ant-api03-{}-_AA",
    "slack": "xoxb-1234-{}",
    "jwt": "eyJhbGciOiJI.eyJzdWIiOiIx.{}",
    "bearer": "Authorization: Bearer {}",
    "bearer in a sentence": "refused with bearer {} by the server",
    "basic": "authorization: Basic {}==",
    "basic in json": '{{"Authorization": "Basic {}="}}',
    "signed url": "https://b.s3.amazonaws.com/x?X-Amz-Credential={0}%2F&X-Amz-Signature={0}&X-Amz-Security-Token={0}",
    "google url": "https://storage.googleapis.com/b/x?X-Goog-Signature={}",
    "azure url": "https://a.blob.core.windows.net/c/x?sv=2024&sig={}%3D&se=1",
    "aws secret": "AWS_SECRET_ACCESS_KEY={}",
    "a long name": "x" * 90 + "_secret: {}",
    "aws session": "aws_session_token = {}",
    "url": "https://user:{}@example.org/x",
    "url with a slash": "postgres://user:{}/p@db.example.org/x",
    "url of an odd scheme": "git+https://{}@example.org/x",
    "pem": "-----BEGIN OPENSSH PRIVATE KEY-----\n{0}{0}\n{0}==\n-----END OPENSSH PRIVATE KEY-----\n",
    "pem in json": '"-----BEGIN RSA PRIVATE KEY-----\\n{0}{0}\\n{0}\\n-----END RSA PRIVATE KEY-----"',
    "pem with headers": "-----BEGIN EC PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n\n{}\n-----END EC PRIVATE KEY-----",
    "pem cut off": "-----BEGIN PRIVATE KEY-----\n{}\n{}",
    "pem whose beginning is cut off": "{}\n{}\n-----END PRIVATE KEY-----",
}


@pytest.mark.parametrize("kind", SECRETS)
@given(
    st.text(LETTERS, min_size=40, max_size=40),
    st.sampled_from(["", "it said: ", '{"reason": "', "\n"]),
    st.sampled_from(["", " and went on", '"}', "\n"]),
)
def test_no_secret_gets_through(kind: str, secret: str, before: str, behind: str) -> None:
    hide = Redactor()
    said = hide.text(before + SECRETS[kind].format(secret, secret) + behind)
    assert secret not in said and secret[8:24] not in said and HIDDEN in said and hide.hidden >= 1
    assert said.startswith(before)


@given(st.text(LETTERS, min_size=16, max_size=16))
def test_no_key_of_amazon_gets_through(text: str) -> None:
    key = f"ASIA{text.upper()}"
    assert key not in Redactor().text(f"key {key}, then")


def test_a_log_is_not_hidden_by_what_looks_like_a_key() -> None:
    """Who writes into our log must not take the rest of it out of a report."""
    log = "-----BEGIN A KEY-----\n" + "\n".join(line(i, PEERS[0], "peer.banned", peer=PEERS[1]) for i in range(50))
    said = Redactor().text(log)
    assert said.count("peer.banned") == 50 and said.count(PEERS[1]) == 50
    plain = "the token table, basic training, bearer of news; task-force sk-ill round 12 at https://example.org/a@b"
    assert Redactor().text(plain) == plain


@pytest.mark.parametrize(
    "piece",
    [
        "-----BEGIN A-----",
        "A" * 64 + "\n",
        "-----END A-----",
        "a" * 20 + " ",
        "x://",
        "?sig",
        "a",
        "x://u:",
        "eyJ-",
        "secret-",
    ],
)
def test_no_log_holds_a_report_up(piece: str) -> None:
    """Who writes into our log could make a search for patterns take hours."""
    assert len(Redactor().text(piece * (300_000 // len(piece)))) < 400_000


@given(st.lists(st.lists(st.tuples(st.integers(0, 59), st.sampled_from(PEERS)), max_size=6), max_size=4))
def test_merging_keeps_each_nodes_order(logs: list[list[tuple[int, str]]]) -> None:
    read = [
        log_timeline.parse(str(i), [line(second, peer, "x", log=i, at=k) for k, (second, peer) in enumerate(log)])
        for i, log in enumerate(logs)
    ]
    merged = list(log_timeline.merge(read))
    assert len(merged) == sum(map(len, logs))
    assert [row.at for row in merged] == sorted(row.at for row in merged)
    for i in range(len(logs)):
        own = [row.fields["at"] for row in merged if row.fields["log"] == i]
        assert own == sorted(own)

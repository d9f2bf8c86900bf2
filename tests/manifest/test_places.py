"""What each text of a manifest can name on the machine of whoever takes it: nothing, unless its user has said so."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import ManifestError
from swarmnode.manifest import Manifest, parse
from swarmnode.manifest.check import is_below
from swarmnode.manifest.field import BY_NAME, FIELDS
from swarmnode.manifest.text import value_of

WORD, LABEL, KEY, FILE, BUCKET = "word", "label", "key", "file", "bucket"
NAMES = {
    "name": LABEL,  # shown, and part of the name of a folder below runs/
    "pipeline.boundary": WORD,
    "data.source": WORD,
    "data.paths": FILE,  # below --data-root
    "data.field": KEY,  # of an object in a line of those files
    "data.tokenizer": FILE,  # "bytes", or below --data-root
    "inner.optimizer": WORD,
    "inner.decay": WORD,
    "gossip.method": WORD,
    "gossip.alpha": WORD,
    "gossip.beta": WORD,
    "gossip.gamma": WORD,
    "gossip.codec": WORD,
    "gossip.acceptance": WORD,
    "gossip.rounds": WORD,
    "checkpoint.url": BUCKET,  # with --use-bucket
    "recovery.method": WORD,
    "recovery.itinerary": WORD,
    "recovery.while_lost": WORD,
    "access.mode": WORD,
}
"""Every field of a manifest that holds text, and what of a machine it can name: a word is one of a few choices."""

ELSEWHERE = [
    "/etc/passwd",
    "~/.ssh/id_ed25519",
    ".ssh",
    ".",
    "..",
    "../secret",
    "a/../../secret",
    "a/./b",
    "a//b",
    "a/.git/config",
    "a/",
    "..\\secret",
    "C:\\Users",
    "\\\\server\\share",
    "./../x",
    "././x",
    "a\0b",
    "",
]

NO_BUCKETS = [
    "file:///home/me",
    "file://localhost/etc",
    "/srv/checkpoints",
    "checkpoints",
    "http://169.254.169.254/latest/meta-data",
    "https://example.org/x",
    "memory://x",
    "local:///etc",
    "ssh://me@host/x",
    "sftp://host/x",
    "s3://169.254.169.254/x",
    "s3://127.0.0.1/x",
    "s3://2130706433/x",
    "s3://localhost:9000/x",
    "s3://key:secret@bucket/x",
    "s3://bucket@endpoint/x",
    "s3://[::1]/x",
    "s3://arn:aws:s3:us-east-1:123456789012:accesspoint/x",
    "s3://bucket/../other",
    "s3://bucket/a//b",
    "s3://bucket/x?endpoint_url=http://127.0.0.1",
    "s3://bucket/x#y",
    "s3://Bucket/x\n",
    "s3://b\u0430cket/x",
    "simplecache::s3://bucket/x",
    "S3://bucket/x",
    "s3://",
    "s3:///x",
]


def test_every_text_of_a_manifest_is_in_the_table() -> None:
    texts = {f.name for f in FIELDS if isinstance(value_of(Manifest(), f.name), str | tuple)}
    assert texts == NAMES.keys(), "say what a new field can name, and who must allow it"


@pytest.mark.parametrize("name", [name for name, kind in NAMES.items() if kind == WORD])
@given(text=st.text() | st.sampled_from([*ELSEWHERE, *NO_BUCKETS]))
def test_words_are_of_a_few(name: str, text: str) -> None:
    allowed = BY_NAME[name].check.allowed
    assert BY_NAME[name].check.accept(text) is None or f'"{text}"' in allowed


@pytest.mark.parametrize("text", [*ELSEWHERE, *NO_BUCKETS])
def test_a_label_is_no_path(text: str) -> None:
    accepted = BY_NAME["name"].check.accept(text)
    assert accepted is None or not {"/", "\\"} & set(text)
    assert not text.startswith(".") or accepted is None


@pytest.mark.parametrize("text", ELSEWHERE)
def test_no_path_leads_elsewhere(text: str) -> None:
    assert BY_NAME["data.paths"].check.accept([text]) is None
    assert BY_NAME["data.tokenizer"].check.accept(text) is None
    with pytest.raises(ManifestError, match=r"data\.paths"):
        parse(f'[data]\nsource = "text"\npaths = [{text!r}]'.replace("\\x00", "\\\\u0000"), "here")


@given(st.text())
def test_what_is_below_stays_below(text: str) -> None:
    if is_below(text):
        assert not text.startswith(("/", "~")) and not {"..", ""} & set(text.split("/")) and "\0" not in text


@pytest.mark.parametrize("text", NO_BUCKETS)
def test_only_buckets_are_urls(text: str) -> None:
    assert BY_NAME["checkpoint.url"].check.accept(text) is None


@pytest.mark.parametrize("text", ["", "s3://swarm", "s3://swarm/all", "gs://a-b.c/x/y_z", "az://container/1.0/"])
def test_buckets_are(text: str) -> None:
    assert BY_NAME["checkpoint.url"].check.accept(text) == text

"""What each text of a manifest can name on the machine of whoever takes it: nothing, unless its user has said so."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.base.errors import ManifestError
from swarmnode.run.manifest import Manifest, parse
from swarmnode.run.manifest.check import is_below
from swarmnode.run.manifest.location import base_url
from swarmnode.run.manifest.spec import BY_NAME, FIELDS
from swarmnode.run.manifest.text import value_of

WORD = "word"
NUMBERS = "numbers"
LABEL = "label"
KEY = "key"
FILE = "file"
BUCKET = "bucket"
HASH = "hash"
URL = "url"
WORDS = """
model.qk_norm model.norm_placement model.rope_scaling pipeline.boundary data.source data.documents
inner.optimizer inner.decay inner.replica_rate pipeline.weight_prediction gossip.method gossip.alpha gossip.beta
gossip.gamma gossip.codec gossip.acceptance training.kind training.targets
training.base_format recovery.method access.mode transport.kind
""".split()
NAMES = {
    **dict.fromkeys(WORDS, WORD),
    "name": LABEL,  # shown, and part of the name of a folder below runs/
    "model.architecture": KEY,  # an entry point of a package that the user has installed
    "model.unrotated_layers": NUMBERS,
    "model.sliding_layers": NUMBERS,
    "model.dense_layers": NUMBERS,
    "base.index": HASH,  # of bytes; says nothing of where they are
    "base.locations": URL,  # asked for chunks over HTTP, at addresses that data/web.py lets pass
    "data.index": HASH,  # of bytes; says nothing of where they are
    "data.locations": URL,  # asked for chunks over HTTP, at addresses that data/web.py lets pass
    "data.tokenizer": FILE,  # "bytes", or below --data-root
    "checkpoint.url": BUCKET,  # with --use-bucket
    "evaluation.sets": FILE,  # below the folder of whoever keeps the archive, with the owner's permission
    "evaluation.prompts": "a text that is continued and shown",
    **dict.fromkeys(("about.by", "about.why", "about.data", "about.licence"), "a line that is shown"),
    "access.recovery": "a public key, which signs",
    "about.page": "an address that is shown",
}
"""Every field of a manifest that holds text or a list, and what it can name of a machine: a word is one of a few."""

ELSEWHERE = """
/etc/passwd ~/.ssh/id_ed25519 .ssh . .. ../secret a/../../secret a/./b a//b a/.git/config a/ ./../x ././x
""".split()
ELSEWHERE += ["..\\secret", "C:\\Users", "\\\\server\\share", "a\0b", ""]

NO_BUCKETS = """
file:///home/me file://localhost/etc /srv/checkpoints checkpoints http://169.254.169.254/latest/meta-data
https://example.org/x memory://x local:///etc ssh://me@host/x sftp://host/x s3://169.254.169.254/x
s3://127.0.0.1/x s3://2130706433/x s3://localhost:9000/x s3://key:secret@bucket/x s3://bucket@endpoint/x
s3://[::1]/x s3://arn:aws:s3:us-east-1:123456789012:accesspoint/x s3://bucket/../other s3://bucket/a//b
s3://bucket/x?endpoint_url=http://127.0.0.1 s3://bucket/x#y simplecache::s3://bucket/x S3://bucket/x s3://
s3:///x
""".split()
NO_BUCKETS += ["s3://Bucket/x\n", "s3://b\u0430cket/x"]


NO_LOCATIONS = """
/etc/passwd data ../data ~/data file:///etc/passwd file://localhost/etc/passwd local:///etc memory://x
ftp://example.org/x ssh://me@host/x dict://127.0.0.1:11211/stats gopher://127.0.0.1:6379/_x https:// https:///x
https://user:secret@example.org/x https://user@example.org/x https://example.org@169.254.169.254/x
https://example.org/x?key=secret https://example.org/x#y https://example.org/../x https://example.org/a/../../x
https://example.org/%2e%2e/x https://example.org//x https://example.org:0/x https://example.org:99999/x
HTTPS://example.org/x simplecache::https://example.org/x s3://key:secret@bucket/x s3://169.254.169.254/x
s3://bucket/../other s3://Bucket/x gs:// hf://datasets/USER hf://datasets/USER/NAME@../x hf://models/USER/NAME
""".split()
NO_LOCATIONS += [
    "https://example.org/a b",
    "https://example.org\\x",
    "https://exa\nmple.org/x",
    "https://example.org/x\r\nHost: other",
    "https://ex\u0430mple.org/x",
    "https://example.org/" + "x" * 2000,
]


def test_every_text_of_a_manifest_is_in_the_table() -> None:
    texts = {f.name for f in FIELDS if isinstance(value_of(Manifest(), f.name), str | tuple)}
    assert texts == NAMES.keys(), "say what a new field can name, and who must allow it"


@pytest.mark.parametrize("name", [name for name, kind in NAMES.items() if kind == WORD])
@given(text=st.text() | st.sampled_from([*ELSEWHERE, *NO_BUCKETS]))
def test_words_are_of_a_few(name: str, text: str) -> None:
    allowed = BY_NAME[name].check.allowed
    assert BY_NAME[name].check.accept(text) is None or f'"{text}"' in allowed


@pytest.mark.parametrize("name", [name for name, kind in NAMES.items() if kind == NUMBERS])
@pytest.mark.parametrize("raw", ["", "1", ["1"], [True], [1.0], [-1], [512], [[1]], {"1": 1}, [2, 1], [1, 1], 1])
def test_numbers_are_no_text(name: str, raw: object) -> None:
    assert BY_NAME[name].check.accept(raw) is None and BY_NAME[name].check.accept([1, 511]) == (1, 511)


@pytest.mark.parametrize("text", [*ELSEWHERE, *NO_BUCKETS])
def test_a_label_is_no_path(text: str) -> None:
    accepted = BY_NAME["name"].check.accept(text)
    assert accepted is None or not {"/", "\\"} & set(text)
    assert not text.startswith(".") or accepted is None


@pytest.mark.parametrize("text", ELSEWHERE)
def test_no_path_leads_elsewhere(text: str) -> None:
    assert BY_NAME["data.tokenizer"].check.accept(text) is None
    with pytest.raises(ManifestError, match=r"data\.tokenizer"):
        parse(f"[data]\ntokenizer = {text!r}".replace("\\x00", "\\\\u0000"), "here")


@given(st.text())
def test_paths_inside_a_folder_stay_inside(text: str) -> None:
    if is_below(text):
        assert not text.startswith(("/", "~")) and not {"..", ""} & set(text.split("/")) and "\0" not in text


@pytest.mark.parametrize("text", NO_BUCKETS)
def test_only_buckets_are_urls(text: str) -> None:
    assert BY_NAME["checkpoint.url"].check.accept(text) is None


@pytest.mark.parametrize("text", ["", "s3://swarm", "s3://swarm/all", "gs://a-b.c/x/y_z", "az://container/1.0/"])
def test_buckets_are(text: str) -> None:
    assert BY_NAME["checkpoint.url"].check.accept(text) == text


@pytest.mark.parametrize("text", NO_LOCATIONS)
def test_no_location_names_a_file_a_key_or_another_protocol(text: str) -> None:
    assert base_url(text) is None
    assert BY_NAME["data.locations"].check.accept([text]) is None
    assert BY_NAME["base.locations"].check.accept([text]) is None


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("https://example.org/a/b/", "https://example.org/a/b"),
        ("https://example.org:8443/a", "https://example.org:8443/a"),
        ("http://192.168.1.7:8000", "http://192.168.1.7:8000"),  # only where the volunteer allows such addresses
        ("s3://bucket/text", "https://bucket.s3.amazonaws.com/text"),
        ("s3://my.bucket/text", "https://s3.amazonaws.com/my.bucket/text"),
        ("gs://bucket", "https://storage.googleapis.com/bucket"),
        ("hf://datasets/me/text@v1/tokens", "https://huggingface.co/datasets/me/text/resolve/v1/tokens"),
        ("hf://datasets/me/text", "https://huggingface.co/datasets/me/text/resolve/main"),
    ],
)
def test_a_location_is_asked_over_http(text: str, asked: str) -> None:
    assert base_url(text) == asked
    assert BY_NAME["data.locations"].check.accept([text]) == (text,)


def test_the_hub_keeps_models_and_data_sets_apart() -> None:
    model = "hf://me/model@0123abc"
    text = "hf://datasets/me/text"
    assert base_url(model) == "https://huggingface.co/me/model/resolve/0123abc"
    assert BY_NAME["base.locations"].check.accept([model]) == (model,)
    assert BY_NAME["base.locations"].check.accept([text]) is BY_NAME["data.locations"].check.accept([model]) is None


@given(st.text() | st.sampled_from([*ELSEWHERE, *NO_BUCKETS]))
def test_an_index_is_a_hash(text: str) -> None:
    assert BY_NAME["data.index"].check.accept(text) is None or text == "" or re.fullmatch("[0-9a-f]{64}", text)

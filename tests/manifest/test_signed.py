"""Manifests as nodes pass them on: one byte string, one id, and no way to change either."""

import dataclasses
import json
import os
import pathlib

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.base.errors import ManifestError, NotPermitted, UsageError
from swarmnode.base.ids import RunId
from swarmnode.base.wire import record_pb2
from swarmnode.run.manifest import (
    AboutSpec,
    GossipSpec,
    Manifest,
    canonical,
    parse,
    parse_signed,
    read_signed,
    sign,
    verify,
)
from swarmnode.run.manifest.folder import init, read_manifest, sign_folder, write_signed
from swarmnode.run.manifest.signed import DOMAIN, SIGNED_BYTES_MAX, from_canonical
from swarmnode.run.manifest.spec import CONSTANTS
from swarmnode.run.owner import create_owner, load_owner, public_bytes

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(32))


def resign(raw: bytes, key: Ed25519PrivateKey = KEY) -> record_pb2.SignedManifest:
    return record_pb2.SignedManifest(manifest=raw, owner=public_bytes(key), signature=key.sign(DOMAIN + raw))


@pytest.mark.parametrize("field", CONSTANTS)
def test_a_constant_is_read_with_the_value_of_all_runs_and_no_other(field: str) -> None:
    tree = json.loads(canonical(Manifest()))
    table, _, name = field.rpartition(".")
    constant = CONSTANTS[field]
    assert (name in tree[table]) == constant.signed
    assert not constant.signed or tree[table][name] == json.loads(json.dumps(constant.value))
    changed = {**tree, table: {**tree[table], name: 7}}
    words = rf"{field} = 7: it is .* in every run: delete the line"
    with pytest.raises(ManifestError, match=words):
        from_canonical(json.dumps(changed, sort_keys=True, separators=(",", ":")).encode())
    with pytest.raises(ManifestError, match=words):
        parse(f"[{table}]\n{name} = 7\n", "manifest.toml")
    assert parse(f"[{table}]\n{name} = {json.dumps(constant.value)}\n", "manifest.toml") == Manifest()


def test_the_id_is_of_content_and_owner() -> None:
    # Written down: another byte in the canonical form is another run.
    assert verify(sign(Manifest(), KEY), None)[1] == "cea8718dc1fa4c606cf8b1cef89f28f05b3f3a64686e43b5d13995dc0125cda3"
    assert verify(sign(Manifest(), OTHER), None)[1] != verify(sign(Manifest(), KEY), None)[1]
    assert verify(sign(Manifest(seed=1), KEY), None)[1] != verify(sign(Manifest(), KEY), None)[1]


def test_canonical_is_sorted_compact_and_the_same_for_equal_numbers() -> None:
    raw = canonical(Manifest())
    assert raw == json.dumps(json.loads(raw), sort_keys=True, separators=(",", ":")).encode()
    whole = Manifest(gossip=dataclasses.replace(GossipSpec(), beta=1, gamma=1))
    assert canonical(whole) == canonical(Manifest(gossip=dataclasses.replace(GossipSpec(), beta=1.0, gamma=1.0)))
    assert b'"about"' not in raw, "runs of before there was such a table keep their id"
    told = Manifest(about=AboutSpec(why="to write poems", page="https://swarm.example/poems"))
    assert from_canonical(canonical(told)) == told and b'"by"' not in canonical(told)


@given(place=st.integers(0, 5000), change=st.integers(1, 255), part=st.sampled_from(["manifest", "owner", "signature"]))
@settings(max_examples=60, deadline=None)
def test_any_changed_byte_is_noticed(place: int, change: int, part: str) -> None:
    signed = sign(Manifest(), KEY)
    raw = bytearray(getattr(signed, part))
    raw[place % len(raw)] ^= change
    setattr(signed, part, bytes(raw))
    with pytest.raises(ManifestError, match="signature is wrong"):
        verify(signed, None)


def test_another_runs_manifest_is_refused() -> None:
    expected = verify(sign(Manifest(), KEY), None)[1]
    for stranger in (sign(Manifest(seed=2), KEY), sign(Manifest(), OTHER)):
        with pytest.raises(ManifestError, match=f"not of run {expected[:16]}"):
            verify(stranger, RunId(expected))


@pytest.mark.parametrize(
    ("signed", "says"),
    [
        (record_pb2.SignedManifest(), "without an owner's key"),
        (record_pb2.SignedManifest(manifest=bytes(64 * 1024 + 1)), "at most 65536"),
        (resign(b""), "not JSON"),
        (resign(b"\xff"), "not JSON"),
        (resign(b"[" * 60_000), "not JSON"),
        (resign(b"[]"), "of a format other than"),
        (resign(b'{"format":2}'), "of a format other than"),
        (resign(b'{"format":1}'), "not in canonical form"),
        (resign(canonical(Manifest()) + b" "), "not in canonical form"),
        (resign(b'{"extra":1,' + canonical(Manifest())[1:]), "extra = 1: unknown field"),
        (resign(canonical(Manifest()).replace(b'"alpha":"own"', b'"alpha":NaN')), "gossip.alpha = nan"),
        (resign(canonical(Manifest()).replace(b'"alpha":"own"', b'"alpha":"none"')), 'gossip.alpha = "none"'),
        (resign(canonical(Manifest()).replace(b'"epsilon":0.1', b'"epsilon":0.10')), "not in canonical form"),
        (resign(canonical(Manifest()).replace(b'"stages":3', b'"stages":7')), "pipeline.stages = 7"),
    ],
)
def test_a_malformed_manifest_is_refused_though_signed(signed: record_pb2.SignedManifest, says: str) -> None:
    with pytest.raises(ManifestError, match=says):
        verify(signed, None)


def test_an_invalid_manifest_is_not_signed() -> None:
    with pytest.raises(ManifestError, match=r"gossip\.alpha"):
        sign(Manifest(gossip=GossipSpec(alpha=float("nan"))), KEY)
    with pytest.raises(ManifestError, match="seed"):
        sign(Manifest(seed=-1), KEY)


def test_init_sign_read(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "a" / "run"
    manifest_path, key_path = init(folder)
    assert (manifest_path.name, key_path.name) == ("manifest.toml", "owner.key")
    assert key_path.stat().st_mode & 0o777 == 0o600
    assert read_manifest(manifest_path) == Manifest()
    signed = sign_folder(folder)
    assert read_signed(folder / "manifest.signed") == (signed, Manifest())
    assert signed.owner == public_bytes(load_owner(key_path))
    assert sorted(p.name for p in folder.iterdir()) == [
        "manifest.schema.json",
        "manifest.signed",
        "manifest.toml",
        "owner.key",
    ]


def test_signed_files_that_are_not_name_the_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "manifest.signed"
    with pytest.raises(ManifestError, match=r"manifest\.signed: cannot be read"):
        read_signed(path)
    for raw, says in [
        (b"\xff\xff", "not a signed manifest"),
        (bytes(SIGNED_BYTES_MAX + 1), "longer than"),
        (b"", "without an owner's key"),
        (sign(Manifest(), KEY).SerializeToString()[:-1], "not a signed manifest|without an owner"),
    ]:
        path.write_bytes(raw)
        with pytest.raises(ManifestError, match=says) as caught:
            read_signed(path)
        assert str(path) in str(caught.value)
    write_signed(path, sign(Manifest(), KEY))
    with pytest.raises(ManifestError, match="not of run 0000"):
        parse_signed(path.read_bytes(), "peer", RunId("0" * 64))


def test_manifest_files_that_are_not_name_the_file(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ManifestError, match=r"none\.toml: cannot be read: .*swarmnode init"):
        read_manifest(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_bytes(b"name = '\xff'")
    with pytest.raises(ManifestError, match=r"bad\.toml: not UTF-8 at byte 8"):
        read_manifest(tmp_path / "bad.toml")


def test_owner_key_round_trip_and_refusals(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "owner.key"
    key = create_owner(path)
    assert public_bytes(load_owner(path)) == public_bytes(key)
    before = path.read_bytes()
    with pytest.raises(UsageError, match="never overwritten"):
        create_owner(path)
    assert path.read_bytes() == before
    path.chmod(0o640)
    with pytest.raises(NotPermitted, match="chmod 600"):
        load_owner(path)
    with pytest.raises(ManifestError, match="missing"):
        load_owner(tmp_path / "none.key")


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "not an unencrypted PEM"),
        (b"x" * 5000, "longer than"),
        (
            generate_private_key(SECP256R1()).private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
            "another kind",
        ),
        (
            KEY.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.BestAvailableEncryption(b"secret"),
            ),
            "not an unencrypted PEM",
        ),
    ],
)
def test_a_malformed_owner_key_is_refused(tmp_path: pathlib.Path, raw: bytes, says: str) -> None:
    path = tmp_path / "owner.key"
    path.write_bytes(raw)
    os.chmod(path, 0o600)
    with pytest.raises(ManifestError, match=says):
        load_owner(path)

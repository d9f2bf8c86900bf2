"""Manifests as distributed: canonical bytes, signed by the owner. Their hash is the run's id."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from swarmnode.base import bounds
from swarmnode.base.errors import ManifestError, ManifestVersionError, RemoteFault, os_errors
from swarmnode.base.ids import RunId, digest
from swarmnode.base.wire import record_pb2
from swarmnode.run import owner as owner_key
from swarmnode.run.manifest.spec import CONSTANTS, FIELDS, Manifest
from swarmnode.run.manifest.text import MANIFEST_BYTES_MAX, from_tree, value_of

DOMAIN = b"swarmnode/manifest/v1\0"
FORMAT = 1
OWNER_BYTES = 32
SIGNATURE_BYTES = 64
ADDED = frozenset(
    {
        "access.recovery",
        "gossip.butterfly",
        "gossip.delay",
        "pipeline.span_max",
    }
)
"""Fields that earlier versions do not know: left out where they have their default."""
SIGNED_BYTES_MAX = MANIFEST_BYTES_MAX + 1024 + 64 * 4200  # 64 amendments (run/admission/amendment.py)


def canonical(manifest: Manifest) -> bytes:
    """The canonical bytes of `manifest`: JSON, keys sorted, no spaces, ASCII, every field present, CONSTANTS
    too, but empty ones of [about] and the defaults of [transport] and of ADDED ones, floats in the shortest form that
    reads back the same. Raises ManifestError for a value that is not allowed."""
    tree: dict[str, Any] = {"format": FORMAT}
    usual = Manifest()
    for field in FIELDS:
        value = field.check.accept(value_of(manifest, field.name))
        if (field.table, value) in (("about", ""), ("transport", "libp2p")):
            continue  # runs that were signed before there was such a table stay what they are
        if field.name in ADDED and value == value_of(usual, field.name):
            continue
        place = tree.setdefault(field.table, {}) if field.table else tree
        if value is None:
            raise ManifestError(f"{field.name} = {value_of(manifest, field.name)!r}: allowed is {field.check.allowed}")
        place[field.key] = value
    for name, constant in CONSTANTS.items():
        table, _, key = name.rpartition(".")
        if constant.signed:
            tree[table][key] = constant.value
    return json.dumps(tree, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def run_id_of(canonical_bytes: bytes, owner_public_key: bytes) -> RunId:
    """SHA-256 over the canonical manifest and its owner, 64 hex digits."""
    return RunId(digest("manifest", canonical_bytes, owner_public_key).hex())


def sign(manifest: Manifest, owner_private: Ed25519PrivateKey) -> record_pb2.SignedManifest:
    """`manifest` signed by its owner, ready for nodes. Raises ManifestError if it is not valid."""
    raw = canonical(manifest)
    from_canonical(raw)
    return record_pb2.SignedManifest(
        manifest=raw, owner=owner_key.public_bytes(owner_private), signature=owner_private.sign(DOMAIN + raw)
    )


def verify(signed: record_pb2.SignedManifest, expected_run_id: RunId | None) -> tuple[Manifest, RunId]:
    """The manifest and its run id, after checking sizes, signature, run id and every field, in this order.

    `expected_run_id` None accepts any run. Raises ManifestError.
    """
    if len(signed.manifest) > MANIFEST_BYTES_MAX:
        raise ManifestError(f"signed manifest of {len(signed.manifest)} bytes; at most {MANIFEST_BYTES_MAX}")
    if len(signed.owner) != OWNER_BYTES or len(signed.signature) != SIGNATURE_BYTES:
        raise ManifestError(
            "signed manifest without an owner's key and signature; ask the run's organiser for it again"
        )
    try:
        Ed25519PublicKey.from_public_bytes(signed.owner).verify(signed.signature, DOMAIN + signed.manifest)
    except (InvalidSignature, ValueError):
        raise ManifestError("the manifest's signature is wrong: it was changed after its owner signed it") from None
    run_id = run_id_of(signed.manifest, signed.owner)
    if expected_run_id is not None and run_id != expected_run_id:
        raise ManifestError(f"this is the manifest of run {run_id[:16]}..., not of run {expected_run_id[:16]}...")
    return from_canonical(signed.manifest), run_id


def from_canonical(raw: bytes) -> Manifest:
    """The manifest of canonical bytes. Raises ManifestError unless `canonical` restores the same bytes."""
    try:
        tree = json.loads(raw.decode("ascii"))
    except (ValueError, RecursionError):
        raise ManifestError("signed manifest: not JSON; ask the run's organiser for it again") from None
    if not isinstance(tree, dict) or tree.pop("format", None) != FORMAT:
        raise ManifestVersionError(
            f"signed manifest of a format other than {FORMAT}: made by another version of swarmnode"
        )
    manifest = from_tree(tree, "signed manifest")
    if canonical(manifest) != raw:
        raise ManifestVersionError("signed manifest: not in canonical form: made by another version of swarmnode")
    return manifest


def parse_signed(raw: bytes, origin: str, expected_run_id: RunId | None) -> tuple[record_pb2.SignedManifest, Manifest]:
    """A serialised SignedManifest and its manifest. Raises ManifestError that begins with `origin`."""
    if len(raw) > SIGNED_BYTES_MAX:
        raise ManifestError(f"{origin}: longer than {SIGNED_BYTES_MAX} bytes; is this a signed manifest?")
    try:
        signed = bounds.parse(record_pb2.SignedManifest, raw, origin)
    except RemoteFault:
        raise ManifestError(f"{origin}: not a signed manifest; ask the run's organiser for it again") from None
    try:
        manifest, _ = verify(signed, expected_run_id)
    except ManifestError as error:
        raise type(error)(f"{origin}: {error}") from None
    return signed, manifest


def read_signed(path: pathlib.Path, expected_run_id: RunId | None = None) -> tuple[record_pb2.SignedManifest, Manifest]:
    """The signed manifest in the file `path`, verified. Raises ManifestError."""
    with os_errors(ManifestError, f"{path}: cannot be read"), path.open("rb") as file:
        raw = file.read(SIGNED_BYTES_MAX + 1)
    return parse_signed(raw, str(path), expected_run_id)

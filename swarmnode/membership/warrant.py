"""The owner's leave to archive a run: one machine may copy the slow weights of every stage without taking part.

The owner's key signs the run, the machine's public key and a date. A warrant is of no use to another machine: the
transport proves the caller's key. It gives access to what every member of the run can copy anyway, and to less of it
(transfer/donor.py), so one that is lost costs each node a bounded share of its line until it expires or the
owner bans the machine.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.identity import SIGNATURE_BYTES, public_key_of, signed_by
from swarmnode.ids import PeerId, RunId, digest
from swarmnode.wire import access_pb2 as wire

_DOMAIN = b"swarmnode/archive/v1\0"


def sign_warrant(owner: Ed25519PrivateKey, run_id: RunId, machine: PeerId, expires_unix_s: int) -> wire.Warrant:
    """The owner's leave for `machine` to archive run `run_id` until `expires_unix_s`."""
    return wire.Warrant(
        expires_unix_s=expires_unix_s, signature=owner.sign(_DOMAIN + _digest(run_id, machine, expires_unix_s))
    )


def check_warrant(
    shown: wire.Warrant, *, owners: Sequence[bytes], run_id: RunId, machine: PeerId, now_unix_s: float
) -> tuple[bool, str]:
    """(whether `machine` may archive run `run_id` of `owners` now, why or why not). The signature is checked last."""
    if len(shown.signature) != SIGNATURE_BYTES:
        return False, "its warrant is malformed"
    if shown.expires_unix_s <= now_unix_s:
        return False, "its warrant has expired: the owner signs a new one"
    if not any(_verifies(owner, run_id, machine, shown.expires_unix_s, shown.signature) for owner in owners):
        return False, "its warrant is not signed by the owner of this run, or is another machine's"
    return True, "the owner's warrant"


@functools.lru_cache(maxsize=256)
def _verifies(owner: bytes, run_id: RunId, machine: PeerId, expires_unix_s: int, signature: bytes) -> bool:
    return signed_by(owner, _DOMAIN + _digest(run_id, machine, expires_unix_s), signature)


def _digest(run_id: RunId, machine: PeerId, expires_unix_s: int) -> bytes:
    return digest(run_id, public_key_of(machine), expires_unix_s)

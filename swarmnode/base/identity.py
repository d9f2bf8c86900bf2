"""A node's identity: an Ed25519 key whose public half is encoded in the peer id.

libp2p's peer-ids specification: short keys are not hashed, so the peer id *is* the serialised public key behind a six
byte prefix, written in base58. Making, signing and verifying need no hivemind.
"""

from __future__ import annotations

import functools
import sys

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from google.protobuf.message import Message

from swarmnode.base.errors import RemoteFault
from swarmnode.base.ids import PeerId, digest64, machine_of, part_id, part_of

SEED_BYTES = 32
PUBLIC_KEY_BYTES = 32
SIGNATURE_BYTES = 64

_DIGITS = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_VALUES = {digit: value for value, digit in enumerate(_DIGITS)}
_PEER_ID_CHARACTERS = 52
_QUALITIES = "amber brave calm clear cosy crisp early fair fleet gentle golden green happy kind light lively"
_THINGS = "acorn alder aspen birch brook cedar clover crane dune elm falcon fern finch fox heron hill"
# Identity multihash (0x00) of 36 bytes (0x24): protobuf PublicKey{Type: Ed25519 (08 01), Data: 32 bytes (12 20 ...)}.
_PREFIX = bytes.fromhex("002408011220")


def _base58(raw: bytes) -> str:
    number = int.from_bytes(raw, "big")
    digits = []
    while number:
        number, digit = divmod(number, 58)
        digits.append(_DIGITS[digit])
    zeros = len(raw) - len(raw.lstrip(b"\0"))
    return "1" * zeros + "".join(reversed(digits))


def peer_id_of(public_key: bytes) -> PeerId:
    """The peer id (52 characters, "12D3KooW...") of an Ed25519 public key of 32 bytes."""
    assert len(public_key) == PUBLIC_KEY_BYTES, f"an Ed25519 public key has 32 bytes, not {len(public_key)}"
    return PeerId(sys.intern(_base58(_PREFIX + public_key)))


def peer_id_bytes(peer_id: PeerId) -> bytes:
    """The 38 bytes of a peer id, as libp2p sends them. Raises RemoteFault as `public_key_of` does."""
    return _PREFIX + public_key_of(peer_id)


def friendly_name(peer_id: PeerId) -> str:
    """Two words and a number that a peer id stands for: a name to show, which tells nothing of its machine."""
    number = digest64("name", peer_id)
    quality, thing = (words.split()[(number >> shift) % 16] for words, shift in ((_QUALITIES, 0), (_THINGS, 4)))
    return f"{quality}-{thing}-{(number >> 8) % 100}"


@functools.lru_cache(maxsize=4096)
def public_key_of(peer_id: PeerId) -> bytes:
    """The 32 bytes of the Ed25519 public key inside `peer_id`, that of the machine for a part. Raises RemoteFault if it
    holds none."""
    wrong = RemoteFault(f"{peer_id[:64]!r} is not an Ed25519 peer id (52 base58 characters, 12D3KooW...)")
    if part_of(peer_id) == -1:
        raise wrong
    peer_id = machine_of(peer_id)
    if len(peer_id) != _PEER_ID_CHARACTERS:
        raise wrong
    number = 0
    for character in peer_id:
        value = _VALUES.get(character)
        if value is None:
            raise wrong
        number = number * 58 + value
    try:
        raw = number.to_bytes(len(_PREFIX) + PUBLIC_KEY_BYTES, "big")
    except OverflowError:
        raise wrong from None
    if not raw.startswith(_PREFIX) or _base58(raw) != peer_id:
        raise wrong
    return raw[len(_PREFIX) :]


def verify(peer_id: PeerId, message: bytes, signature: bytes) -> bool:
    """Whether the key inside `peer_id` signed `message`; False if malformed. Takes 70 us (measured: `swarmnode bench
    micro`)."""
    try:
        return signed_by(public_key_of(peer_id), message, signature)
    except RemoteFault:
        return False


def signed_by(key: bytes, message: bytes, signature: bytes) -> bool:
    """Whether the public `key`, 32 bytes, signed `message`; False if malformed."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def unsigned(domain: bytes, message: Message) -> bytes:
    """The bytes that `message.signature` signs: `domain`, then all fields but the signature."""
    bare = type(message)()
    bare.CopyFrom(message)
    bare.ClearField("signature")
    return domain + bare.SerializeToString(deterministic=True)


class Identity:
    """A private key and its peer id."""

    __slots__ = ("_key", "peer_id", "public_key")

    def __init__(self, key: Ed25519PrivateKey, stage: int | None = None) -> None:
        """`stage`: of the part of a machine that this is; None: the machine itself."""
        self._key = key
        self.public_key = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        machine = peer_id_of(self.public_key)
        self.peer_id = machine if stage is None else part_id(machine, stage)

    @classmethod
    def generate(cls) -> Identity:
        """A new identity from the operating system's randomness."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def of_seed(cls, seed: bytes) -> Identity:
        """The identity of a 32 byte seed. The same seed gives the same peer id (simulation, tests, key files)."""
        assert len(seed) == SEED_BYTES, f"an Ed25519 seed has 32 bytes, not {len(seed)}"
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    def part(self, stage: int) -> Identity:
        """The identity of this machine's part for `stage`: the same key under another peer id."""
        return Identity(self._key, stage)

    @property
    def seed(self) -> bytes:
        """The 32 secret bytes."""
        return self._key.private_bytes(
            serialization.Encoding.Raw, serialization.PrivateFormat.Raw, serialization.NoEncryption()
        )

    def sign(self, message: bytes) -> bytes:
        """The Ed25519 signature (64 bytes) of `message`. Takes 25 us (measured, one core)."""
        return self._key.sign(message)

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"

"""The signed words of a round in pieces, and what proves that a member lied.

Every member says five kinds of words at most: a commit to its packet, a roster, the means of its pieces, a close, and a
hold of a close. A word is signed together with the round, so two different ones of the same kind prove by themselves
that their member told others something else (`contradict`). A process that was started anew may say another: it does
not know what it said before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from swarmnode.base.bounds import opened
from swarmnode.base.bounds.table import WORD_NBYTES_MAX
from swarmnode.base.errors import RemoteFault
from swarmnode.base.identity import SIGNATURE_BYTES, Identity, verify
from swarmnode.base.ids import PeerId, RunId, short, stage_name
from swarmnode.base.ports import Data
from swarmnode.base.wire import call_pb2 as wire

DIGEST_NBYTES = 16  # of a word, a piece, a list: finding another with the same takes 2^128 tries
_DOMAIN = b"swarmnode/butterfly/v1\0"


def short_digest(data: Data) -> bytes:
    """The first bytes of a digest of `data`: BLAKE2b, which takes a nanosecond a byte without special instructions."""
    return hashlib.blake2b(data, digest_size=DIGEST_NBYTES).digest()


Digest = Callable[[Data], bytes]
"""The digest (16 bytes) of a piece or a mean: ports.Replica.piece_digest."""


def digests_of(pieces: Iterable[Data], digest: Digest = short_digest) -> bytes:
    """The digests of `pieces`, one after the other."""
    return b"".join(digest(piece) for piece in pieces)


def digest_at(digests: bytes, index: int) -> bytes:
    """One of `digests`; empty behind their end."""
    return digests[index * DIGEST_NBYTES : (index + 1) * DIGEST_NBYTES]


def pack_floats(values: Sequence[float]) -> bytes:
    """`values` as float32, little-endian."""
    return np.asarray(values, "<f4").tobytes()


def unpack_floats(data: bytes, count: int, what: str) -> list[float]:
    """The inverse. Raises RemoteFault unless `data` is of `count` finite numbers."""
    if len(data) != 4 * count:
        raise RemoteFault(f"{what} of {len(data)} bytes; {count} float32 are due")
    values = np.frombuffer(data, "<f4")
    if not np.isfinite(values).all():
        raise RemoteFault(f"{what} that are not finite")
    return [float(value) for value in values]


def pack_bits(flags: Sequence[bool]) -> bytes:
    """A bit for each of `flags`, least significant first."""
    return np.packbits(np.asarray(flags, bool), bitorder="little").tobytes()


def unpack_bits(data: bytes, count: int, what: str) -> list[bool]:
    """The inverse. Raises RemoteFault unless `data` has `count` bits."""
    if len(data) != -(-count // 8):
        raise RemoteFault(f"{what} of {len(data)} bytes for {count} members")
    return [bool(bit) for bit in np.unpackbits(np.frombuffer(data, np.uint8), count=count, bitorder="little")]


@dataclass(frozen=True, slots=True)
class Said:
    """A word as it was signed, its content, and its digest."""

    signed: wire.SignedWord
    word: wire.RoundWord
    digest: bytes

    @property
    def member(self) -> PeerId:
        return PeerId(self.word.member)

    @property
    def kind(self) -> str:
        return self.word.WhichOneof("body") or ""


def say(identity: Identity, run_id: RunId, word: wire.RoundWord) -> Said:
    """`word`, signed by `identity`, which is its member."""
    word.member = identity.peer_id
    raw = word.SerializeToString(deterministic=True)
    signed = wire.SignedWord(word=raw, signature=identity.sign(_DOMAIN + run_id.encode() + raw))
    return Said(signed, word, short_digest(raw))


def hear(signed: wire.SignedWord, run_id: RunId, stage: int, kind: str = "") -> Said:
    """A member's statement about a round of `stage`: a word of `kind` (empty: any). Raises RemoteFault if it is
    malformed, out of range, or not signed by its member; cheapest first."""
    word = opened(wire.RoundWord, signed.word, "a word on a round")
    found = word.WhichOneof("body") or ""
    if word.stage != stage or not found or (kind and found != kind):
        raise RemoteFault(
            f"a word {found!r} on a round of {stage_name(word.stage)}; {kind or 'one'!r} of {stage_name(stage)} is due"
        )
    if found == "commit" and len(signed.word) > WORD_NBYTES_MAX - SIGNATURE_BYTES - 8:
        raise RemoteFault(f"a commit of {len(signed.word)} bytes")
    if len(signed.signature) != SIGNATURE_BYTES or not verify(
        PeerId(word.member), _DOMAIN + run_id.encode() + signed.word, signed.signature
    ):
        raise RemoteFault(f"a word of {short(PeerId(word.member))} is forged: its signature does not verify")
    return Said(signed, word, short_digest(signed.word))


def commit_digest(digests: bytes, lengths: bytes) -> bytes:
    """The digest of a packet's pieces in its commit."""
    return short_digest(digests + lengths)


def packet_length(lengths: Sequence[float]) -> float:
    """The length of a packet by those of its pieces, alike on each machine."""
    return float(np.sqrt(np.square(np.asarray(lengths, np.float64)).sum()))


def _subject(said: Said) -> tuple[object, ...]:
    """The subject about which a process says one word."""
    word = said.word
    about: object = None
    match said.kind:
        case "roster":
            about = word.roster.attempt
        case "means":
            about = word.means.roster
        case "close":
            about = word.close.roster
    return (word.member, word.incarnation, word.stage, word.round, said.kind, about)


def contradict(one: Said, other: Said) -> bool:
    """Whether both words are of one process on the same subject, and differ: honest nodes say one."""
    return _subject(one) == _subject(other) and one.digest != other.digest

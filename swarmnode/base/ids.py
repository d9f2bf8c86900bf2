"""Identifiers and seeded randomness: every identifier and every seed in swarmnode is made here.

Nothing here reads a clock or the machine's randomness, so a run can be replayed exactly.
"""

from __future__ import annotations

import functools
import hashlib
import random
import struct
import sys
from collections.abc import Sequence
from typing import NewType

PeerId = NewType("PeerId", str)
"""Base58 text of a libp2p peer id; the Ed25519 public key can be read from it. A machine that serves several stages is
several members: the further ones are parts of it (`part_id`)."""

PART_MARK = ":"  # no digit of base58

RunId = NewType("RunId", str)
"""SHA-256 of the canonical manifest and its owner, 64 hex digits."""

MicrobatchId = NewType("MicrobatchId", bytes)
"""16 bytes, unique in a run."""

MICROBATCH_ID_BYTES = 16


def digest(*parts: str | bytes | int | float) -> bytes:
    """SHA-256 (32 bytes) of `parts`, each tagged with its type and length so that no two tuples collide."""
    h = hashlib.sha256()
    for part in parts:
        match part:
            case bool() | int():
                raw = str(int(part)).encode()
                tag = b"i"
            case float():
                raw = struct.pack(">d", part)
                tag = b"f"
            case str():
                raw = part.encode()
                tag = b"s"
            case _:
                raw = bytes(part)
                tag = b"b"
        h.update(tag + struct.pack(">Q", len(raw)))
        h.update(raw)
    return h.digest()


def digest64(*parts: str | bytes | int | float) -> int:
    """The first 64 bits of `digest`, as an unsigned integer."""
    return int.from_bytes(digest(*parts)[:8], "big")


@functools.lru_cache(maxsize=1 << 16)
def _lot(peer: PeerId) -> int:
    return digest64("lot", peer)


def rank(peer: PeerId, salt: int) -> int:
    """The position of `peer` in one node's random order of all peers. Orders of different nodes are independent."""
    return ((_lot(peer) ^ salt) * 0x9E3779B97F4A7C15) % (1 << 64)  # an odd number, which mixes bits


def seeded(*parts: str | bytes | int | float) -> random.Random:
    """A generator for one purpose: `seeded(manifest.seed, "routing", peer_id)`."""
    return random.Random(digest(*parts))


def swarm_of(run_id: RunId, cut: int) -> RunId:
    """The id in the records of a run's nodes once its stages were cut anew by amendment `cut`; 0: as they began. Nodes
    of different cuts do not see each other. What headers, folders and protocols carry of the run's id stays."""
    return RunId(run_id[:32] + digest("cut", run_id, cut).hex()[:32]) if cut else run_id


def microbatch_id(feeder: PeerId, incarnation: int, serial: int) -> MicrobatchId:
    """The id of a feeder's `serial`-th microbatch since it started (`incarnation` differs between starts)."""
    return MicrobatchId(digest("microbatch", feeder, incarnation, serial)[:MICROBATCH_ID_BYTES])


@functools.lru_cache(maxsize=1 << 14)
def part_id(machine: PeerId, stage: int) -> PeerId:
    """The peer id of the part of `machine` that serves `stage` beside the machine's own: `KEY:STAGE`. So a key is one
    member of each stage at most, and one more that is free to choose."""
    return PeerId(sys.intern(f"{machine}{PART_MARK}{stage}"))


@functools.lru_cache(maxsize=1 << 14)
def machine_of(peer: PeerId) -> PeerId:
    """The peer id of the machine that `peer` is, or is a part of: what calls are sent to, and whose key signs."""
    return PeerId(sys.intern(peer.partition(PART_MARK)[0]))


@functools.lru_cache(maxsize=1 << 14)
def part_of(peer: PeerId) -> int | None:
    """The stage that `peer` is the part for; None if it is no part, -1 for text that no part has."""
    _, mark, stage = peer.partition(PART_MARK)
    if not mark:
        return None
    return int(stage) if stage.isascii() and stage.isdecimal() and len(stage) <= 3 and str(int(stage)) == stage else -1


@functools.lru_cache(maxsize=1 << 10)
def stage_name(stage: int) -> str:
    """A stage as people read it, counted from 1. Files, wire, manifests, metrics and JSON count from 0."""
    return f"stage {stage + 1}"


def stages_name(stages: Sequence[int]) -> str:
    """Stages in ascending order as people read them, counted from 1: "stage 2", "stages 1, 3-5"."""
    spans: list[list[int]] = []
    for stage in stages:
        if spans and spans[-1][1] == stage:
            spans[-1][1] = stage + 1
        else:
            spans.append([stage + 1, stage + 1])
    told = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"stage{'s' if len(stages) != 1 else ''} {told}"


def short(peer: PeerId) -> str:
    """The last eight characters of a peer id, enough to tell peers apart on a screen."""
    return peer[-8:]

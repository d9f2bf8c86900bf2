"""Inputs made from valid ones by small damage, and from nothing: seeded, so that a failure repeats."""

import random
from collections.abc import Iterator, Sequence

INTERESTING = (0, 1, 0x7F, 0x80, 0xFF, 0x0A, 0x20, 0x2D)
LENGTH_MAX = 1 << 16
SEPARATORS = frozenset(b' =\n,:[]{}"')


def inputs(seeds: Sequence[bytes], count: int, rng: random.Random, tokens: Sequence[bytes] = ()) -> Iterator[bytes]:
    """The seeds, then `count` damaged ones; `tokens` are words of the format, put where another word was."""
    yield from seeds
    for _ in range(count):
        if rng.random() < 0.02:
            yield rng.randbytes(rng.randrange(64))
            continue
        raw = bytearray(rng.choice(seeds))
        for _ in range(1 + min(6, int(rng.expovariate(0.7)))):
            if tokens and rng.random() < 0.4:
                replace_word(raw, rng.choice(tokens), rng)
            else:
                damage(raw, seeds, rng)
        yield bytes(raw[:LENGTH_MAX])


def damage(raw: bytearray, seeds: Sequence[bytes], rng: random.Random) -> None:
    """One small change."""
    at = rng.randrange(len(raw) + 1)
    match rng.randrange(8):
        case 0 if at < len(raw):
            raw[at] ^= 1 << rng.randrange(8)
        case 1 if at < len(raw):
            raw[at] = rng.choice(INTERESTING)
        case 2:
            del raw[at : at + rng.randrange(1, 9)]
        case 3:
            raw[at:at] = rng.randbytes(rng.randrange(1, 9))
        case 4:
            raw[at:at] = raw[at : at + rng.randrange(1, 33)]
        case 5:
            other = rng.choice(seeds)
            begin = rng.randrange(len(other) + 1)
            raw[at:] = other[begin:]
        case 6:
            del raw[at:]
        case _ if at + 4 <= len(raw):
            raw[at : at + 4] = rng.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\xff\xff\xff\x7f", b"\x80\x80\x80\x80"))


def replace_word(raw: bytearray, token: bytes, rng: random.Random) -> None:
    """What lies between two separators becomes `token`."""
    at = rng.randrange(len(raw) + 1)
    begin = next((i + 1 for i in range(at - 1, -1, -1) if raw[i] in SEPARATORS), 0)
    end = next((i for i in range(at, len(raw)) if raw[i] in SEPARATORS), len(raw))
    raw[begin:end] = token

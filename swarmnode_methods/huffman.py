"""Gradients in some 1.6 bits a weight: a uniform quantiser with a wide zero, and an entropy code for its numbers.

    s    = STEP times the root mean square of a block of 256, rounded up to bfloat16
    q    = sign(x) floor(|x| / s + 1/2 - DEAD), at most 7
    send q by a Huffman code of each two of them; what is read is q s

For normal numbers 1.74 bits, with steps .226 byte a parameter, and a mean square error of .13 of theirs [measured];
numbers with heavier tails need fewer bits, for less error. Lloyd's two bits (lloyd.py) are .28 byte and .12 to .17.
[Uniform thresholds with an entropy code are within a quarter of a bit of any quantiser: Gish and Pierce,
"Asymptotically efficient quantizing", 1968; a wide zero is better where zero is frequent: Sullivan, "Efficient scalar
quantization of exponential and Laplacian random variables", 1996.] STEP and DEAD were tried on the replica bench's
network [measured: docs/learning.md]. Rounding has no exact mean, so this is for methods with error feedback of their
own (gradient.py).

On the wire, for each 2^18 elements: the number of bytes of their codes, uint32, little endian; bfloat16 steps of all
blocks; the codes: q + 8 in four bits, the first in the low ones, the last block padded with zeros, and these bytes as a
raw stream of DEFLATE [RFC 1951] in which nothing is repeated, or as they are where that is no longer. Readers take any
such stream, so that members may have other builds of zlib.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from swarmnode.base.errors import RemoteFault
from swarmnode.base.ports import WireTensor
from swarmnode.model.tensor import MAGNITUDE_MAX
from swarmnode.train.gossip.compression.codec import Bytes, Done
from swarmnode_methods.delta import DeltaCodec
from swarmnode_methods.tiles import STEP_LEAST, check_steps, chunks, one_tensor, read_steps, wire_steps

BLOCK = 256  # elements that share a step [measured: 64 learn no better for .02 byte more, 1,024 a little less]
STEP = 1.2
DEAD = 0.1
LARGEST = 7
ZERO = 8  # the code of 0
COUNT_NBYTES = 4
USUAL_BITS = 1.65  # measured: of gradients of the replica bench's network; of normal numbers 1.74

BYTES = np.arange(256)
PAIRS = np.stack([(BYTES & 15) - ZERO, (BYTES >> 4) - ZERO], 1).astype(np.float32).view(np.int64)[:, 0]
"""The two numbers q of each byte, as one word: a table of words is read ten times as fast (measured)."""


class CodedChunk(NamedTuple):
    """The parts of a packet that hold elements [start, end)."""

    start: int
    end: int
    steps: Bytes
    codes: Bytes


def rows_of(elements: int) -> int:
    """Blocks that hold `elements`."""
    return -(-elements // BLOCK)


def plain_nbytes(elements: int) -> int:
    """Bytes of the codes of `elements` before DEFLATE."""
    return rows_of(elements) * BLOCK // 2


def deflated(codes: bytes) -> bytes:
    """`codes` as they travel: never more bytes."""
    stream = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
    short = stream.compress(codes) + stream.flush()
    return short if len(short) < len(codes) else codes


def inflated(codes: Bytes, nbytes: int, packet: str) -> Bytes:
    """The inverse: `nbytes` bytes. Raises RemoteFault about `packet`, and never makes more."""
    if len(codes) == nbytes:
        return codes
    stream = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        found = stream.decompress(codes.tobytes(), nbytes + 1)
    except zlib.error as error:
        raise RemoteFault(f"{packet} whose codes are no stream: {error}") from error
    if len(found) != nbytes or not stream.eof or stream.unused_data:
        raise RemoteFault(f"{packet} whose codes are not {nbytes} bytes")
    return np.frombuffer(found, np.uint8)


def chunks_of(data: Bytes, parameters: int, packet: str) -> Iterator[CodedChunk]:
    """The chunks of the `packet` of `parameters`. Raises RemoteFault about it where it ends too early."""
    at = 0
    for start, end in chunks(0, parameters):
        steps_nbytes = 2 * rows_of(end - start)
        codes_at = at + COUNT_NBYTES + steps_nbytes
        count = int.from_bytes(data[at : at + COUNT_NBYTES].tobytes(), "little")
        if not 0 < count <= plain_nbytes(end - start) or codes_at + count > len(data):
            raise RemoteFault(f"{packet} of {len(data)} bytes, in which {count} are due from {codes_at} on")
        yield CodedChunk(start, end, data[at + COUNT_NBYTES : codes_at], data[codes_at : codes_at + count])
        at = codes_at + count
    if at != len(data):
        raise RemoteFault(f"{packet} of {len(data)} bytes; its last chunk ends at {at}")


class Huffman(DeltaCodec):
    """0.21 bytes a parameter, as a rule."""

    name: ClassVar[str] = "huffman"
    feedback: ClassVar[bool] = False
    unit: ClassVar[int] = 1

    def __init__(self) -> None:
        super().__init__()
        self._packet = f"{self.name} packet"
        self._coded: list[bytes] = []  # by chunk, of the message being written

    def nbytes(self, parameters: int) -> int:
        return sum(
            COUNT_NBYTES + 2 * rows_of(end - start) + plain_nbytes(end - start) for start, end in chunks(0, parameters)
        )

    def least_nbytes(self, parameters: int) -> int:
        """The bytes of usual gradients."""
        return self.nbytes(parameters) - plain_nbytes(parameters) + round(parameters * USUAL_BITS / 8)

    @torch.no_grad()
    def begin(self, flat: torch.Tensor) -> int:
        self._coded = [self._chunk(flat[start:end]) for start, end in chunks(0, flat.numel())]
        return sum(map(len, self._coded))

    def _chunk(self, part: torch.Tensor) -> bytes:
        """The bytes of elements `part` of one chunk."""
        x = part.detach().to("cpu", torch.float32)
        x = torch.nn.functional.pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)
        steps = x.square().mean(1).sqrt_().mul_(STEP).clamp_(min=STEP_LEAST)
        packed_steps = np.empty(2 * len(steps), np.uint8)
        wire_steps(steps, packed_steps)
        shares = x / steps.unsqueeze(1)
        shares.add_(shares.sign(), alpha=0.5 - DEAD).clamp_(-LARGEST, LARGEST)
        codes = shares.to(torch.int8).add_(ZERO).view(-1).numpy()  # towards zero: floor of the magnitude
        pairs = codes.view("<u2")
        short = deflated((pairs | pairs >> 4).astype(np.uint8).tobytes())
        return len(short).to_bytes(COUNT_NBYTES, "little") + packed_steps.tobytes() + short

    def code(self, wire: Bytes, flat: torch.Tensor, seed: int, done: Done) -> None:
        at = 0
        for coded in self._coded:
            wire[at : at + len(coded)] = np.frombuffer(coded, np.uint8)
            at += len(coded)
            done(at)
        self._coded = []

    def check(self, tensors: Sequence[WireTensor], parameters: int) -> None:
        least = self.nbytes(parameters) - plain_nbytes(parameters)
        self.inspect(one_tensor(tensors, self.name, parameters, least, self.nbytes(parameters)), parameters)

    def inspect(self, data: Bytes, parameters: int) -> None:
        for chunk in chunks_of(data, parameters, self._packet):
            check_steps(chunk.steps, MAGNITUDE_MAX / ZERO, self._packet)
            inflated(chunk.codes, plain_nbytes(chunk.end - chunk.start), self._packet)

    def uncode(self, data: Bytes, parameters: int, start: int, end: int) -> torch.Tensor:
        before_end = itertools.takewhile(lambda chunk: chunk.start < end, chunks_of(data, parameters, self._packet))
        found = [
            self._values(chunk)[max(start - chunk.start, 0) : end - chunk.start]
            for chunk in before_end
            if chunk.end > start
        ]
        return torch.cat(found) if found else torch.empty(0)

    def _values(self, chunk: CodedChunk) -> torch.Tensor:
        """The elements of a chunk, float32."""
        pairs = inflated(chunk.codes, plain_nbytes(chunk.end - chunk.start), self._packet)
        values = torch.from_numpy(np.take(PAIRS, pairs).view(np.float32)).view(-1, BLOCK)
        values.mul_(read_steps(chunk.steps).unsqueeze(1))
        return values.view(-1)[: chunk.end - chunk.start]


class WhitenedHuffman(Huffman):
    """The same of whitened gradients (whitening.py)."""

    name: ClassVar[str] = "whitened"
    whitened: ClassVar[bool] = True

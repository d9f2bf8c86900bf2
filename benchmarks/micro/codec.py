"""Speed of codecs relative to a memory copy in the same run on one core.

The bound of a pass is the bytes that it must read and write, over the traffic of a copy (which reads and writes each
byte). An encoder reads float32 weights, slow weights for a relative codec, and a residual; it writes the residual and
the packet. A decoder does the reverse. Times are CPU seconds of one thread, the best of several rounds in which all
codecs alternate, so that load on the machine affects all alike.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from swarmnode.run.gossip_rules import codecs
from swarmnode.train.gossip.compression import Codec, build, codec, codec_class
from swarmnode_methods.delta import DeltaCodec

PARAMETERS = 1 << 24
ROUNDS = 7
COPIES = 4  # in a row, so that a copy takes as long as an encoding and meets the same load
SPREAD = 1e-3  # of the weights' own deviation: about the difference between replicas
ENCODE_TARGETS = {"int8": 3.5, "modular6": 3.5, "modular4": 3.5, "modular3": 3.5, "topk64": 5.0}  # times the bound
TOPK_C_TARGET = 1.5  # with the extension
DECODE_TARGET_GB_S = 6.0


def run(
    names: Sequence[str] = tuple(codecs()),
    parameters: int = PARAMETERS,
    rounds: int = ROUNDS,
    *,
    extension: bool = True,
) -> dict[str, Any]:
    """{"memcpy GB/s", "parameters", "codecs": [{"codec", "encode GB/s", "of bound", "target", "decode GB/s", ...}]}.

    GB/s are of float32 weights. "core s / 100 M" is encoding and decoding 100 M parameters, CPU seconds.
    Without `extension`: numpy and torch alone, as on a machine without a C compiler.
    """
    if extension:
        extension = build(*names)
    torch.set_num_threads(1)
    with contextlib.ExitStack() as without:
        for name in names:
            if not extension and (library := codec_class(name).library) is not None:
                without.enter_context(library.unused())
        coders = {name: codec(name) for name in names}
    work, nbytes = _work(coders, parameters)
    core = _least_seconds(work, rounds)
    core["memcpy"] /= COPIES
    return {
        "memcpy GB/s": 4 * parameters / core["memcpy"] / 1e9,
        "extension": extension,
        "parameters": parameters,
        "decode target GB/s": DECODE_TARGET_GB_S,
        "codecs": [_row(coder, nbytes[name], parameters, core, extension=extension) for name, coder in coders.items()],
    }


def _work(coders: Mapping[str, Codec], parameters: int) -> tuple[dict[str, Callable[[], object]], dict[str, int]]:
    """(the work that is timed, by name: copying memory, and for each codec encoding and decoding; bytes of a packet by
    codec)."""
    draw = torch.Generator().manual_seed(0)
    phi = torch.randn(parameters, generator=draw)
    flat = phi + SPREAD * torch.randn(parameters, generator=draw)
    ours = phi + SPREAD * torch.randn(parameters, generator=draw)
    out = torch.empty(parameters)

    def copy() -> None:
        for _ in range(COPIES):
            out.copy_(flat)

    work: dict[str, Callable[[], object]] = {"memcpy": copy}
    nbytes: dict[str, int] = {}
    for name, coder in coders.items():
        packet = coder.encode(flat, reference=phi, seed=1)
        nbytes[name] = sum(tensor.nbytes for tensor in packet)
        work[f"{name} encode"] = partial(coder.encode, flat, reference=phi, seed=2)
        work[f"{name} decode"] = partial(coder.read, packet, 0, out, ours)
    return work, nbytes


def _least_seconds(work: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The least processor seconds of each piece of work in `rounds` turns."""
    core = dict.fromkeys(work, math.inf)
    for _ in range(rounds):
        for what, do in work.items():
            began = time.process_time()
            do()
            core[what] = min(core[what], time.process_time() - began)
    return core


def _row(coder: Codec, nbytes: int, parameters: int, core: Mapping[str, float], *, extension: bool) -> dict[str, Any]:
    name = coder.name
    encode_s = core[f"{name} encode"]
    decode_s = core[f"{name} decode"]
    memory = 8 * parameters / core["memcpy"]  # bytes a second, read and written
    bound_s = (_traffic(coder, parameters) + nbytes) / memory
    back_s = (nbytes + 4 * parameters * (2 if coder.relative else 1)) / memory
    return {
        "codec": name,
        "bytes/param": nbytes / parameters,
        "encode GB/s": 4 * parameters / encode_s / 1e9,
        "of bound": encode_s / bound_s,
        "target": TOPK_C_TARGET if extension and name == "topk64" else ENCODE_TARGETS.get(name, math.nan),
        "decode GB/s": 4 * parameters / decode_s / 1e9,
        "decode of bound": decode_s / back_s,
        "core s / 100 M": (encode_s + decode_s) * 1e8 / parameters,
    }


def _traffic(coder: Codec, parameters: int) -> int:
    """Bytes of float32 an encoding must read and write: the weights, those of the last round too for a relative codec,
    and a residual back and forth for one that keeps what it does not send."""
    buffers = 2 if coder.relative else 3 if isinstance(coder, DeltaCodec) and coder.feedback else 1
    return 4 * parameters * buffers

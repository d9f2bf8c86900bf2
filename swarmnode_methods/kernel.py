"""Inner loops of codecs in C, if this machine can compile them; the torch operations give the same bits.

A codec's `library` compiles one file once into the user's cache (about a second). The wheel stays pure Python. ctypes
releases the interpreter lock, so the event loop runs while a packet is coded. Measured (`swarmnode bench codec`, a busy
core), GB/s of float32 without and with C: int8 encode 3.7 and 6.3, modular4 encode 2.0 and 4.6, decode 1.5 and 7.1; on
another day topk64 encode 1.8 and 5.6, decode 5.4 and 19.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from swarmnode_methods.native_build import Compiled, Library

HEADER = Path(__file__).with_name("block.h")
FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_long, "f": ctypes.c_float, "i": ctypes.c_int}


def kernels(beside: str, name: str, **signatures: str) -> Library[ctypes.CDLL | None]:
    """The functions of the C file `name` in the folder of the module `beside`, with their arguments' TYPES; they return
    nothing."""

    def load(path: Path) -> ctypes.CDLL:
        library = ctypes.CDLL(str(path))
        for function, arguments in signatures.items():
            found = getattr(library, function)
            found.argtypes = [TYPES[letter] for letter in arguments]
            found.restype = None
        return library

    source = Path(beside).with_name(name)
    return Library(Compiled(source.stem, (source, HEADER), FLAGS, tuned=True), load, None)

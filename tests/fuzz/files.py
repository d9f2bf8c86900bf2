"""Targets of what lies in files and mirrors: indexes, headers, checkpoints; and of an owner's words besides."""

import json
import struct
from collections.abc import Callable

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.base.identity import Identity
from swarmnode.base.ids import RunId
from swarmnode.base.wire import access_pb2
from swarmnode.data.base_index import parse_base, written_anew
from swarmnode.data.base_maker import stored_tensors
from swarmnode.data.index import parse_index
from swarmnode.keep.recovery import tensorfile
from swarmnode.keep.recovery.checkpoint import checkpoint_of
from swarmnode.run import owner
from swarmnode.run.admission.access import check_warrant, sign_warrant
from swarmnode.run.admission.amendment import _DOMAIN as AMENDMENT_DOMAIN
from swarmnode.run.admission.amendment import Amendments
from swarmnode.run.manifest import Manifest

RUN = RunId("ab" * 32)
MACHINE = Identity.of_seed(b"m" * 32).peer_id
OWNER = Ed25519PrivateKey.from_private_bytes(b"o" * 32)
KEY = owner.public_bytes(OWNER)
HASH = "0" * 64


def canonical(tree: object) -> bytes:
    return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()


def index() -> bytes:
    split = {
        "chunk_tokens": 64,
        "documents": 2,
        "shards": [{"name": "train-00000.bin", "tokens": 100, "sha256": [HASH, HASH]}],
    }
    other = {**split, "shards": [{"name": "validation-00000.bin", "tokens": 64, "sha256": [HASH]}]}
    about = {"format": "swarmnode-data-1", "tokenizer": HASH, "vocabulary": 256, "end_token": 3, "loss_mask": False}
    return canonical({**about, "train": split, "validation": other})


def base_index() -> bytes:
    file = {"name": "model.safetensors", "nbytes": 4096, "starts": [64, 2112], "sizes": [2048, 1024]}
    tensor = {"dtype": "F32", "shape": [512], "pieces": [[0, 64, 512]]}
    files = [{**file, "sha256": [HASH, HASH]}]
    tensors = {"model.norm.weight": tensor}
    return canonical({"format": "swarmnode-base-1", "files": files, "tensors": tensors})


def tensor_file() -> bytes:
    head = canonical({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "__metadata__": {"format": "pt"}})
    return struct.pack("<Q", len(head)) + head + bytes(8)


def checkpoint() -> bytes:
    model = {"layers": 2, "width": 8, "heads": 2, "vocabulary": 256, "context": 16}
    about = {"run_id": RUN, "run_name": "run", "stages": 1, "model": model, "tokenizer": "bytes", "block_samples": 4}
    file = {"name": "a", "section": "phi", "nbytes": 8, "sha256": HASH, "tensors": {"w": [2]}}
    part = {
        "stage": 0,
        "round": 1,
        "peer": MACHINE,
        "inner_steps": 3,
        "gradient_norm": 0.5,
        "bump_steps": 0,
        "progress": {},
        "blocks_below": 0,
        "blocks": [1],
        "files": [file],
    }
    said = {"label": "x", "round": 1, "samples": 8, "progress": {}, "parts": [part]}
    return canonical({"format": 1, "origin": {**about, "manifest": ""}, **said})


class Files:
    """A model's folder whose only file is `raw`."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        return self._raw[offset : offset + nbytes]

    def read_whole(self, name: str, nbytes_max: int) -> bytes | None:
        return None


def take_tensor_headers(raw: bytes) -> None:
    for tensor in stored_tensors(Files(raw)).values():
        assert tensor.nbytes >= 0 and tensor.offset >= 0


def take_tensor_file(raw: bytes) -> None:
    tensors, _ = tensorfile.read(raw, "file")
    assert sum(view.nbytes for _, view in tensors.values()) <= (1 + len(tensors)) * len(raw)


def take_small_file(raw: bytes) -> None:
    written_anew(raw, "config.json")
    written_anew(raw, "chat_template.jinja")


def amendment() -> bytes:
    made = Amendments(Manifest(), RUN, KEY)
    made.sign(OWNER, 200, {"inner.muon_learning_rate": 0.001}, [KEY])
    return made.signed[0].amendment


def take_amendment_inside(raw: bytes) -> None:
    """A stranger with a run of its own signs what it made up."""
    signed = access_pb2.SignedAmendment(amendment=raw, signature=OWNER.sign(AMENDMENT_DOMAIN + raw))
    Amendments(Manifest(), RUN, KEY).learn([signed])


def take_warrant(raw: bytes) -> None:
    shown = access_pb2.Warrant.FromString(raw)
    permit, reason = check_warrant(shown, owners=[KEY], run_id=RUN, machine=MACHINE, now_unix_s=1e9)
    assert reason and (
        not permit or shown.signature == sign_warrant(OWNER, RUN, MACHINE, shown.expires_unix_s).signature
    )


SEEDS: dict[str, tuple[bytes, Callable[[bytes], object]]] = {
    "index": (index(), parse_index),
    "base index": (base_index(), parse_base),
    "safetensors header": (tensor_file(), take_tensor_headers),
    "tensor file": (tensor_file(), take_tensor_file),
    "checkpoint": (checkpoint(), lambda raw: checkpoint_of(raw, "checkpoint.json")),
    "small file": (canonical({"model_type": "llama", "hidden_size": 8}), take_small_file),
    "amendment inside": (amendment(), take_amendment_inside),
    "warrant": (sign_warrant(OWNER, RUN, MACHINE, 2 * 10**9).SerializeToString(), take_warrant),
}

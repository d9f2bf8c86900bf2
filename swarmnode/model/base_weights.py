"""The base model's weights on this machine, for whoever makes a whole model of a run's adapters."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.data.base_index import BASE_INDEX_FILE, FOLDER, BaseIndex, local_base
from swarmnode.data.chunk_store import find_index
from swarmnode.errors import DataError, NotPermitted, UsageError, os_errors
from swarmnode.limited_child import CPU_S, NBYTES, run_limited

if TYPE_CHECKING:
    from torch import Tensor

    from swarmnode.model.frozen import BaseWeights
    from swarmnode.model.gather import Gathered


SUFFIX = ".gguf"
MAGIC = b"GGUF"  # the file's first bytes: GGUF's specification, ggml-org
NEEDED = ("gguf", "transformers", "accelerate")
NEEDED_BY_MODELS = (
    "transformers.models.auto",
    "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama",
)
CONVERTED_PER_S = 2 << 20  # guess: bytes of the file; a tenth of what one core does
MEMORY_SHARE = 24  # a number of 4 bits becomes one of 32 and two of 16, and half as much again for what is in between


def is_gguf(model: str) -> bool:
    """Whether `model`, as a user named it, is a GGUF file of this machine."""
    return "://" not in model and Path(model).suffix.lower() == SUFFIX


def to_folder(file: Path, folder: Path) -> None:
    """Write the model of `file` as `folder`: config.json, tokenizer.json and safetensors, dequantised to bfloat16. The
    whole model is in memory meanwhile.

    Raises UsageError without the packages of the extra, DataError for a file that is no GGUF or holds a model that
    transformers does not read, NotPermitted when the folder cannot be written or is there already.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"GGUF files need {', '.join(missing)}: pip install {' '.join(NEEDED)}")
    with os_errors(DataError, f"{file}"), file.open("rb") as opened:
        begun = opened.read(len(MAGIC))
    if begun != MAGIC:
        raise DataError(f"{file}: not a GGUF file")
    with os_errors(NotPermitted, f"{folder} cannot be made", "; give another run's folder"):
        folder.mkdir(parents=True)
    try:
        nbytes = file.stat().st_size
        run_limited(
            f"{__name__}:convert",
            str(file.resolve()),
            str(folder.resolve()),
            what=str(file),
            imports=("torch", "transformers", "gguf", "accelerate", *NEEDED_BY_MODELS),
            cpu_s=CPU_S + nbytes // CONVERTED_PER_S,
            nbytes=NBYTES + MEMORY_SHARE * nbytes,
        )
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def convert(given: str, out: str) -> None:
    """`to_folder` in the limited child."""
    file, folder = Path(given), Path(out)
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    where = str(file.parent)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(where, gguf_file=file.name, dtype=torch.bfloat16)
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, gguf_file=file.name)
    except MemoryError:
        raise
    except Exception as error:  # a parser's errors have many types; whatever it is, this file cannot be read
        why = " ".join(str(error).split())[:300]
        raise DataError(f"{file}: transformers does not read this model: {why or type(error).__name__}") from error
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    plain = type(model)(type(model.config).from_dict(config)).to(torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    del model
    with os_errors(NotPermitted, f"{folder}"):
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def base_weights(found: Gathered) -> BaseWeights | None:
    """The weights that the adapters in `found` change; None if it holds whole models, or the run's seed gives them.
    Raises DataError when the run's folder does not hold its base model."""
    from swarmnode.model.adapter import has_adapters

    manifest = found.manifest
    if found.whole or not has_adapters(manifest) or not manifest.base.index:
        return None
    folder = None if found.run_folder is None else found.run_folder / FOLDER
    index = local_base(folder, bytes.fromhex(manifest.base.index))
    if folder is None or index is None:
        place = "a bucket" if folder is None else str(folder)
        raise DataError(
            f"these are adapters of base model {manifest.base.index[:16]}..., which is not in {place}: copy them into"
            " the run's folder, beside the base that `swarmnode init --from` made there"
        )
    held = find_index(folder, index.digest, BASE_INDEX_FILE)
    assert held is not None
    return _FolderWeights(held[0], index)


class _FolderWeights:
    """BaseWeights of a folder with the files of `index`, each chunk verified."""

    def __init__(self, folder: Path, index: BaseIndex) -> None:
        self._folder = folder
        self._index = index

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        import torch

        from swarmnode.model.tensor import decode

        if (tensor := self._index.tensors.get(name)) is None or tensor.shape != shape:
            raise DataError(f"{self._folder}: the base model has no {name} of shape {list(shape)}")
        weight = torch.empty(shape)
        for number, spans in self._index.spans([name]).items():
            chunk = self._index.chunk(number)
            with (self._folder / chunk.shard).open("rb") as file:
                file.seek(chunk.offset)
                raw = file.read(chunk.nbytes)
            if hashlib.sha256(raw).digest() != chunk.sha256:
                raise DataError(f"{self._folder / chunk.shard}: not the run's base model from byte {chunk.offset} on")
            for span in spans:
                weight.view(-1)[span.first : span.first + span.elements] = decode(span.values(raw)).float()
        return weight

"""An organiser's run that starts from a pretrained model: its manifest, and the folder `base` beside it.

Everything about the model is checked, and its files are hashed, before anything is written.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from swarmnode.app.local.published_head import PublishedHead, published_head
from swarmnode.base.atomic_file import atomic_write, write_errors
from swarmnode.base.errors import DataError, NotPermitted, UsageError
from swarmnode.base.ids import digest
from swarmnode.data.base_index import (
    BASE_INDEX_FILE,
    CONFIG,
    FOLDER,
    SMALL_FILES,
    SMALL_NBYTES_MAX,
    TOKENIZER,
    BaseIndex,
    written_anew,
)
from swarmnode.data.base_maker import ModelFiles, Report, WantedTensor, json_file, make_base, stored_tensors
from swarmnode.data.chunk_store import read_regular
from swarmnode.data.indexed import index_of
from swarmnode.data.root import model_root
from swarmnode.data.tokenizer_file import check_tokenizer
from swarmnode.data.tokens import huggingface_tokenizer
from swarmnode.model.huggingface import source_names, spec_of
from swarmnode.model.split import parameter_shapes, split
from swarmnode.run.manifest import Manifest, ModelSpec, parse, template
from swarmnode.run.manifest.kind_compat import ties
from swarmnode.run.manifest.recipe import CONTEXTS, Recipe, context_of, fit, parameters_of
from swarmnode.run.manifest.spec import ADAPTERS, BY_NAME

MICROBATCH_TOKENS = 2048  # derived: 14 layers of SmolLM2-135M then take 1.3 GB (model/memory_budget.py)
RATE_SHARE = 0.1
"""Of the peak rate at which a model of this size is pretrained. Llama 2 7B is tuned at a fifteenth of it (2e-5 of 3e-4,
arXiv 2307.09288, sections 2.2 and 3.1), and continued pretraining re-warms up to the whole of it (arXiv 2403.08763,
section 6.1); between the two by guess."""

OPTIMIZER = "adamw"
"""Published models are pretrained by AdamW, and tuning by Muon then gains nothing (arXiv 2502.16982, section 3.5.2).
Measured: 160 samples of 128 tokens take SmolLM2-135M from 2.431 to 2.144 nats with AdamW, to 2.227 with Muon, whose
step on batches of 8 takes a CPU four times as long (examples/finetune-smollm2/plain.py)."""


class FolderFiles:
    """base_maker.ModelFiles of a folder of this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._root = model_root(folder)

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        data = read_regular(self._root.inside(self.folder / name), nbytes, offset)
        if data is None:
            raise DataError(f"{self.folder / name}: no such file, or it cannot be read: is the model complete?")
        return data

    def read_whole(self, name: str, nbytes_max: int) -> bytes | None:
        path = self._root.inside(self.folder / name)
        data = read_regular(path, nbytes_max + 1)
        if data is None and path.exists():
            raise DataError(f"{self.folder / name}: not a regular file that can be read")
        if data is not None and len(data) > nbytes_max:
            raise DataError(f"{self.folder / name}: longer than {nbytes_max} bytes")
        return data


@dataclass(frozen=True, slots=True)
class Pretrained:
    """A model to start from. `files`: its small files by name; `folder`: where its weights lie on this machine, None:
    only at `locations`; `told`: what a person should know about it, one line or ""."""

    recipe: Recipe
    index: BaseIndex
    files: Mapping[str, bytes]
    folder: Path | None
    told: str = ""


def _small_files(files: ModelFiles, name: str) -> tuple[bytes, dict[str, bytes]]:
    """(the tokenizer as it is published, the small files of the model as they are written anew). Raises DataError."""
    small = {each: raw for each in SMALL_FILES if (raw := files.read_whole(each, SMALL_NBYTES_MAX)) is not None}
    if TOKENIZER not in small:
        raise DataError(f"{name}: no {TOKENIZER}; a tokenizer in another form must be converted by transformers first")
    anew = {each: written_anew(raw, f"{name}/{each}") for each, raw in small.items()}
    with TemporaryDirectory() as folder:
        for each, content in anew.items():
            (Path(folder) / each).write_bytes(content)
        check_tokenizer(Path(folder) / TOKENIZER, f"{name}/{TOKENIZER}")
    return small[TOKENIZER], anew


def pretrained(
    files: ModelFiles,
    start: Manifest,
    *,
    name: str,
    locations: tuple[str, ...],
    data: Path | None,
    context: int | None,
    samples: int | None,
    report: Report,
    untie: bool = False,
) -> Pretrained:
    """The model in `files` as the start of a run with the other values of `start`, on the data set `data`. The head of
    a tied model stays the token table where the run can keep it so (`ties`), unless `untie`.

    Raises DataError for a model that is damaged, unknown, or does not fit the data set's tokenizer, UsageError for
    values that no manifest may have.
    """
    if (check := BY_NAME["base.locations"].check).accept(list(locations)) is None:
        raise UsageError(f"--base-location {', '.join(locations)[:200]}: allowed is {check.allowed}")
    config = json_file(files, CONFIG)
    if config is None:
        raise DataError(f"{name}: no {CONFIG}; this is no model in the form of Hugging Face")
    spec = spec_of(config)
    stored = stored_tensors(files)
    head = published_head(spec.tied, stored, files)
    published = dataclasses.replace(spec, tied=bool(head.shared))
    model = _model_of(published, context, keeps=ties(start) and not untie)
    wanted = _wanted(model, head)
    raw, small = _small_files(files, name)
    size = huggingface_tokenizer(small[TOKENIZER], f"{name}/{TOKENIZER}").vocabulary
    if size > model.vocabulary:
        raise DataError(
            f"{name}/{TOKENIZER}: token ids up to {size - 1}, and the model knows {model.vocabulary}: this is another"
            " model's tokenizer"
        )
    if data is not None:
        _check_data((raw, small[TOKENIZER]), data, model)
    recipe = _recipe(start, published, model, name, samples, has_data=data is not None)
    index = make_base(files, stored, wanted, report)
    made = recipe.manifest
    base = dataclasses.replace(made.base, index=index.digest.hex(), locations=locations)
    made = parse(template(dataclasses.replace(made, base=base)), f"{name}/{CONFIG}")
    linked = files.folder if isinstance(files, FolderFiles) else None
    origins = recipe.origins | ({"model.tied": head.told} if head.told and model.tied == published.tied else {})
    return Pretrained(Recipe(made, origins), index, small, linked, head.told)


def lay_out(run: Path, model: Pretrained) -> Path:
    """`run`/base with the index and the small files of `model`, and links to its weights; returns the folder. Raises
    NotPermitted when it cannot be made."""
    place = run / FOLDER
    with write_errors(place, kind=NotPermitted, what=f"{place} cannot be made"):
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name, raw in model.files.items():
            atomic_write(place / name, raw, mode=0o600)  # until `export` publishes them
        atomic_write(place / BASE_INDEX_FILE, model.index.canonical(), mode=0o600)
        if model.folder is not None:
            for file in model.index.files:
                link = place / file.name
                real = (model.folder / file.name).resolve()
                if not (link.exists() and link.samefile(real)):
                    link.symlink_to(real)
    return place


def _model_of(published: ModelSpec, context: int | None, *, keeps: bool) -> ModelSpec:
    """The run's model. A tied head stays so if the run `keeps` it; else it becomes a matrix of its own, which begins as
    a copy of the table."""
    if context is not None and context > published.context:
        raise UsageError(f"--context {context}: the model was made for {published.context} tokens at most")
    context = context or min(published.context, context_of(parameters_of(published), CONTEXTS[-1][1]))
    return dataclasses.replace(published, tied=published.tied and keeps, context=context)


def _wanted(model: ModelSpec, head: PublishedHead) -> dict[str, WantedTensor]:
    """Every parameter of the run, with the published tensor it is made of."""
    shapes = parameter_shapes(model, split(model, 1)[0])
    return {name: WantedTensor(shapes[name], source) for name, source in source_names(model, head.shared).items()}


def _check_data(tokenizers: Iterable[bytes], data: Path, model: ModelSpec) -> None:
    """Raises DataError unless the data set was made with the model's own tokenizer, in one of the forms `tokenizers`,
    and the model knows all its ids."""
    index = index_of(data)
    if index.vocabulary > model.vocabulary:  # where the tokenizer has no end of text, the data set adds an id for it
        raise DataError(
            f"{data}: token ids up to {index.vocabulary - 1} (documents end with {index.end_token}), and the model"
            f" knows {model.vocabulary}"
        )
    if index.tokenizer not in (digest("tokenizer", each) for each in tokenizers):
        raise DataError(
            f"{data}: made with another tokenizer than the model's: `swarmnode data make {data} --from ...` with"
            f" --tokenizer and the model's {TOKENIZER}"
        )


def _recipe(
    start: Manifest,
    published: ModelSpec,
    model: ModelSpec,
    name: str,
    samples: int | None,
    *,
    has_data: bool,
) -> Recipe:
    """The manifest and the origins of its values: `fit` to the model, at RATE_SHARE of a pretraining's peak rate."""
    fitting = max(1, MICROBATCH_TOKENS // model.context)
    microbatch = min(start.inner.microbatch, 1 << int(math.log2(fitting)))
    least = min(start.inner.replica_batch_min, microbatch)
    inner = dataclasses.replace(start.inner, microbatch=microbatch, replica_batch_min=least, optimizer=OPTIMIZER)
    pipeline = dataclasses.replace(start.pipeline, stages=min(start.pipeline.stages, model.layers))
    text = start.data
    if not has_data:
        text = dataclasses.replace(text, tokenizer=f"{FOLDER}/{TOKENIZER}")
    begun = dataclasses.replace(start, name=_run_name(name), model=model, inner=inner, pipeline=pipeline, data=text)
    recipe = fit(begun, samples=samples)
    adapts = start.training.kind == ADAPTERS
    share = 1.0 if adapts else RATE_SHARE
    rates: dict[str, Any] = {
        key: float(f"{share * getattr(recipe.manifest.inner, key):.1e}")
        for key in ("learning_rate", "muon_learning_rate")
        if f"inner.{key}" in recipe.origins
    }
    signed = "a tenth of what a model of this size is pretrained at: between arXiv 2307.09288, 3.1, and 2403.08763, 6.1"
    if adapts:
        signed = "ten times what all weights would take: QLoRA, arXiv 2305.14314, table 9, has 2e-4 for 7B and 13B"
    warm = "; the rate re-warms from 0, arXiv 2403.08763, section 6.1"
    origins = {
        **recipe.origins,
        **{f"inner.{key}": signed for key in rates},
        "inner.warmup_samples": recipe.origins["inner.warmup_samples"] + warm,
        **{f"model.{field.name}": "the base model's config.json" for field in dataclasses.fields(model)},
        "inner.optimizer": "that of the model's own pretraining, as a rule: arXiv 2502.16982, section 3.5.2",
        "model.tied": _why_tied(published, model),
        "model.context": "asked for; or at most GPT-2's, and from 1e9 parameters on LLaMA's",
        "base.index": f"made of {name}",
    }
    if microbatch != start.inner.microbatch:
        origins["inner.microbatch"] = (
            f"fitted: at most {MICROBATCH_TOKENS} tokens: 1.3 GB in 14 layers of a 135 M model"
        )
    made = dataclasses.replace(recipe.manifest, inner=dataclasses.replace(recipe.manifest.inner, **rates))
    return Recipe(made, origins)


def _why_tied(published: ModelSpec, model: ModelSpec) -> str:
    """The origin of model.tied."""
    if published.tied and not model.tied:
        return "the base model's head is its token table; here it begins as a copy"
    return "the base model's config.json"


def _run_name(name: str) -> str:
    """`name` as the name of a run."""
    kept = "".join(one if one.isascii() and (one.isalnum() or one in "._-") else "-" for one in name)
    return kept.lstrip("._-")[:64] or "run"

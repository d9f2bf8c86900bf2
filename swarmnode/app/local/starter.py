"""Recipes of `swarmnode quickstart`: a TOML file names a text, a model and a length; verbs do the rest."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from swarmnode.base.atomic_file import write_errors
from swarmnode.base.errors import UsageError
from swarmnode.base.text_file import decoded

SUFFIX = ".toml"
RECIPE_BYTES_MAX = 64 << 10
CONVERSATIONS = "conversations"
PYTHON = "python"
SAMPLES = (CONVERSATIONS, PYTHON)
"""Texts that come with swarmnode: conversations about it, and the sources of Python's library (the demo's text)."""


@dataclass(frozen=True, slots=True)
class Starter:
    """A recipe. `needs`, `takes` and `what` (the text it wants) are for people. `samples` are of SAMPLES and stand in
    for a text that is not given; `vocabulary` 0: the model's tokenizer; `model` "": from random weights; `fields`:
    values of the manifest by name."""

    name: str
    title: str
    about: str
    needs: str
    takes: str
    what: str
    samples: tuple[str, ...]
    weights: tuple[float, ...]
    validation: float
    vocabulary: int
    model: str
    kind: str
    parameters: int
    context: int
    nodes: int
    length: int
    fields: Mapping[str, object]
    chat: bool
    prompts: tuple[str, ...]


_KEYS: Mapping[str, Mapping[str, str]] = {
    "": {"title": "title", "about": "about", "needs": "needs", "takes": "takes"},
    "text": {
        "what": "what",
        "samples": "samples",
        "weights": "weights",
        "validation": "validation",
        "vocabulary": "vocabulary",
    },
    "model": {"from": "model", "kind": "kind", "parameters": "parameters", "context": "context"},
    "run": {"nodes": "nodes", "samples": "length"},
    "talk": {"chat": "chat", "prompts": "prompts"},
}
"""Of each table of the file: its keys, and the fields of Starter that they fill. [fields] is free."""

_TYPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("title", "about", "needs", "takes", "what", "model", "kind"), (str,)),
    **dict.fromkeys(("vocabulary", "parameters", "context", "nodes", "length"), (int,)),
    **dict.fromkeys(("samples", "weights", "prompts"), (list,)),
    "validation": (float,),
    "chat": (bool,),
}


def names() -> list[str]:
    """The recipes that come with swarmnode."""
    return sorted(entry.name.removesuffix(SUFFIX) for entry in _folder().iterdir() if entry.name.endswith(SUFFIX))


def read(named: str) -> Starter:
    """The recipe called `named`: one of `names`, or the path of a file. Raises UsageError."""
    if named in names():
        return parse((_folder() / f"{named}{SUFFIX}").read_text(), named)
    path = Path(named)
    if not named.endswith(SUFFIX) or not path.is_file():
        raise UsageError(
            f"no recipe {named[:100]!r}: there are {', '.join(names())}, or give a file that ends in .toml"
        )
    if path.stat().st_size > RECIPE_BYTES_MAX:
        raise UsageError(f"{path}: longer than {RECIPE_BYTES_MAX} bytes: this is no recipe")
    return parse(decoded(path.read_bytes()), path.stem)


def parse(text: str, name: str) -> Starter:
    """The recipe in `text`. Raises UsageError that names the first key at fault."""
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"recipe {name}: no TOML: {error}") from None
    values: dict[str, Any] = {"name": name, "fields": tree.pop("fields", {})}
    if not isinstance(values["fields"], dict):
        raise UsageError(f"recipe {name}: [fields] is a table of the manifest's fields")
    for table, keys in _KEYS.items():
        part = tree if table == "" else tree.pop(table, {})
        for key, field in keys.items():
            values[field] = _value(part, key, field, f"recipe {name}: {f'{table}.' if table else ''}{key}")
        if part and table:
            raise UsageError(f"recipe {name}: [{table}] has no key {next(iter(part))!r}")
    if tree:
        raise UsageError(f"recipe {name}: no key {next(iter(tree))!r} is known")
    return _checked(Starter(**values))


def write_sample(sample: str, folder: Path) -> Path:
    """The text `sample` of SAMPLES below `folder`: a file, or a folder of files. Raises LocalFault, DiskFull."""
    from swarmnode.data.source import demo_documents

    folder.mkdir(parents=True, exist_ok=True)
    if sample == CONVERSATIONS:
        path = folder / "conversations.jsonl"
        with write_errors(path):
            path.write_bytes((_folder() / path.name).read_bytes())
        return path
    below = folder / PYTHON
    with write_errors(below):
        below.mkdir(exist_ok=True)
        for number, (_, pieces) in enumerate(demo_documents()):
            (below / f"{number:04}.txt").write_bytes(pieces)
    return below


def _folder() -> Any:
    return resources.files("swarmnode.app.local") / "recipes"


def _value(part: Any, key: str, field: str, where: str) -> object:
    """The value of `key`, taken out of `part`; lists become tuples. Raises UsageError."""
    if not isinstance(part, dict) or key not in part:
        raise UsageError(f"{where} is missing")
    value = part.pop(key)
    if type(value) not in _TYPES[field]:
        raise UsageError(f"{where}: {str(value)[:60]!r} is no {_TYPES[field][0].__name__}")
    return tuple(value) if isinstance(value, list) else value


def _checked(made: Starter) -> Starter:
    """`made`, if its values fit together. Raises UsageError. What verbs check they say themselves."""
    where = f"recipe {made.name}"
    unknown = [str(sample) for sample in made.samples if sample not in SAMPLES]
    if unknown:
        raise UsageError(f"{where}: text.samples: {unknown[0][:60]!r} is none of {', '.join(SAMPLES)}")
    numbers = all(isinstance(weight, int | float) and type(weight) is not bool for weight in made.weights)
    if len(made.weights) != len(made.samples) or not numbers:
        raise UsageError(f"{where}: text.weights has a number for each of text.samples")
    if not all(isinstance(prompt, str) for prompt in made.prompts):
        raise UsageError(f"{where}: talk.prompts are texts")
    if bool(made.model) == bool(made.parameters):
        raise UsageError(f"{where}: model.from or model.parameters: give one, and leave the other empty (0)")
    if made.model and made.vocabulary:
        raise UsageError(f"{where}: text.vocabulary: a model that exists has its own tokenizer; give 0")
    return made

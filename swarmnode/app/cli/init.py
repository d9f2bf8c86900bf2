"""`swarmnode init DIR`: make a new run."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swarmnode.app.cli.option.param import CARD, RATE
from swarmnode.base.errors import DataError, NotPermitted, Unavailable, UsageError, cause_of

if TYPE_CHECKING:
    from swarmnode.app.local.pretrained import Pretrained
    from swarmnode.app.planner.fleet import MachineKind
    from swarmnode.data.base_maker import ModelFiles
    from swarmnode.net.transport.web import HttpRangeReader
    from swarmnode.run.manifest import Manifest
    from swarmnode.run.manifest.recipe import Recipe


KINDS = ("pretrain", "finetune", "adapters")
PRESETS = ("demo", "tiny", "small")
COUNT_MAX = 10**12
NODES = 6
SEARCHED = ("pretrain", "finetune")  # kinds whose learning the search knows


HUB = "https://huggingface.co"
INFO_NBYTES_MAX = 16 << 20
_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_HUB_MODEL = re.compile(rf"hf://({_NAME}/{_NAME})(?:@({_NAME}))?/?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """`locations`: where volunteers can have the files, besides from members."""

    files: ModelFiles
    name: str
    locations: tuple[str, ...] = ()


class WebFiles:
    """base_maker.ModelFiles below a URL."""

    def __init__(self, reader: HttpRangeReader, runner: asyncio.Runner, url: str) -> None:
        self._reader = reader
        self._runner = runner
        self._url = url

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        return self._runner.run(self._patiently(f"{self._url}/{name}", offset, nbytes))

    def read_whole(self, name: str, nbytes_max: int) -> bytes | None:
        try:
            return self._runner.run(self._reader.read_whole(f"{self._url}/{name}", nbytes_max))
        except Unavailable as error:
            if "HTTP status 404" in str(error):
                return None
            raise DataError(str(error)) from None

    async def _patiently(self, url: str, offset: int, nbytes: int) -> bytes:
        """Read as often as a joiner asks donors: a content network drops a connection now and then."""
        from swarmnode.keep.transfer.download import DownloadLimits, pause_s

        limits = DownloadLimits()
        attempt = 1
        while True:
            try:
                return await self._reader.read(url, offset, nbytes)
            except Unavailable as error:
                if attempt == limits.attempts_max:
                    raise DataError(str(error)) from None
            await asyncio.sleep(pause_s(attempt, limits.pause_s, limits.pause_max_s))
            attempt += 1


@contextlib.contextmanager
def open_model(model: str, option: str = "--from") -> Iterator[OpenedModel]:
    """The model called `model`: a folder, hf://USER/NAME[@REVISION] or https://HOST/FOLDER. Raises UsageError for
    anything else, with the `option` that named it, DataError when the hub does not know it."""
    if "://" not in model:
        folder = Path(model).expanduser()
        if folder.suffix.lower() == ".gguf":
            raise UsageError(
                f"{option} {model[:200]}: give the folder that this GGUF file was made of; docs/pretrained.md says "
                "which files transformers makes a folder of again"
            )
        if not folder.is_dir():
            raise UsageError(f"{option} {model[:200]}: no such folder; or give hf://USER/NAME or https://HOST/FOLDER")
        from swarmnode.app.local.pretrained import FolderFiles

        yield OpenedModel(FolderFiles(folder.resolve()), folder.resolve().name)
        return
    from swarmnode.net.transport.web import AddressRules, HttpRangeReader
    from swarmnode.run.manifest.location import MODELS_ALLOWED, base_url, is_model_location

    if not is_model_location(model):
        raise UsageError(f"{option} {model[:200]}: allowed is a folder, {MODELS_ALLOWED}")
    with asyncio.Runner() as runner:
        reader = HttpRangeReader(AddressRules(private=True, named=True))  # the organiser's own words
        try:
            place = _pinned(model, reader, runner)
            url = base_url(place)
            assert url is not None
            name = model.partition("@")[0].rstrip("/").rpartition("/")[2]
            yield OpenedModel(WebFiles(reader, runner, url), name, (place,))
        except NotPermitted as error:
            raise DataError(str(error)) from None
        finally:
            runner.run(reader.close())


def _pinned(model: str, reader: HttpRangeReader, runner: asyncio.Runner) -> str:
    """`model` at the commit that its revision is now, so that the hub gives the same bytes later. Other places are left
    as they are."""
    match = _HUB_MODEL.fullmatch(model)
    if match is None or (match[2] is not None and _COMMIT.fullmatch(match[2])):
        return model
    name = match[1]
    revision = match[2] or "main"
    try:
        raw = runner.run(reader.read_whole(f"{HUB}/api/models/{name}/revision/{revision}", INFO_NBYTES_MAX))
        commit = json.loads(raw)["sha"]
    except (Unavailable, ValueError, KeyError, TypeError) as error:
        raise DataError(f"hf://{name}@{revision}: the hub does not give it: {cause_of(error)[:150]}") from None
    if type(commit) is not str or not _COMMIT.fullmatch(commit):
        raise DataError(f"hf://{name}@{revision}: the hub names no commit")
    return f"hf://{name}@{commit}"


# Guess: English has about four bytes a token of a tokenizer with 32,000 tokens.
RECOVERY_SAID = (
    "{}: move it off this machine now, to a stick or to paper in a drawer: it alone replaces owner.key when that is "
    "stolen or lost (swarmnode owner rotate RUN --recovery FILE)"
)
BYTES_SAID = (
    "the model reads bytes: some 4 times the tokens that a tokenizer makes, so a context holds a quarter of the text,"
    " and writing takes 4 times the steps; llama.cpp takes it by `export --gguf` alone. For a long run: swarmnode data"
    " make OUT --tokenizer tokenizer.json, then --data OUT"
)


@click.command(short_help="make a new run")
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option("--preset", type=click.Choice(PRESETS), default="demo", help="Initial values.")
@click.option(
    "--parameters", type=click.IntRange(1, COUNT_MAX), help="Approximate size of the model.  [default: the preset's]"
)
@click.option("--nodes", type=click.IntRange(1, 1 << 20), help=f"Machines that will train.  [default: {NODES}]")
@click.option("--card", "card_gb", type=CARD, help="Memory of each machine's card.  [default: by the model]")
@click.option("--up", "up_bps", type=RATE, help="Each machine's line up.  [default: 1Gbit]")
@click.option(
    "--fleet", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="The machines, as for `plan`."
)
@click.option("--samples", type=click.IntRange(1, COUNT_MAX), help="Length of the run.")
@click.option(
    "--tokens",
    type=click.FloatRange(min=1, max=1e18),
    help="Instead of --samples.  [default: 20 a parameter; without --parameters the preset's]",
)
@click.option("--stages", type=click.IntRange(1, 512), help="Stages of the model.  [default: by the machines]")
@click.option("--anyway", is_flag=True, help="Write a run that is slower than one of its machines alone.")
@click.option("--data", "data", type=click.Path(file_okay=False, path_type=Path), help="A data set of `data make`.")
@click.option("--location", "locations", multiple=True, metavar="URL", help="Where its files can be had; repeatable.")
@click.option(
    "--from",
    "model",
    metavar="MODEL",
    help="Start from a pretrained model: a Hugging Face folder, hf://USER/NAME[@REVISION] or https://HOST/FOLDER.",
)
@click.option(
    "--kind",
    type=click.Choice(KINDS),
    help="With --from: train all weights on text or on conversations, or adapters alone.  [default: pretrain]",
)
@click.option(
    "--base-location", "base_locations", multiple=True, metavar="URL", help="Where its files can be had; repeatable."
)
@click.option("--context", type=click.IntRange(1, 1 << 24), help="Tokens of a sample.  [default: by the model's size]")
@click.option(
    "--new-run", is_flag=True, help="In a folder that has a run: put its signed manifest aside; manifest.toml is kept."
)
@click.option("--untie", is_flag=True, help="With --from: train a tied model with a head of its own.")
def command(folder: Path, new_run: bool, anyway: bool, **given: Any) -> None:
    """Write DIR/manifest.toml, ready to edit in the order of four questions (what, on what, how long, who may), and
    DIR/owner.key, which signs it. DIR/recovery.key replaces owner.key when it is stolen or lost: keep it offline.

    With any word on the model, the machines or the length, the model is made to size, and its settings are those with
    which the machines come to its loss first: as few stages as memory allows, rounds as long as lines want them. The
    comments name the sources. Prints what the run will do, both paths, and the next step. Nothing is overwritten. The
    run is named by its folder. `swarmnode manifest` explains and changes fields.

    With --from the run goes on from a model's weights. Its files are read once, for their hashes; DIR/base leads to
    them. Machines that join fetch their own stage's part alone, from members or from the model's location.
    """
    from swarmnode.run.manifest.folder import MANIFEST_FILE, init, put_aside, read_manifest
    from swarmnode.run.owner import RECOVERY_FILE

    if new_run:
        read_manifest(folder / MANIFEST_FILE)  # what the next run would be signed with
        kept = put_aside(folder)
        click.echo(folder / MANIFEST_FILE if kept is None else f"{kept} (the run so far)")
        return
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MANIFEST_FILE).exists():
        raise click.UsageError(f"{folder} holds other files: give a new folder for the run, its key is kept there")
    options = InitOptions(**given)
    made, pretrained = _begun(options)
    if options.searches:
        made = _searched(made, _fleet(options, made.manifest), options.stages, anyway=anyway)
    made = _fit_text(made, options.data)
    named = made.manifest if pretrained is not None else _named(made.manifest, folder)
    for path in init(folder, named, made.origins, recovery=True):
        click.echo(path)
    click.echo(RECOVERY_SAID.format(folder / RECOVERY_FILE), err=True)
    if pretrained is not None:
        from swarmnode.app.local.pretrained import lay_out

        click.echo(lay_out(folder, pretrained))
        if pretrained.told:
            click.echo(pretrained.told, err=True)
    _link(folder, options.data)
    if named.data.tokenizer == "bytes" and pretrained is None:
        click.echo(BYTES_SAID, err=True)
    click.echo(f"next: swarmnode up {folder}; with other machines: swarmnode coordinator {folder}", err=True)


@dataclass(frozen=True, slots=True)
class InitOptions:
    """The options that decide what a new run is. Raises click.UsageError where two of them contradict each other."""

    preset: str
    parameters: int | None
    nodes: int | None
    card_gb: float | None
    up_bps: float | None
    fleet: Path | None
    samples: int | None
    tokens: float | None
    stages: int | None
    data: Path | None
    locations: tuple[str, ...]
    model: str | None
    kind: str | None
    base_locations: tuple[str, ...]
    context: int | None
    untie: bool

    def __post_init__(self) -> None:
        if self.samples is not None and self.tokens is not None:
            raise click.UsageError("--samples and --tokens both say how long the run is: give one")
        if self.fleet is not None and (self.nodes, self.card_gb, self.up_bps) != (None, None, None):
            raise click.UsageError("--fleet says what the machines are: leave out --nodes, --card and --up")
        if self.model is None and (self.base_locations or self.kind is not None or self.untie):
            raise click.UsageError("--kind, --base-location and --untie belong to --from MODEL")
        if self.model is not None and self.parameters is not None:
            raise click.UsageError("--parameters sizes a new model, --from goes on from one that has its size")
        if self.model is not None and self.tokens is not None and self.context is None:
            raise click.UsageError("--tokens with --from needs --context, or give --samples")
        if self.data is None and self.kind == "finetune":
            raise click.UsageError("--kind finetune needs --data OUT, documents of their own (swarmnode data make OUT)")
        if self.data is None and self.locations:
            raise click.UsageError("--location says where the files of --data can be had: give both")

    @property
    def length(self) -> int | None:
        """Samples of the run, as far as the options say."""
        if self.tokens is not None and self.context is not None:
            return max(1, round(self.tokens / self.context))
        return self.samples

    @property
    def searches(self) -> bool:
        """Whether the best settings are searched for: with any word on the model's size, the machines or the length."""
        words = (self.nodes, self.card_gb, self.up_bps, self.fleet, self.length, self.tokens, self.stages)
        asked = self.parameters is not None or any(value is not None for value in words)
        return asked and (self.model is None or (self.kind or KINDS[0]) in SEARCHED)


def _begun(options: InitOptions) -> tuple[Recipe, Pretrained | None]:
    """The run before the search for its machines, and the model that it starts from."""
    from swarmnode.run.manifest.recipe import PRESETS, Recipe, of_kind

    preset = PRESETS[options.preset]
    if options.data is not None:
        from swarmnode.data.indexed import on_data_set

        preset = on_data_set(preset, options.data, options.locations)
    if options.model is not None:
        start = of_kind(preset, options.kind or KINDS[0])
        pretrained = _from_model(options.model, start, options)
        made = pretrained.recipe
        return Recipe(made.manifest, {**start.origins, **made.origins}), pretrained
    if options.searches or options.context is not None:
        return _new_model(preset, options), None
    return Recipe(preset, {}), None


def _named(made: Manifest, folder: Path) -> Manifest:
    """`made`, named by its folder unless that makes no name."""
    from swarmnode.run.manifest.spec import BY_NAME

    name = folder.resolve().name
    return made if BY_NAME["name"].check.accept(name) is None else dataclasses.replace(made, name=name)


def _new_model(start: Manifest, options: InitOptions) -> Recipe:
    """`start` with a model of the asked size and a run of the asked length."""
    from swarmnode.run.manifest.recipe import TOKENS_A_PARAMETER, Recipe, context_of, fit, parameters_of

    parameters = options.parameters
    tokens = options.tokens
    samples = options.length
    count = parameters or parameters_of(start.model)
    context = options.context or context_of(count, start.model.context)
    if samples is None and (tokens is not None or parameters is not None):
        samples = max(1, round((tokens or TOKENS_A_PARAMETER * count) / context))
    origin = "the requested context, or GPT-2's from 1e8 parameters on and LLaMA's from 1e9"
    origins = {"model.context": origin} if context != start.model.context else {}
    sized = dataclasses.replace(start, model=dataclasses.replace(start.model, context=context))
    made = fit(sized, parameters=parameters, samples=samples)
    return Recipe(made.manifest, {**origins, **made.origins})


def _fleet(options: InitOptions, made: Manifest) -> tuple[MachineKind, ...]:
    from swarmnode.app.planner.fitted import machines
    from swarmnode.app.planner.fleet import read_fleet
    from swarmnode.run.manifest.recipe import parameters_of

    if options.fleet is not None:
        return read_fleet(options.fleet)
    return (machines(options.nodes or NODES, options.card_gb, options.up_bps, parameters_of(made.model)),)


def _searched(start: Recipe, fleet: tuple[MachineKind, ...], stages: int | None, *, anyway: bool) -> Recipe:
    """`start` with the best settings for `fleet`, and word of what the run will do. Raises UsageError for one that is
    slower than one of its machines alone, unless `anyway`."""
    from swarmnode.app.planner.fitted import check_faster, fitted, forecast, steps_compared

    for kind in fleet:
        card = f"{kind.memory_gb:.3g} GB card" if kind.host_gb else f"{kind.memory_gb:.3g} GB"
        lines = f"{kind.up * 8 / 1e6:.4g}/{kind.down * 8 / 1e6:.4g} Mbit/s up/down"
        click.echo(f"{kind.count} machines: {kind.flops:.2g} FLOP/s, {card}, {lines}")
    fit = fitted(start, fleet, stages=stages)
    inner = fit.recipe.manifest.inner
    model = fit.recipe.manifest.model
    tokens = float(inner.decay_samples * model.context)
    for line in forecast(fit.best.plan, fit.recipe.manifest, tokens, fit.alone):
        click.echo(line)
    if why := steps_compared(fit):
        click.echo(why)
    if not anyway:
        check_faster(fit)
    return fit.recipe


def _fit_text(made: Recipe, data: Path | None) -> Recipe:
    """`made` with blocks that its text can fill. Raises DataError where it has too little even for the smallest, which
    volunteers would find out otherwise."""
    if data is None:
        return made
    from swarmnode.data.indexed import IndexedCorpus, fitted_blocks, index_of
    from swarmnode.run.manifest.recipe import Recipe

    given = made.manifest
    index = index_of(data)
    block, microbatch = fitted_blocks(given, index)
    if block != given.data.block_samples:
        fitted = dataclasses.replace(
            given,
            data=dataclasses.replace(given.data, block_samples=block),
            inner=dataclasses.replace(given.inner, microbatch=microbatch),
        )
        made = Recipe(fitted, {**made.origins, "data.block_samples": "fitted: the text holds no larger block"})
    IndexedCorpus(made.manifest, index, lambda number: None)
    return made


def _link(folder: Path, data: Path | None) -> None:
    if data is not None:
        from swarmnode.data.indexed import link

        click.echo(link(folder, data))


def _from_model(model: str, start: Recipe, options: InitOptions) -> Pretrained:
    """The run that starts from `model`."""
    from swarmnode.app.cli.output.console import bar
    from swarmnode.app.local.pretrained import pretrained

    with open_model(model) as opened, bar("hashing") as moved:
        return pretrained(
            opened.files,
            start.manifest,
            name=opened.name,
            locations=(*opened.locations, *options.base_locations),
            data=options.data,
            context=options.context,
            samples=options.length,
            report=moved,
            untie=options.untie,
        )

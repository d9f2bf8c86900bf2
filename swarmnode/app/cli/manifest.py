"""`swarmnode manifest`: read, compare and change the manifest of a run."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import click

from swarmnode.app.cli.output.listed import ListedGroup
from swarmnode.base.errors import UsageError

RUN = click.Path(exists=True, path_type=Path)


@click.group(cls=ListedGroup, short_help="read, compare and change a run's manifest")
def command() -> None:
    """Show, compare, change or explain a manifest. RUN is a run's folder, a manifest.toml or a signed manifest."""


@command.command(short_help="print it: all fields, or those that differ from the defaults")
@click.argument("run", metavar="RUN", type=RUN)
@click.option("--changed", is_flag=True, help="Only what differs from the defaults, a line each.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, as `manifest schema` describes it.")
def show(run: Path, changed: bool, as_json: bool) -> None:
    """Print the manifest of RUN as TOML with every field and its comment."""
    from swarmnode.run.manifest import Manifest, template
    from swarmnode.run.manifest.folder import manifest_at
    from swarmnode.run.manifest.text import difference, tree_of

    manifest = manifest_at(run)
    if as_json:
        if changed:
            raise click.UsageError("--json has every field: leave --changed out, or say `manifest diff --json`")
        click.echo(json.dumps(tree_of(manifest)))
        return
    click.echo("\n".join(difference(Manifest(), manifest)) if changed else template(manifest))


@command.command(short_help="what differs between two runs")
@click.argument("run", metavar="RUN", type=RUN)
@click.argument("other", metavar="OTHER", type=RUN)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: of each field [value of RUN, of OTHER].")
def diff(run: Path, other: Path, as_json: bool) -> int:
    """Print the fields in which RUN and OTHER differ, a line each. Exit code 1 if any does, as of diff."""
    from swarmnode.run.manifest.folder import manifest_at
    from swarmnode.run.manifest.text import difference, differing, value_of

    first = manifest_at(run)
    second = manifest_at(other)
    names = differing(first, second)
    if as_json:
        click.echo(json.dumps({name: [value_of(first, name), value_of(second, name)] for name in names}))
    for line in () if as_json else difference(first, second):
        click.echo(line)
    return 1 if names else 0


@command.command(short_help="what a field means")
@click.argument("names", metavar="FIELD...", nargs=-1, required=True)
def explain(names: tuple[str, ...]) -> None:
    """Print meaning, allowed values and default of each FIELD (inner.learning_rate, or a whole table: inner)."""
    from swarmnode.run.manifest.text import explained

    if Path(names[0]).exists() and "." not in names[0]:
        raise click.UsageError(f"{names[0]} is a file or folder: `explain` takes fields alone, as inner.learning_rate")
    for name in names:
        click.echo(explained(name))


@command.command("set", short_help="change fields of manifest.toml")
@click.argument("run", metavar="RUN", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("changes", metavar="FIELD=VALUE...", nargs=-1, required=True)
def set_fields(run: Path, changes: tuple[str, ...]) -> None:
    """Change fields in RUN/manifest.toml, comments kept, and print the difference. Nothing is written unless the whole
    manifest is allowed. A run that has begun keeps its signed manifest: `swarmnode amend` changes that."""
    from swarmnode.base.atomic_file import write_whole
    from swarmnode.base.text_file import decoded
    from swarmnode.run.manifest import parse
    from swarmnode.run.manifest.folder import MANIFEST_FILE, SIGNED_FILE, manifest_at
    from swarmnode.run.manifest.text import difference, with_value

    path = run / MANIFEST_FILE
    before = manifest_at(path)
    text = decoded(path.read_bytes())
    if (run / SIGNED_FILE).exists():
        raise UsageError(f"{run} has begun: `swarmnode amend` changes it, `swarmnode init --new-run {run}` begins anew")
    for change in changes:
        name, sign, value = change.partition("=")
        if not sign:
            raise click.UsageError(f"{change[:60]!r}: write FIELD=VALUE")
        text = with_value(text, name.strip(), _literal(value.strip()))
    after = parse(text, str(path))
    write_whole(path, text.encode())
    click.echo("\n".join(difference(before, after)) or "no change")


@command.command(short_help="the JSON Schema of manifests, for editors")
def schema() -> None:
    """Print the JSON Schema with which editors check and complete a manifest."""
    from swarmnode.run.manifest.text import schema as made

    click.echo(made(), nl=False)


def _literal(value: str) -> str:
    """`value` as TOML: as it is, or quoted where it is a bare word."""
    try:
        tomllib.loads(f"x = {value}")
    except tomllib.TOMLDecodeError:
        return json.dumps(value, ensure_ascii=False)
    return value

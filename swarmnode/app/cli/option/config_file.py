"""Sources of settings: flag, then SWARMNODE_*, then the config file, then the default (and the manifest for values
fixed by a run).

The file is $SWARMNODE_CONFIG, or swarmnode/config.toml in the user's configuration folder (of a user without a home
directory: in /etc). Its keys are option names without leading dashes. Keys at the top apply to every verb that has
them, those in a table to that verb.

    max-up = "20Mbit"
    [join]
    name = "attic"
"""

from __future__ import annotations

import difflib
import functools
import os
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from swarmnode.base.errors import ConfigError, cause_of
from swarmnode.base.text_file import decoded

CONFIG_BYTES_MAX = 64 << 10
PREFIX = "SWARMNODE_"


def config_path() -> Path:
    """The path of the config file, whether or not it exists."""
    named = os.environ.get(f"{PREFIX}CONFIG")
    if named:
        return Path(named)
    from platformdirs import user_config_path

    try:
        return user_config_path("swarmnode") / "config.toml"
    except RuntimeError:  # a user without a home directory, as in a container
        return Path("/etc/swarmnode/config.toml")


@functools.lru_cache(maxsize=4)
def _read(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(CONFIG_BYTES_MAX + 1)
        if len(raw) > CONFIG_BYTES_MAX:
            raise ConfigError(f"{path}: longer than {CONFIG_BYTES_MAX} bytes; is this a config file?")
        return tomllib.loads(decoded(raw))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {cause_of(error)}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None


def variable_of(option: click.Option) -> str:
    """The environment variable of `option`: SWARMNODE_MAX_UP for --max-up."""
    return PREFIX + _key(option).replace("-", "_").upper()


def bind(command: click.Command) -> None:
    """Let every option of `command` be set by its environment variable."""
    for option in _options(command):
        if option.envvar is None:
            option.envvar = variable_of(option)


def check_top(verbs: Collection[str], load: Callable[[str], click.Command | None]) -> None:
    """Raises ConfigError for a table that is no verb, and for a key at the top that no verb has as an option."""
    path = config_path()
    known = set[str]()
    for key, value in _read(path).items():
        if isinstance(value, Mapping):
            if key not in verbs:
                raise ConfigError(f"{path}: [{key[:40]}]: no such verb{did_you_mean(key, verbs)}")
            continue
        known = known or {_key(option) for verb in verbs if (command := load(verb)) for option in _options(command)}
        if key not in known and key not in verbs:  # `defaults_for` says that a verb is written as a table
            raise ConfigError(f"{path}: {key[:40]}: no verb has such an option{did_you_mean(key, known)}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """An addition to an error about an unknown `word`: "; did you mean X?" if one of `known` is close, else ""."""
    close = difflib.get_close_matches(word, sorted(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def defaults_for(verb: str, command: click.Command) -> dict[str, Any]:
    """The config file's values for `command`, by parameter. Raises ConfigError for a key that its table cannot have."""
    path = config_path()
    config = _read(path)
    options = {_key(option): option for option in _options(command)}
    table = config.get(verb, {})
    if not isinstance(table, Mapping):
        raise ConfigError(f"{path}: {verb} is a verb: write its settings in a table [{verb}]")
    for key in table:
        if key not in options:
            hint = did_you_mean(key, options) or f"; it has {', '.join(sorted(options)) or 'no options'}"
            raise ConfigError(f"{path}: [{verb}] {key[:40]}: unknown option of `swarmnode {verb}`{hint}")
    common = {key: value for key, value in config.items() if key in options and not isinstance(value, Mapping)}
    return {str(options[key].name): value for key, value in {**common, **table}.items()}


def origins(ctx: click.Context) -> tuple[tuple[str, str, str], ...]:
    """(option, value, origin) of all options of `ctx`'s command; missing values are "-"."""
    rows = []
    for option in _options(ctx.command):
        value = ctx.params.get(str(option.name))
        match ctx.get_parameter_source(str(option.name)):
            case click.core.ParameterSource.COMMANDLINE:
                origin = "flag"
            case click.core.ParameterSource.ENVIRONMENT:
                origin = f"environment {variable_of(option)}"
            case click.core.ParameterSource.DEFAULT_MAP:
                origin = f"file {config_path()}"
            case _:
                origin = "default"
        shown = str if option.multiple else getattr(option.type, "shown", str)  # Parsed's
        rows.append((_key(option), "-" if value in (None, "", ()) else shown(value), origin))
    return tuple(rows)


def _options(command: click.Command) -> list[click.Option]:
    return [option for option in command.params if isinstance(option, click.Option) and option.name != "help"]


def _key(option: click.Option) -> str:
    return max(option.opts, key=len).lstrip("-")

"""Commands, methods and manifest values on the pages are ones that the product takes: parsed by the real parser, and
their names looked up, without running them.

A paragraph that tells of what is gone says so ("removed", "is gone", "was refused", "a checkout of"): the names in it
are not looked up.
"""

import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest

from benchmarks.attack import swarm, table
from benchmarks.method import gossip
from benchmarks.swarm import scaling
from swarmnode.app.cli.main import VERBS, Verbs
from swarmnode.base.errors import ManifestError, UsageError
from swarmnode.run.manifest.amend import AMENDABLE
from swarmnode.run.manifest.spec import BY_NAME
from swarmnode_methods.rules import METHODS
from swarmsim import scenario

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")],
    key=lambda page: str(page.relative_to(ROOT)),
)
OF_THE_PAST = re.compile(
    r"\b(removed|is gone|are gone|was refused|is refused|were refused|a checkout of|Gone before)\b",
    re.IGNORECASE,
)
FENCE = re.compile(r"^ *```[^\n]*\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
STAND_IN = re.compile(r"[A-Z][A-Z_]{2,}|^[A-Z]\Z|\.\.\.|…|\$|^<")
"""A word that stands for another: RUN, N, /ip4/PUBLIC_ADDRESS/tcp/4001, `swarm1.…`."""
END = re.compile(r"[|>;&#]|\\$")
RUN_BY_NAME = {rules.name for rules in METHODS}
METHOD = re.compile(rf"(?:{'|'.join(sorted(RUN_BY_NAME))})/[a-z0-9_/+=.@-]+\Z")
SETTING = re.compile(r"([a-z]+\.[a-z_]+) ?= ?(\S.*)\Z")


@dataclass(frozen=True, slots=True)
class Mention:
    """A command or name as a page says it. `whole`: a line to type, of which nothing is left out."""

    text: str
    whole: bool


def paragraphs(text: str) -> Iterator[str]:
    """Paragraphs, table rows and items of a page without its fenced blocks."""
    yield from re.split(r"\n\s*\n|\n(?=\||\s*[*-] )", FENCE.sub("", text))


def spans(text: str) -> list[str]:
    """The code of each paragraph that is not of the past, joined where a line ends within it."""
    now = [one for one in paragraphs(text) if not OF_THE_PAST.search(" ".join(one.split()))]
    return [" ".join(match[1].split()) for one in now for match in SPAN.finditer(one)]


def mentions(text: str) -> list[Mention]:
    """Each `swarmnode ...` of a page."""
    found = []
    for block in FENCE.findall(text):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            at = re.match(r"(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\S*/bin/)?swarmnode (?=[a-z])", line.strip())
            if at:
                found.append(Mention(line.strip()[at.end() :], whole=True))
    for code in spans(text):
        first, _, rest = code.partition(" ")
        if first == "swarmnode" and re.match(r"[a-z]", rest):
            found.append(Mention(rest, whole=False))
        elif (first in VERBS and rest.startswith("-")) or (first == "bench" and rest):
            found.append(Mention(code, whole=False))
    return found


def words_of(text: str) -> list[str]:
    """The words of a command up to a pipe, a redirection, a second command or a comment."""
    taken = []
    for word in shlex.split(re.sub(r"(^|\s)#.*", "", text)):
        if END.match(word):
            break
        taken.append(word)
    return taken


def check(mention: Mention) -> None:
    """Raises click.UsageError, UsageError or ManifestError for a command that the product refuses."""
    words = words_of(mention.text)
    command: click.Command | None = Verbs()
    context = click.Context(Verbs())
    path: list[str] = []
    while isinstance(command, click.Group) and words and not words[0].startswith("-") and words[0] not in ("...", "…"):
        path.append(words.pop(0))
        command = command.get_command(context, path[-1])
        if command is None:
            raise click.UsageError(f"no such verb: {' '.join(path)}")
        context = click.Context(command, info_name=path[-1], parent=context)
    if command is None or isinstance(command, click.Group):
        return
    words = [word for word in words if word not in ("...", "…")]
    taken = {name for one in command.params if not _is_flag(one) for name in one.opts}
    if not mention.whole and words and words[-1] in taken:
        words.append("...")  # the option alone is named
    given, left, _ = command.make_parser(context).parse_args(words)
    if left and not all(STAND_IN.search(word) for word in left):
        raise click.UsageError(f"{' '.join(path)}: unexpected {left}")
    for parameter in command.params:
        _check_value(context, parameter, given.get(parameter.name or ""))
    if " ".join(path) in NAMED:
        NAMED[" ".join(path)](given)


def _is_flag(parameter: click.Parameter) -> bool:
    return isinstance(parameter, click.Option) and (parameter.is_flag or parameter.count)


def _check_value(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    """A word that is no stand-in and names no file is what the parameter's type takes."""
    if not isinstance(parameter, click.Option) and not isinstance(parameter.type, click.Choice):
        return
    values = value if isinstance(value, list | tuple) else [value]
    for one in values:
        if isinstance(one, str) and not STAND_IN.search(one) and not isinstance(parameter.type, click.Path):
            parameter.type.convert(one, parameter, context)


def _names(given: dict[str, Any], key: str) -> list[str]:
    said = given.get(key)
    return [] if not isinstance(said, str) or STAND_IN.search(said) else [word.strip() for word in said.split(",")]


def _known(names: list[str], known: Any, what: str) -> None:
    for name in names:
        if name not in known:
            raise UsageError(f"unknown {what} {name!r}")


def _acceptance(given: dict[str, Any]) -> None:
    for name in _names(given, "acceptance"):
        field_takes("gossip.acceptance", name)


def _gossip(given: dict[str, Any]) -> None:
    for name in _names(given, "methods"):
        gossip.maker(name)
    _known(_names(given, "preset"), gossip.PRESETS, "preset")
    _acceptance(given)


def _attack(given: dict[str, Any]) -> None:
    _known(_names(given, "attacks"), table.NAMES, "attack")
    _known(_names(given, "methods"), swarm.METHODS, "method")
    for name in _names(given, "codec"):
        gossip.maker(name)
    _acceptance(given)


def _scaling(given: dict[str, Any]) -> None:
    _known(_names(given, "lines"), scaling.LINES, "line")


def _simulate(given: dict[str, Any]) -> None:
    for name in _names(given, "name"):
        if not name.endswith(".toml"):
            scenario.find(name)


def _set(given: dict[str, Any]) -> None:
    for change in _changes(given):
        name, sign, value = change.partition("=")
        if sign:
            field_takes(name, value)


def _changes(given: dict[str, Any]) -> list[str]:
    """FIELD=VALUE of `manifest set` and `amend`; none where click's own mark stands for what was left out."""
    said = given.get("changes")
    return list(said) if isinstance(said, list | tuple) else []


def _amend(given: dict[str, Any]) -> None:
    _set(given)
    for change in _changes(given):
        _known([change.partition("=")[0]], AMENDABLE, "field that can change under way")


NAMED = {
    "bench gossip": _gossip,
    "bench attack": _attack,
    "bench scaling": _scaling,
    "simulate": _simulate,
    "manifest set": _set,
    "amend": _amend,
}
"""What a command's own code checks of names that click takes as text."""


def field_takes(name: str, said: str) -> None:
    """Raises ManifestError unless the manifest has the field `name`, and `said` (TOML, or a bare word) is allowed."""
    field = BY_NAME.get(name)
    if field is None:
        raise ManifestError(f"{name}: unknown field")
    if STAND_IN.search(said):
        return
    try:
        value = tomllib.loads(f"x = {said}")["x"]
    except tomllib.TOMLDecodeError:
        value = said
    if field.check.accept(value) is None:
        raise ManifestError(f"{name} = {said}: allowed is {field.check.allowed}")


def refused(text: str) -> list[str]:
    """What the product refuses of a page: each command, method and setting with its error."""
    found = []
    for mention in mentions(text):
        try:
            check(mention)
        except (click.UsageError, UsageError, ManifestError, ValueError) as error:
            found.append(f"swarmnode {mention.text}: {getattr(error, 'message', error)}")
    for code in spans(text):
        try:
            if METHOD.match(code):
                gossip.maker(code)
            elif (match := SETTING.match(code)) and match[1].partition(".")[0] in TABLES:
                field_takes(match[1], match[2])
        except (UsageError, ManifestError) as error:
            found.append(f"{code}: {error}")
    return found


TABLES = {name.partition(".")[0] for name in BY_NAME if "." in name}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_product_takes_what_a_page_says(page: Path) -> None:
    assert not (said := refused(page.read_text())), "\n".join(said)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_modules_that_a_page_names_exist(page: Path) -> None:
    """`run/admission/access.py`, from the root, a package or beside the page."""
    named = [code for code in spans(page.read_text()) if re.fullmatch(r"[\w./-]+/[\w-]+\.(py|proto|c)", code)]
    roots = (ROOT, page.parent, *(ROOT / name for name in ("swarmnode", "swarmsim", "tests", "deploy", "benchmarks")))
    gone = [name for name in named if not any((root / name).is_file() for root in roots)]
    assert not gone, f"{gone} exist no more"


@pytest.mark.parametrize(
    "page",
    [
        "`swarmnode bench attack --acceptance guarded`",
        "`swarmnode bench attack --attacks flop`",
        '`swarmnode bench\nattack --attacks "steer nowhere"`',
        "| `noloco/modular4@qsr` | 2.4 |",
        "`average/modular5`",
        "`bench gossip --preset fast`",
        '`gossip.method = "swap"`',
        "`recovery.while_lost = 3`",
        "`swarmnode amend RUN model.layers=3`",
        "`swarmnode simulate --scenario nowhere`",
        "`swarmnode bench scaling --lines moon`",
        "```sh\nswarmnode join INVITE --max-up soon\n```",
        "```\nswarmnode limit \\\n  --max-upload 5Mbit\n```",
        "```\nA=b ~/x/bin/swarmnode dance\n```",
        "`init --parameters many`",
    ],
)
def test_words_that_the_product_refuses_are_found(page: str) -> None:
    assert refused(page)


@pytest.mark.parametrize(
    "page",
    [
        "`noloco/modular4@qsr` was removed.",
        "Measured by a checkout of 19d2df55: `swarmnode bench attack --acceptance guarded`.",
        "`swarmnode simulate --sweep`, `swarmnode bench learning RUN --replicas N`, `swarmnode plan … --simulate 10m`",
        "```\nswarmnode join swarm1.… --hours 22-07 | tee log  # as you like\n```",
        '`gossip.method = "gradient"` with `average/modular4`',
    ],
)
def test_words_that_the_product_takes_are_not_found(page: str) -> None:
    assert not refused(page)

"""`swarmnode generate SOURCE` and `chat SOURCE`: text from a model, streamed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarmnode.cli.export import DATA, KIND
from swarmnode.cli.output.console import bar, note
from swarmnode.untrusted_text import readable

if TYPE_CHECKING:
    from swarmnode.data.tokens import Tokenizer
    from swarmnode.model.decoder import Decoder
    from swarmnode.model.gather import Gathered

    Opened = tuple[Gathered, Decoder, Tokenizer, Path | None, frozenset[int]]


@click.command(short_help="text from an exported model, or from a checkpoint")
@click.argument("source", metavar="SOURCE")
@click.option("--prompt", help="Text to continue.  [default: stdin]")
@click.option("--tokens", type=click.IntRange(1, 1 << 20), default=200, help="Most tokens to generate.")
@click.option("--temperature", type=click.FloatRange(0, 100), default=0.8, help="0: always the most likely token.")
@click.option("--top-k", type=click.IntRange(0), default=0, show_default="all", help="Choose among the K most likely.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=0.95, help="Nucleus.")
@click.option("--seed", type=click.IntRange(0, (1 << 63) - 1), default=0, help="The same seed gives the same text.")
@KIND
@DATA
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object at the end: text, tokens, tokens_per_s, round, samples, age_s, validation.",
)
def command(
    source: str,
    prompt: str | None,
    tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    kind: str,
    data: Path | None,
    as_json: bool,
) -> None:
    """Continue --prompt with the model in SOURCE (as for `export`: an exported model, a session's folder, a
    checkpoint; of a run that an archive on this machine copies, the model of now). Text goes to stdout as it is
    generated, the prompt first."""
    from swarmnode.local.model_source import facts
    from swarmnode.model.text_generation import Sampling, generate

    given = prompt if prompt is not None else sys.stdin.read()
    gathered, net, tokenizer, _, stops = _opened(source, kind, data)
    ids = [int(token) for token in tokenizer.encode(given)]
    sampling = Sampling(temperature, top_k, top_p, seed)
    begun = time.perf_counter()
    made = []
    if not as_json:
        click.echo(given, nl=False)

    def counted() -> Iterator[int]:
        for token in generate(net, gathered.manifest.model, ids, tokens, sampling, stops):
            made.append(token)
            yield token

    text = speak(tokenizer, counted(), aloud=not as_json)
    rate = len(made) / max(1e-9, time.perf_counter() - begun)
    if as_json:
        said = {"text": given + text, "tokens": len(made), "tokens_per_s": round(rate, 1)}
        click.echo(json.dumps({**said, **facts(gathered, time.time())}))
    else:
        click.echo()


def _opened(source: str, kind: str, data: Path | None) -> Opened:
    """The model in `source`, its merged weights, its tokenizer, that one's file, and the tokens that end a text."""
    from swarmnode.data.tokenizer_file import run_tokenizer, stops_of
    from swarmnode.local.evaluation import merged_model
    from swarmnode.local.model_source import gather

    with bar("reading") as moved:
        gathered, folder = gather(source, kind, note, moved)
    tokenizer, path = run_tokenizer(data or folder, gathered.manifest.data)
    return gathered, merged_model(gathered), tokenizer, path, stops_of(tokenizer, path)


def speak(tokenizer: Tokenizer, tokens: Iterator[int], *, aloud: bool = True) -> str:
    """The text of `tokens`, printed as it comes if `aloud`: on a terminal without characters that it would act on."""
    pieces = []
    for piece in spoken(tokenizer, tokens):
        pieces.append(piece)
        if aloud:
            click.echo(readable(piece) if sys.stdout.isatty() else piece, nl=False)
    return "".join(pieces)


def spoken(tokenizer: Tokenizer, tokens: Iterator[int]) -> Iterator[str]:
    """Text as soon as it is complete: a character of several tokens waits for its last one."""
    ids: list[int] = []
    start = shown = 0
    for token in tokens:
        ids.append(token)
        before = tokenizer.decode(ids[start:shown])
        now = tokenizer.decode(ids[start:])
        if len(now) > len(before) and (not now.endswith("\ufffd") or len(ids) - shown > 8):
            yield now[len(before) :]
            start = shown
            shown = len(ids)
    rest = tokenizer.decode(ids[start:])[len(tokenizer.decode(ids[start:shown])) :]
    if rest:
        yield rest


@click.command(short_help="talk with an exported model")
@click.argument("source", metavar="SOURCE")
@click.option("--system", help="The system message of the conversation.")
@click.option("--tokens", type=click.IntRange(1, 1 << 20), default=256, help="Most tokens an answer.")
@click.option("--temperature", type=click.FloatRange(0, 100), default=0.7, help="0: always the most likely token.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=0.95, help="Nucleus.")
@click.option("--seed", type=click.IntRange(0, (1 << 62) - 1), default=0, help="Of the first answer.")
@KIND
@DATA
def chat(
    source: str,
    system: str | None,
    tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    kind: str,
    data: Path | None,
) -> None:
    """A conversation with the model in SOURCE (as for `generate`), by its tokenizer's chat template (without one:
    ChatML). One line is one message; an empty line, /quit or Ctrl-D ends, /new forgets what was said. The model should
    have been trained on conversations (docs/data.md)."""
    from swarmnode.data.chat_template import ANSWERS, Message, tokenizer_and_template
    from swarmnode.model.text_generation import Sampling, generate

    gathered, net, tokenizer, path, stops = _opened(source, kind, data)
    _, _, template = tokenizer_and_template(path, tokenizer)
    first: list[Message] = [{"role": "system", "content": system}] if system else []
    said = list(first)
    if sys.stdin.isatty():
        click.echo("an empty line ends, /new begins anew", err=True)
    while True:
        line = _line()
        if line in ("", "/quit"):
            return
        if line == "/new":
            said = list(first)
            continue
        said.append({"role": "user", "content": line})
        text, end = template.render_prompt(said)
        ids = [int(token) for token in tokenizer.encode(text)]
        sampling = Sampling(temperature, 0, top_p, seed)
        made = generate(net, gathered.manifest.model, ids, tokens, sampling, stops)
        answer = speak(tokenizer, before(made, [int(token) for token in tokenizer.encode(end)]))
        click.echo()
        said.append({"role": ANSWERS, "content": answer.strip()})
        seed += 1


def before(tokens: Iterator[int], end: Sequence[int]) -> Iterator[int]:
    """`tokens` up to the ids `end` that close an answer; all of them if `end` is empty."""
    held = list[int]()
    for token in tokens:
        held.append(token)
        if end and held[-len(end) :] == list(end):
            del held[-len(end) :]
            break
        while len(held) > max(0, len(end) - 1):
            yield held.pop(0)
    yield from held


def _line() -> str:
    """The next message; empty at the end of input."""
    if sys.stdin.isatty():
        click.echo("> ", nl=False, err=True)
    return sys.stdin.readline().strip()

"""`swarmnode chat SOURCE`: talk with an exported model."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from swarmnode.cli.export import DATA, KIND
from swarmnode.cli.output.progress import bar


@click.command(short_help="talk with an exported model")
@click.argument("source", metavar="SOURCE")
@click.option("--system", help="The system message of the conversation.")
@click.option(
    "--tokens", type=click.IntRange(1, 1 << 20), default=256, show_default=True, help="Most tokens an answer."
)
@click.option(
    "--temperature",
    type=click.FloatRange(0, 100),
    default=0.7,
    show_default=True,
    help="0: always the most likely token.",
)
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=0.95, show_default=True, help="Nucleus.")
@click.option(
    "--seed", type=click.IntRange(0, (1 << 62) - 1), default=0, show_default=True, help="Of the first answer."
)
@KIND
@DATA
def command(
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
    from swarmnode.cli.generate import say, spoken
    from swarmnode.data.chat_template import ANSWERS, Message, template_beside
    from swarmnode.data.tokenizer_file import run_tokenizer, stops_of
    from swarmnode.local.evaluation import merged_model
    from swarmnode.local.model_source import gather
    from swarmnode.model.text_generation import Sampling, generate

    with bar("reading") as moved:
        gathered, folder = gather(source, kind, lambda text: click.echo(text, err=True), moved)
    model = gathered.manifest.model
    tokenizer, path = run_tokenizer(data or folder, gathered.manifest.data)
    template = template_beside(path)
    stops = stops_of(tokenizer, path)
    net = merged_model(gathered)
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
        made = generate(net, model, ids, tokens, sampling, stops)
        pieces = []
        for piece in spoken(tokenizer, before(made, [int(token) for token in tokenizer.encode(end)])):
            pieces.append(piece)
            say(piece)
        click.echo()
        said.append({"role": ANSWERS, "content": "".join(pieces).strip()})
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

"""`swarmnode generate SOURCE` and `chat SOURCE`: text from a model, streamed."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarmnode.app.cli.export import DATA, KIND
from swarmnode.app.cli.option.param import PORT
from swarmnode.app.cli.output.console import bar, note
from swarmnode.app.cli.output.own_page import show_page
from swarmnode.base.untrusted_text import readable

if TYPE_CHECKING:
    from swarmnode.app.local.chat_page import ChatSettings
    from swarmnode.app.local.conversation import Speaker


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
    help="Print one JSON object at the end: text, tokens, tokens_per_s, kind, round, samples, age_s, validation.",
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
    from swarmnode.app.local.model_source import facts
    from swarmnode.app.local.text_pieces import pieces
    from swarmnode.model.text_generation import Sampling

    given = prompt if prompt is not None else sys.stdin.read()
    speaker = _opened(source, kind, data)
    sampling = Sampling(temperature, top_k, top_p, seed)
    made: list[int] = []
    begun = time.perf_counter()
    if not as_json:
        click.echo(given, nl=False)

    def counted() -> Iterator[int]:
        for token in speaker.tokens_after(given, tokens, sampling):
            made.append(token)
            yield token

    text = speak(pieces(speaker.tokenizer, counted(), given), aloud=not as_json)
    rate = len(made) / max(1e-9, time.perf_counter() - begun)
    if as_json:
        said = {"text": given + text, "tokens": len(made), "tokens_per_s": round(rate, 1)}
        click.echo(json.dumps({**said, **facts(speaker.gathered, time.time())}))
    else:
        click.echo()


def _opened(source: str, kind: str, data: Path | None) -> Speaker:
    from swarmnode.app.local.conversation import Speaker

    with bar("reading") as moved:
        return Speaker.of(source, kind, data, note, moved)


def speak(pieces: Iterator[str], *, aloud: bool = True) -> str:
    """The text of `pieces`, printed as they come if `aloud`: on a terminal without characters that it would act on."""
    said = []
    for piece in pieces:
        said.append(piece)
        if aloud:
            click.echo(readable(piece) if sys.stdout.isatty() else piece, nl=False)
    return "".join(said)


@click.command(short_help="talk with an exported model")
@click.argument("source", metavar="SOURCE")
@click.option("--system", help="The system message of the conversation.")
@click.option("--tokens", type=click.IntRange(1, 1 << 20), default=256, help="Most tokens an answer.")
@click.option("--temperature", type=click.FloatRange(0, 100), default=0.7, help="0: always the most likely token.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=0.95, help="Nucleus.")
@click.option("--seed", type=click.IntRange(0, (1 << 62) - 1), default=0, help="Of the first answer.")
@click.option("--page", is_flag=True, help="Talk on a page in a browser of this machine, until Ctrl-C.")
@click.option("--port", type=PORT, default=0, show_default="any", help="Where the page listens, on this machine only.")
@KIND
@DATA
def chat(
    source: str,
    system: str | None,
    tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    page: bool,
    port: int,
    kind: str,
    data: Path | None,
) -> None:
    """A conversation with the model in SOURCE (as for `generate`), by its tokenizer's chat template (without one:
    ChatML). One line is one message; an empty line, /quit or Ctrl-D ends, /new forgets what was said. The model should
    have been trained on conversations (docs/data.md).

    With --page the conversation is held on a page in a browser of this machine. The page's address, printed on stdout,
    holds a token. Of a run that still trains each new conversation takes the newest model."""
    from swarmnode.data.chat_template import ANSWERS
    from swarmnode.data.message import Message
    from swarmnode.model.text_generation import Sampling

    if page:
        from swarmnode.app.local.chat_page import ChatSettings

        settings = ChatSettings(system or "", tokens, temperature, top_p)
        _show_page(source, kind, data, settings, port)
        return
    speaker = _opened(source, kind, data)
    template = speaker.template()
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
        answer = speak(speaker.answer(template, said, tokens, Sampling(temperature, 0, top_p, seed)))
        click.echo()
        said.append({"role": ANSWERS, "content": answer.strip()})
        seed += 1


def _show_page(source: str, kind: str, data: Path | None, settings: ChatSettings, port: int) -> None:
    """Serve the page of a conversation with the model in `source` until Ctrl-C."""
    from swarmnode.app.local.chat_page import ChatPage
    from swarmnode.app.local.conversation import Speaker
    from swarmnode.app.local.model_source import is_export

    def made(token: str) -> ChatPage:
        return ChatPage(lambda: Speaker.of(source, kind, data, note), token, settings, changes=not is_export(source))

    told = "open this address in a browser to talk with the model; Ctrl-C ends the page"
    asyncio.run(show_page(made, port, told))


def _line() -> str:
    """The next message; empty at the end of input."""
    if sys.stdin.isatty():
        click.echo("> ", nl=False, err=True)
    return sys.stdin.readline().strip()

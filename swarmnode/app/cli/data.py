"""`swarmnode data make OUT --from PATH`: text becomes a data set, which a manifest names by its hash."""

from __future__ import annotations

import codecs
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

from swarmnode.app.cli.option.param import FOLDER
from swarmnode.app.cli.output.console import bar
from swarmnode.app.cli.output.listed import ListedGroup
from swarmnode.base.errors import DataError, UsageError
from swarmnode.base.untrusted_text import readable

if TYPE_CHECKING:
    from swarmnode.data.chat_template import ChatTemplate
    from swarmnode.data.document_row import BadRows
    from swarmnode.data.index import Index
    from swarmnode.data.tokens import Tokenizer

FEW_TOKENS = 4096  # derived: 32 samples of the demo


@click.group(cls=ListedGroup, short_help="make a data set of text, which a run then names by content")
def command() -> None:
    """Make data sets. A run's manifest names one by its hash, and every machine that feeds the run fetches what it
    needs of it and checks it, so nobody needs your files or believes who gives them."""


@command.command()
@click.argument("out", metavar="OUT", type=FOLDER)
@click.option(
    "--from",
    "sources",
    multiple=True,
    required=True,
    metavar="PATH",
    help="Folder or file of text, JSON lines, a JSON array, CSV or Parquet, also compressed; or"
    " hf:NAME[@REVISION][#CONFIG] of the Hugging Face hub. Repeatable.",
)
@click.option(
    "--weight",
    "weights",
    type=click.FloatRange(0.0, 1000.0),
    multiple=True,
    help="Copies of each document, one number for each --from in turn; .5 takes every second.  [default: 1]",
)
@click.option(
    "--tokenizer",
    default="bytes",
    metavar="PATH|MODEL|bytes",
    help="A Hugging Face tokenizer.json (`data tokenizer` makes one), or a model's: its folder, hf://USER/NAME[@REVISION].",
)
@click.option("--field", help="Key or column that holds a document's text.  [default: text]")
@click.option(
    "--messages",
    help="Key or column that holds a conversation; only what the assistant says counts in the loss. It goes before"
    " --field in rows that have both.  [default: messages]",
)
@click.option(
    "--encoding",
    default="",
    show_default=False,
    metavar="NAME",
    help="Of text files that are not UTF-8, such as latin-1.",
)
@click.option(
    "--special-tokens",
    is_flag=True,
    help="Read the written form of a special token in plain text as that token, not as text.",
)
@click.option(
    "--skip-bad",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Leave out files that are no text and rows that cannot be read or rendered, N at most; each is counted.",
)
@click.option(
    "--validation",
    type=click.FloatRange(0.0, 0.5, min_open=True),
    default=0.01,
    help="Share of the tokens that count which is held out, whole documents chosen by hash.",
)
@click.option("--seed", type=click.IntRange(0), default=0, help="Of the order of documents.")
@click.option("--split", default="train", help="Which split of a data set of the hub, or of a saved one.")
@click.option(
    "--chunk-tokens",
    type=click.IntRange(2, 1 << 22),
    help="Tokens of a chunk, the unit that is fetched.  [default: 4 MiB, less where there is little text]",
)
def make(
    out: Path,
    sources: tuple[str, ...],
    weights: tuple[float, ...],
    tokenizer: str,
    field: str | None,
    messages: str | None,
    encoding: str,
    special_tokens: bool,
    skip_bad: int,
    validation: float,
    seed: int,
    split: str,
    chunk_tokens: int | None,
) -> None:
    """Tokenise, shuffle by document and cut into chunks. Killed, it goes on where it was when it is called again.

    Prints the SHA-256 of OUT/index.json. Then: swarmnode init RUN --data OUT
    """
    from swarmnode.data.document_row import Reading
    from swarmnode.data.set_maker import Encoding, MakeOptions
    from swarmnode.data.set_maker import make as made_of
    from swarmnode.data.tokenizer_file import files_beside

    try:
        codecs.lookup(encoding or "utf-8")
    except LookupError:
        raise UsageError(f"--encoding {encoding}: Python knows no encoding of this name") from None
    reading = Reading(field, messages, split=split, encoding=encoding)
    options = MakeOptions(sources, weights, reading, validation, seed, chunk_tokens, skip_bad)
    with _tokenizer_file(tokenizer) as path:
        opened, raw, template = _opened(path)

        def beside(rendered: bool) -> dict[str, bytes]:
            if path is None or raw is None:
                return {}
            return files_beside(path, raw, template, opened, rendered=rendered)

        with bar("tokenising") as moved:
            index, bad = made_of(out, options, Encoding(opened, template, special_tokens), beside, moved)
    _tell_left_out(bad)
    _tell_made(index, validation, bool(weights))
    if index.loss_mask and path is not None and template.own is None:
        click.echo(f"no chat template lies beside {tokenizer}: conversations are written as ChatML", err=True)
    click.echo(index.digest.hex())


def _tell_left_out(bad: BadRows) -> None:
    """Say which rows are not in the set."""
    for line in bad.lines:
        click.echo(f"left out: {line}", err=True)
    if bad.count > len(bad.lines):
        click.echo(f"left out: {bad.count - len(bad.lines):,} more", err=True)
    if bad.empty:
        click.echo(f"left out: {bad.empty:,} empty texts", err=True)


def _tell_made(index: Index, validation: float, weighted: bool) -> None:
    """Say what is in the set, and whether much or little of it is held out. `validation`: the share asked for."""
    train = index.train
    held_out = index.validation
    click.echo(
        f"{train.tokens:,} tokens of {train.documents:,} documents to train on, {held_out.tokens:,} of"
        f" {held_out.documents:,} held out, in {index.count:,} chunks; vocabulary {index.vocabulary:,}",
        err=True,
    )
    share = held_out.tokens / (train.tokens + held_out.tokens)
    if share > 2 * validation and not weighted:
        click.echo(f"{share:.0%} of the tokens are held out: too few documents, or many alike", err=True)
    if held_out.tokens < FEW_TOKENS:
        click.echo("few tokens are held out: validation will be noisy; a larger --validation holds out more", err=True)


@contextlib.contextmanager
def _tokenizer_file(named: str) -> Iterator[Path | None]:
    """The path of the tokenizer.json that --tokenizer names, None for bytes. A model's files are fetched for a while.
    Raises DataError when the model has none."""
    if named == "bytes":
        yield None
    elif "://" in named:
        from swarmnode.app.cli.init import open_model
        from swarmnode.data.base_index import SMALL_NBYTES_MAX
        from swarmnode.data.index import TOKENIZER_FILE
        from swarmnode.data.tokenizer_file import BESIDE_TOKENIZER

        with TemporaryDirectory() as folder, open_model(named, "--tokenizer") as model:
            for name in (TOKENIZER_FILE, *BESIDE_TOKENIZER):
                content = model.files.read_whole(name, SMALL_NBYTES_MAX)
                if content is not None:
                    (Path(folder) / name).write_bytes(content)
            if not (Path(folder) / TOKENIZER_FILE).is_file():
                raise DataError(f"--tokenizer {named[:200]}: it has no {TOKENIZER_FILE}")
            yield Path(folder) / TOKENIZER_FILE
    else:
        path = Path(named)
        yield path / "tokenizer.json" if path.is_dir() else path


def _opened(path: Path | None) -> tuple[Tokenizer, bytes | None, ChatTemplate]:
    """The tokenizer in `path`, its tokenizer.json as transformers makes it, and its chat template; looked at first."""
    from swarmnode.data.chat_template import tokenizer_and_template
    from swarmnode.data.root import DataRoot
    from swarmnode.data.tokenizer_file import check_tokenizer
    from swarmnode.data.tokens import open_tokenizer

    if path is not None and path.exists():
        check_tokenizer(path)
    opened = open_tokenizer("bytes" if path is None else path.name, DataRoot(path.parent if path else None))
    return tokenizer_and_template(path, opened)


@command.command()
@click.argument("out", metavar="OUT", type=FOLDER)
@click.option("--from", "sources", multiple=True, required=True, metavar="PATH", help="As for `data make`; repeatable.")
@click.option(
    "--vocabulary",
    type=click.IntRange(1),
    default=8192,
    help="Tokens. A small model gives more of its parameters to its layers with few.",
)
@click.option("--field", help="Key or column that holds a document's text.  [default: text]")
@click.option("--messages", help="Key or column that holds a conversation.  [default: messages]")
@click.option("--seed", type=click.IntRange(0), default=0, help="Of the order in which text is read.")
def tokenizer(
    out: Path, sources: tuple[str, ...], vocabulary: int, field: str | None, messages: str | None, seed: int
) -> None:
    """Make a tokenizer of your own text, byte-level BPE with ChatML's special tokens, in the form of Hugging Face.
    Prints its file. Then: swarmnode data make SET --from PATH --tokenizer OUT/tokenizer.json"""
    from swarmnode.data.document_row import Reading
    from swarmnode.data.index import TOKENIZER_FILE
    from swarmnode.data.tokenizer_maker import make_tokenizer

    size = make_tokenizer(out, sources, Reading(field, messages), vocabulary, seed)
    click.echo(f"{size:,} tokens", err=True)
    if size < vocabulary:
        click.echo("the text has no more pairs of tokens that occur twice: give more text", err=True)
    click.echo(out / TOKENIZER_FILE)


@command.command()
@click.argument("out", metavar="OUT", type=FOLDER)
def check(out: Path) -> None:
    """Read all of the data set in OUT, and compare every chunk with its hash, and the ends of documents with their
    number. Exit code 78 when one is wrong."""
    import hashlib

    import numpy as np

    from swarmnode.data.chunk_store import read_regular
    from swarmnode.data.indexed import index_of

    index = index_of(out)
    ends = [0, 0]
    for number in range(index.count):
        chunk = index.chunk(number)
        data = read_regular(out / chunk.shard, chunk.nbytes, chunk.offset)
        if data is None or hashlib.sha256(data).digest() != chunk.sha256:
            raise DataError(
                f"{out / chunk.shard}: {chunk.nbytes} bytes from {chunk.offset} on are not those of the index; make the"
                " data set again, or copy this file anew"
            )
        ids = np.frombuffer(data, index.dtype, chunk.tokens)
        ends[number >= index.train.count] += int(np.count_nonzero(ids == index.end_token))
    if ends != [index.train.documents, index.validation.documents]:
        raise DataError(
            f"{out}: token {index.end_token} ends {sum(ends):,} documents, and the index counts"
            f" {index.train.documents + index.validation.documents:,}; make the data set again"
        )
    click.echo(f"{index.count:,} chunks are as the index says", err=True)
    click.echo(index.digest.hex())


@command.command()
@click.argument("out", metavar="OUT", type=FOLDER)
@click.option("--row", type=click.IntRange(0), default=0, help="The document, counted from 0.")
@click.option("--split", type=click.Choice(["train", "validation"]), default="train", help="Of which split.")
def show(out: Path, row: int, split: str) -> None:
    """Print a document of the data set in OUT as it is trained on: green counts in the loss, grey is only read. Without
    colours, what counts is between double angle quotes. Its end is a token of its own, shown by its name or number."""
    from swarmnode.data.index import TOKENIZER_FILE
    from swarmnode.data.indexed import document_of, index_of
    from swarmnode.data.root import DataRoot
    from swarmnode.data.tokens import open_tokenizer

    index = index_of(out)
    tokenizer = open_tokenizer(TOKENIZER_FILE if (out / TOKENIZER_FILE).is_file() else "bytes", DataRoot(out))
    ids, counts = document_of(out, index, split, row)
    click.echo(
        f"document {row:,} of {getattr(index, split).documents:,} ({split}): {len(ids):,} tokens, {int(counts.sum()):,}"
        " count in the loss",
        err=True,
    )
    at = 0
    for last in [*(n for n in range(1, len(ids)) if counts[n] != counts[n - 1]), len(ids)]:
        end = last == len(ids) and ids[-1] == index.end_token
        text = readable(tokenizer.decode(ids[at : last - end])) + (f"[end {index.end_token}]" if end else "")
        if sys.stdout.isatty():
            text = click.style(text, fg="green", bold=True) if counts[at] else click.style(text, dim=True)
        else:
            text = f"\u00ab{text}\u00bb" if counts[at] else text
        click.echo(text, nl=False)
        at = last
    click.echo()

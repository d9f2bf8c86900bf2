"""`swarmnode data make OUT --from PATH`: text becomes a data set, which a manifest names by its hash."""

from __future__ import annotations

import codecs
import sys
from pathlib import Path

import click

from swarmnode.cli.option.param import FOLDER
from swarmnode.cli.output.console import bar
from swarmnode.errors import UsageError
from swarmnode.untrusted_text import readable

FEW_TOKENS = 4096  # derived: 32 samples of the demo


@click.group(short_help="make a data set of text, which a run then names by content")
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
@click.option("--tokenizer", default="bytes", metavar="PATH|bytes", help="A Hugging Face tokenizer.json.")
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
    from swarmnode.data.chat_template import tokenizer_and_template
    from swarmnode.data.document_row import Reading
    from swarmnode.data.root import DataRoot
    from swarmnode.data.set_maker import Encoding, MakeOptions
    from swarmnode.data.set_maker import make as made_of
    from swarmnode.data.tokenizer_file import check_tokenizer, files_beside
    from swarmnode.data.tokens import open_tokenizer

    try:
        codecs.lookup(encoding or "utf-8")
    except LookupError:
        raise UsageError(f"--encoding {encoding}: Python knows no encoding of this name") from None
    path = None if tokenizer == "bytes" else Path(tokenizer)
    if path is not None and path.exists():
        check_tokenizer(path)
    opened = open_tokenizer("bytes" if path is None else path.name, DataRoot(path.parent if path else None))
    opened, raw, template = tokenizer_and_template(path, opened)
    reading = Reading(field, messages, split=split, encoding=encoding)
    options = MakeOptions(sources, weights, reading, validation, seed, chunk_tokens, skip_bad)

    def beside(rendered: bool) -> dict[str, bytes]:
        if path is None or raw is None:
            return {}
        return files_beside(path, raw, template, opened, rendered=rendered)

    with bar("tokenising") as moved:
        index, bad = made_of(out, options, Encoding(opened, template, special_tokens), beside, moved)
    train = index.train
    held_out = index.validation
    for line in bad.lines:
        click.echo(f"left out: {line}", err=True)
    if bad.count > len(bad.lines):
        click.echo(f"left out: {bad.count - len(bad.lines):,} more", err=True)
    if bad.empty:
        click.echo(f"left out: {bad.empty:,} empty texts", err=True)
    click.echo(
        f"{train.tokens:,} tokens of {train.documents:,} documents to train on, {held_out.tokens:,} of"
        f" {held_out.documents:,} held out, in {index.count:,} chunks; vocabulary {index.vocabulary:,}",
        err=True,
    )
    if index.loss_mask and path is not None and template.own is None:
        click.echo(f"no chat template lies in {path.parent}: conversations are written as ChatML", err=True)
    share = held_out.tokens / (train.tokens + held_out.tokens)
    if share > 2 * validation and not weights:
        click.echo(f"{share:.0%} of the tokens are held out: too few documents, or many alike", err=True)
    if held_out.tokens < FEW_TOKENS:
        click.echo("few tokens are held out: validation will be noisy; a larger --validation holds out more", err=True)
    click.echo(index.digest.hex())


@command.command()
@click.argument("out", metavar="OUT", type=FOLDER)
def check(out: Path) -> None:
    """Read all of the data set in OUT, and compare every chunk with its hash, and the ends of documents with their
    number. Exit code 78 when one is wrong."""
    import hashlib

    import numpy as np

    from swarmnode.data.chunk_store import read_regular
    from swarmnode.data.indexed import index_of
    from swarmnode.errors import DataError

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

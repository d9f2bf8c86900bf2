"""`swarmnode quickstart RECIPE`: data, run, training on this machine, a report, and a conversation, by one command."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swarmnode.app.cli.option.param import LISTEN, PORT
from swarmnode.app.cli.output.console import note
from swarmnode.base.errors import UsageError

if TYPE_CHECKING:
    from swarmnode.app.local.starter import Starter

PROGRAM = "from swarmnode.app.cli import run; raise SystemExit(run())"  # as the installed command, also in a checkout
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TEXT_TOKENS = 120  # of each text in the report; guess


@click.command(short_help="one command from a recipe to a model that talks")
@click.argument("recipe", metavar="[RECIPE]", required=False)
@click.argument("folder", metavar="[FOLDER]", required=False, type=click.Path(file_okay=False, path_type=Path))
@click.option("--text", "texts", multiple=True, metavar="PATH", help="Your text or conversations, as for `data make`.")
@click.option("--model", metavar="MODEL", help="Start from this model, as for `init --from`.")
@click.option("--nodes", type=click.IntRange(1, 256), help="Processes on this machine.")
@click.option("--samples", type=click.IntRange(1, 10**12), help="Length of the run.")
@click.option("--listen", type=LISTEN, help="Let other machines join, too: /ip4/0.0.0.0/tcp/4001. Prints their line.")
@click.option("--chat/--no-chat", default=True, help="End with a page on which you talk with the model.")
@click.option("--port", type=PORT, default=0, show_default="any", help="Of that page, on this machine only.")
@click.option("--json", "as_json", is_flag=True, help="Print the recipes as a JSON list.")
def command(
    recipe: str | None,
    folder: Path | None,
    texts: tuple[str, ...],
    model: str | None,
    nodes: int | None,
    samples: int | None,
    listen: str | None,
    chat: bool,
    port: int,
    as_json: bool,
) -> int:
    """Make a model by a recipe, on this machine and those that join: its data, its run, the training, a report, and a
    page on which you talk with it. Without RECIPE it lists the recipes; RECIPE may be a file of your own.

    All lies below FOLDER (default: the recipe's name). Each step is a verb, which is shown; a step that was done is
    left out, so the same command goes on where it was. Ctrl-C ends the training early, and the rest follows.
    """
    from swarmnode.app.local import starter

    if as_json and recipe is not None:
        raise click.UsageError("--json lists the recipes: leave out RECIPE")
    if recipe is None:
        _tell([starter.read(name) for name in starter.names()], as_json)
        return 0
    made = starter.read(recipe)
    if model is not None and not made.model:
        raise click.UsageError(f"--model: recipe {made.name} begins from nothing")
    begun = Begun(made, folder or Path(made.name), model or made.model, nodes or made.nodes, samples or made.length)
    for step in (begun.make_tokenizer, begun.make_data, begun.make_run):
        if (code := step(texts)) != 0:
            return code
    if (code := begun.train(listen)) != 0:
        return code
    report = begun.report()
    click.echo(report)
    return begun.talk(port) if chat and made.chat else 0


def _tell(recipes: Sequence[Starter], as_json: bool) -> None:
    if as_json:
        keys = ("name", "title", "about", "needs", "takes", "nodes")
        shown = [
            {key: getattr(made, key) for key in keys} | {"text": made.what, "samples": made.length} for made in recipes
        ]
        click.echo(json.dumps(shown))
        return
    for made in recipes:
        click.echo(f"swarmnode quickstart {made.name}\n    {made.title}\n    {made.about}")
        click.echo(f"    --text: {made.what}\n    needs {made.needs}; takes {made.takes}\n")


class Begun:
    """A recipe under way in `folder`: each step is a verb, left out where its result is there."""

    def __init__(self, made: Starter, folder: Path, model: str, nodes: int, length: int) -> None:
        self._made = made
        self._folder = folder
        self._model = model
        self._nodes = nodes
        self._length = length
        self._run = folder / "run"
        self._data = folder / "data"
        self._tokenizer = folder / "tokenizer"
        self._export = folder / "model"

    def make_tokenizer(self, texts: Sequence[str]) -> int:
        """A tokenizer of the text, where the recipe has one of its own."""
        if not self._made.vocabulary or (self._tokenizer / "tokenizer.json").exists():
            return 0
        vocabulary = ["--vocabulary", str(self._made.vocabulary)]
        return _verb("data", "tokenizer", str(self._tokenizer), *_from(self._texts(texts)), *vocabulary)

    def make_data(self, texts: Sequence[str]) -> int:
        """The data set, with the tokenizer of the recipe or of its model."""
        if (self._data / "index.json").exists():
            return 0
        tokenizer = str(self._tokenizer) if self._made.vocabulary else self._model
        given = _from(self._texts(texts))
        if not texts:
            given += [word for weight in self._made.weights for word in ("--weight", str(weight))]
        options = ["--tokenizer", tokenizer, "--validation", str(self._made.validation)]
        return _verb("data", "make", str(self._data), *given, *options)

    def make_run(self, texts: Sequence[str]) -> int:
        """The run, with the recipe's fields."""
        if (self._run / "manifest.toml").exists():
            return 0
        made = self._made
        start = ["--from", self._model, "--kind", made.kind] if self._model else ["--parameters", str(made.parameters)]
        sizes = {"nodes": self._nodes, "samples": self._length, "context": made.context}
        options = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
        code = _verb("init", str(self._run), "--data", str(self._data), *start, *options)
        if code != 0:
            return code
        changes = [f"{name}={json.dumps(value)}" for name, value in self._fields().items()]
        return _verb("manifest", "set", str(self._run), *changes)

    def _fields(self) -> dict[str, object]:
        """The recipe's values of the manifest, and the run's name: the folder's, else the recipe's."""
        from swarmnode.run.manifest.spec import BY_NAME

        name = self._folder.resolve().name
        if BY_NAME["name"].check.accept(name) is None:
            name = self._made.name
        return {"name": name, **self._made.fields}

    def train(self, listen: str | None) -> int:
        """Train until the run's length or Ctrl-C; from the newest checkpoint of an earlier session, if there is one."""
        from swarmnode.app.local.model_source import is_export

        if is_export(str(self._export)):
            note(f"{self._export} is there: nothing is trained; remove it to go on with the training")
            return 0
        options = ["--nodes", str(self._nodes), "--samples", str(self._length), "--out", str(self._export)]
        sessions = sorted(self._run.glob("up-*/checkpoints"))
        saved = [session for session in sessions if any(session.iterdir())]
        if saved:
            options += ["--resume", str(saved[-1])]
        if listen is not None:
            options += ["--listen", listen]
        code = _verb("up", str(self._run), *options)
        if code == 0 and not is_export(str(self._export)):
            raise UsageError(f"{self._run} trained no sample: the same command goes on")
        return code

    def report(self) -> Path:
        """FOLDER/REPORT.md: the session's, with texts that the model writes."""
        from swarmnode.app.dashboard.run_report import TREE, write_report

        sessions = sorted(self._run.glob(f"up-*/{TREE}"))
        if not sessions:
            raise UsageError(f"{self._run}: no session left a report")
        tree: dict[str, Any] = json.loads(sessions[-1].read_text())
        tree["texts"] = self._written()
        return write_report(self._folder, tree)

    def talk(self, port: int) -> int:
        """The page of a conversation with the model, until Ctrl-C."""
        code = _verb("chat", str(self._export), "--page", "--port", str(port))
        return 0 if code == 130 else code

    def _texts(self, given: Sequence[str]) -> list[str]:
        """The texts of the person, else the recipe's samples, written to FOLDER/text."""
        from swarmnode.app.local.starter import write_sample

        if given:
            return list(given)
        return [str(write_sample(sample, self._folder / "text")) for sample in self._made.samples]

    def _written(self) -> list[dict[str, str]]:
        """Each prompt of the recipe and what the model says to it, the most likely token each time."""
        from swarmnode.app.local.conversation import Speaker
        from swarmnode.app.local.text_pieces import pieces
        from swarmnode.data.message import Message
        from swarmnode.model.text_generation import Sampling

        speaker = Speaker.of(str(self._export), "auto", None, note)
        greedy = Sampling(temperature=0.0)
        template = speaker.template() if self._made.chat else None
        said = []
        for prompt in self._made.prompts:
            if template is not None:
                asked: list[Message] = [{"role": "user", "content": prompt}]
                made = speaker.answer(template, asked, TEXT_TOKENS, greedy)
            else:
                made = pieces(speaker.tokenizer, speaker.tokens_after(prompt, TEXT_TOKENS, greedy), prompt)
            said.append({"prompt": prompt, "text": "".join(made)})
        return said


def _from(paths: Sequence[str]) -> list[str]:
    return [word for path in paths for word in ("--from", path)]


def _verb(*words: str) -> int:
    """Show and run `swarmnode words...`; its exit code. Signals are passed on once: the verb ends as when called by
    hand, and the steps after it follow."""
    note(f"$ swarmnode {shlex.join(words)}")
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, *words], process_group=0)
    before = {number: signal.signal(number, lambda got, _: process.send_signal(got)) for number in SIGNALS}
    try:
        code = process.wait()
        return code if code >= 0 else 128 - code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

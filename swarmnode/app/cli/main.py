"""The command `swarmnode`: a module for each verb or a few that belong together, loaded on demand."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import signal
import sys
import threading
import time
from _thread import start_new_thread
from collections.abc import Mapping, Sequence

import click

from swarmnode import __version__
from swarmnode.app.cli.option.config_file import bind, check_top, defaults_for, did_you_mean
from swarmnode.base import plugin
from swarmnode.base.atomic_file import FULL
from swarmnode.base.errors import DiskFull, SwarmnodeError

EXIT_INTERRUPTED = 130

SECTIONS: Mapping[str, Mapping[str, str]] = {
    "Begin": {
        "quickstart": "one command from a recipe to a model that talks",
        "up": "start a whole swarm on this machine and train",
    },
    "Give a machine to a run": {
        "doctor": "check whether this machine can take part",
        "join": "join a run with this machine",
        "status": "status of the node on this machine, once or live",
        "ui": "a page for the node on this machine: pause, hours, limits, history",
        "pause": "pause the node, until `resume` or for a time",
        "resume": "end a pause",
        "limit": "show or change the limits of the running node",
        "leave": "leave in order: within seconds, by a deadline, or when all is done",
        "logs": "print the node's events",
        "receipts": "receipts for this node's work, signed by its clients",
        "uninstall": "show what swarmnode keeps on this machine, and delete it",
    },
    "Start a run": {
        "init": "make a new run: a manifest to edit and its owner's key",
        "data": "make a data set of text, which a run then names by content",
        "manifest": "read, compare and change a run's manifest",
        "coordinator": "show a run on a web page, and be its meeting point",
        "invite": "print a line that lets others join a run",
        "access": "which machines the run's owner admits",
        "amend": "change the run under way: rates, batch, codec, from a round on",
        "owner": "which keys sign for the run: add one, or replace a lost one",
        "archive": "copy the model out of a running swarm",
        "bootstrap": "be a meeting point of a run, and nothing else",
    },
    "Use its model": {
        "chat": "talk with an exported model",
        "generate": "text from an exported model, or from a checkpoint",
        "export": "make a Hugging Face model of a run's saved state",
        "eval": "held-out loss of the merged model and of each replica",
    },
    "Estimate and measure": {
        "plan": "estimate stages, speed, days and traffic of a fleet",
        "simulate": "a whole swarm in virtual time, in a storm drawn from a seed",
        "bench": "benchmarks on this machine",
    },
    "This program": {
        "config": "settings and their origin",
        "schema": "the JSON Schema of what a verb prints with --json",
        "identity": "this machine's peer id",
        "completion": "print a shell completion script",
    },
}
"""The verbs by what a person is at."""
VERBS: Mapping[str, str] = {verb: does for verbs in SECTIONS.values() for verb, does in verbs.items()}
ELSEWHERE = ("simulate", "bench")
"""Verbs of VERBS that come by entry points (swarmnode/base/plugin.py); `bench` has a short form here."""
TOGETHER: Mapping[str, str] = {
    **dict.fromkeys(("ui", "pause", "resume", "leave", "limit"), "tell"),
    **dict.fromkeys(("status", "logs", "receipts", "identity"), "look"),
    **dict.fromkeys(("amend", "access"), "owner"),
    **dict.fromkeys(("coordinator", "archive"), "bootstrap"),
    "chat": "generate",
    "eval": "export",
    "completion": "config",
}
"""Verbs that are in another one's module, by their own name."""
SLOW = {"bench": "measuring", "doctor": "checking", "eval": "measuring", "export": "making the model"}
SLOW |= {"init": "choosing settings", "plan": "estimating", "simulate": "simulating"}
"""What verbs say that else say nothing for long."""

OLD: Mapping[str, tuple[str, ...]] = {
    "drain": ("leave", "--within", "30s"),
    "finish": ("leave", "--finish"),
    "snooze": ("pause", "--for"),
    "top": ("status", "--live"),
}
"""Old verbs and the words that replace them. They go with the second release."""


def current(words: Sequence[str]) -> list[str]:
    """The words of today for those of a command line that begins with an old verb; said on stderr."""
    if not words or words[0] not in OLD:
        return list(words)
    new = OLD[words[0]]
    click.echo(f"`{words[0]}` is an old word: say `swarmnode {' '.join(new)}`", err=True)
    rest = list(words[1:])
    if words[0] != "snooze":
        return [*new, *rest]
    durations = [number for number, word in enumerate(rest) if word[:1].isdigit()]
    if durations:  # it may stand anywhere
        rest.insert(durations[0], "--for")
    return ["pause", *rest]


SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True}


class Verbs(click.Group):
    """Finds verb V in module swarmnode.app.cli.V as `command`, in that of TOGETHER as V, or by entry point."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(dict.fromkeys((*VERBS, *plugin.names(plugin.VERBS))))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = _load(cmd_name)
        if command is None:
            return None
        check_top(self.list_commands(ctx), _load)
        bind(command)
        ctx.default_map = {**(ctx.default_map or {}), cmd_name: defaults_for(cmd_name, command)}
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        args = current(args)
        try:
            found = super().resolve_command(ctx, args)
        except click.UsageError as error:
            hint = did_you_mean(args[0], self.list_commands(ctx))
            if not hint or args[0].startswith("-"):
                raise
            raise click.UsageError(f"no such verb: {args[0][:40]}{hint}", error.ctx) from None
        if found[0] in SLOW:
            from swarmnode.app.daemon.service_manager import doing

            ctx.with_resource(doing(SLOW[found[0]]))
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        others = {name: "of an installed package" for name in self.list_commands(ctx) if name not in VERBS}
        for title, verbs in {**SECTIONS, "Of other packages": others}.items():
            if verbs:
                with formatter.section(title):
                    formatter.write_dl(list(verbs.items()))


def _load(verb: str) -> click.Command | None:
    command = plugin.load(plugin.VERBS, verb) if verb in ELSEWHERE or verb not in VERBS else None
    if command is None and verb in VERBS and verb != "simulate":
        module = importlib.import_module(f"swarmnode.app.cli.{TOGETHER.get(verb, verb)}")
        command = getattr(module, verb if verb in TOGETHER else "command")
    return command if isinstance(command, click.Command) else None


@click.group(cls=Verbs, context_settings=SETTINGS)
@click.version_option(__version__, message="swarmnode %(version)s")
def cli() -> None:
    """Train large language models over the internet on machines nobody controls.

    Errors are one line on stderr; SWARMNODE_DEBUG=1 shows their origin. stdout carries data only.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code (errors.py lists them)."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_DFL:
        return _main(arguments)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.unraisablehook = _interrupt_again
    code = _main(arguments)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no word of Python's own end either
    return code


def _interrupt_again(lost: sys.UnraisableHookArgs) -> None:
    """Ctrl-C that came in a callback of Python's own, as imports have, where it can only be dropped: it comes again."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        # Without a word with the thread: a Thread is waited for as it starts, and the signal could come in here.
        start_new_thread(_interrupt, (threading.get_ident(),))
    else:
        sys.__unraisablehook__(lost)


def _interrupt(thread: int) -> None:
    time.sleep(0.1)  # by then the callback has ended: 40 times of 40 on a core with eight other processes
    signal.pthread_kill(thread, signal.SIGINT)


def _main(arguments: Sequence[str] | None) -> int:
    try:
        result = cli.main(args=arguments, prog_name="swarmnode", standalone_mode=False)
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in (*FULL, errno.EPIPE) or error.filename is not None:
            raise
        return _without_stdout(error)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return error.exit_code
    except click.ClickException as error:
        where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "swarmnode"
        _complain(f"{error.format_message()} (see {where} --help)")
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        if sys.unraisablehook is _interrupt_again:
            sys.unraisablehook = lambda lost: None  # coroutines that end now where they stand
        return EXIT_INTERRUPTED
    except (SwarmnodeError, BaseExceptionGroup) as error:
        leaf = _leaf(error)
        if leaf is None or os.environ.get("SWARMNODE_DEBUG") == "1":
            raise
        _complain(str(leaf))
        return leaf.exit_code
    return result if isinstance(result, int) else 0


def _without_stdout(error: OSError) -> int:
    """The exit code where stdout takes no more: without a word where its reader has gone, as other commands do."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes it once more at its end
    if error.errno == errno.EPIPE:
        return 128 + signal.SIGPIPE
    _complain(f"stdout: {error.strerror or error}")
    return DiskFull.exit_code


def _leaf(error: BaseException) -> SwarmnodeError | None:
    """The first SwarmnodeError in a group that holds nothing else, so that a TaskGroup's error reads like any other."""
    if isinstance(error, SwarmnodeError):
        return error
    if isinstance(error, BaseExceptionGroup):
        leaves = [_leaf(inner) for inner in error.exceptions]
        return leaves[0] if all(leaves) else None
    return None


def _complain(text: str) -> None:
    click.echo(f"swarmnode: {text}", err=True)


if __name__ == "__main__":
    sys.exit(main())

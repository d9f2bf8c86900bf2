"""The command `swarmnode`: one verb a module, loaded when it is asked for."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence

import click

from swarmnode import __version__
from swarmnode.cli.origin import bind, defaults_for
from swarmnode.errors import SwarmnodeError

EXIT_INTERRUPTED = 130

VERBS: Mapping[str, str] = {
    "init": "make a new run: a manifest to edit and its owner's key",
    "up": "start a whole swarm on this machine and train",
    "join": "join a run with this machine",
    "bootstrap": "be a run's first meeting point",
    "coordinator": "show a run on one page, and be its meeting point",
    "invite": "one line that lets others join a run",
    "guests": "whom the run's owner lets in, and whom no more",
    "identity": "this machine's peer id",
    "doctor": "can this machine take part, and as what",
    "status": "what the node on this machine does",
    "drain": "tell the node on this machine that the machine will be taken away",
    "fake-metadata": "play a cloud that takes machines away, to rehearse with",
    "top": "the same, live",
    "pause": "let the node stand aside until it is told to resume",
    "resume": "take a pause back",
    "snooze": "let the node stand aside for a time",
    "finish": "finish all that is held, then leave",
    "leave": "leave cleanly, within seconds",
    "limit": "show or change the limits of the running node",
    "logs": "what the node says",
    "receipts": "what this node did for others, signed by them",
    "config": "settings, and where each comes from",
    "completion": "make the shell complete verbs and options",
    "export": "make a Hugging Face model of what is kept of a run",
    "eval": "held-out loss of the merged model and of each replica",
    "generate": "text from an exported model, or from a checkpoint",
    "simulate": "a whole swarm in virtual time, in a storm drawn from a seed",
    "plan": "stages, speed, days and traffic of a fleet",
    "report": "the logs of this machine's nodes in one file, to send to somebody",
    "replay": "several nodes' logs as one timeline",
    "bench": "measure this machine: the swarm, the transport, the page",
}


class Verbs(click.Group):
    """Finds verb V in module swarmnode.cli.V as `command`, so that no verb pays for another's imports."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        found = importlib.import_module(f"swarmnode.cli.{cmd_name.replace('-', '_')}").command
        assert isinstance(found, click.Command)
        bind(found)
        ctx.default_map = {**(ctx.default_map or {}), cmd_name: defaults_for(cmd_name, found)}
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, message="swarmnode %(version)s")
def cli() -> None:
    """Train large language models over the internet on machines nobody controls.

    Errors are one line on stderr; SWARMNODE_DEBUG=1 shows where they come from. stdout carries data only.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (errors.py says which error has which)."""
    try:
        result = cli.main(args=arguments, prog_name="swarmnode", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return error.exit_code
    except click.ClickException as error:
        where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "swarmnode"
        _complain(f"{error.format_message()} (see {where} --help)")
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return EXIT_INTERRUPTED
    except (SwarmnodeError, BaseExceptionGroup) as error:
        leaf = _leaf(error)
        if leaf is None or os.environ.get("SWARMNODE_DEBUG") == "1":
            raise
        _complain(str(leaf))
        return leaf.exit_code
    return result if isinstance(result, int) else 0


def _leaf(error: BaseException) -> SwarmnodeError | None:
    """The first error of ours in a group that holds nothing else, so that a TaskGroup's error reads like any other."""
    if isinstance(error, SwarmnodeError):
        return error
    if isinstance(error, BaseExceptionGroup):
        found = [_leaf(inner) for inner in error.exceptions]
        return found[0] if all(found) else None
    return None


def _complain(text: str) -> None:
    click.echo(f"swarmnode: {text}", err=True)


if __name__ == "__main__":
    sys.exit(main())

"""A group of verbs whose help says all of what each does: click cuts it to the width of one line."""

from __future__ import annotations

import click

SENTENCE_MAX = 400


class ListedGroup(click.Group):
    """Lists each verb with the whole first sentence of its help, over as many lines as that takes."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        verbs = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.get_short_help_str(SENTENCE_MAX)) for name, verb in verbs if verb])

"""A command whose help has its options under headings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import click


class SectionedCommand(click.Command):
    """`sections` has the names of options by heading, in order; all others follow under "Options"."""

    sections: ClassVar[Mapping[str, Sequence[str]]] = {}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = {param.name: param.get_help_record(ctx) for param in self.get_params(ctx)}
        named = {name for names in self.sections.values() for name in names}
        others = [name for name in records if name not in named]
        for title, names in {**self.sections, "Options": others}.items():
            rows = [record for name in names if (record := records.get(name)) is not None]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

"""`swarmnode receipts`: what this node did for others, signed by them."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import click

from swarmnode.cli.options import FOLDER
from swarmnode.place import default_home


@click.command(short_help="what this node did for others, signed by them")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, signatures included.")
@click.option("--home", type=FOLDER, help="The node's own folder.  [default: ~/.local/share/swarmnode/node]")
def command(as_json: bool, home: Path | None) -> None:
    """Print the receipts of the node of --home, alive or not, each checked again: who thanks, for how many samples.

    A client signs what was done for it; anybody can check that with its peer id alone.
    """
    from swarmnode.errors import RemoteFault
    from swarmnode.ids import PeerId, RunId
    from swarmnode.local.receipts import read
    from swarmnode.membership.receipt import check_receipt

    total = 0
    for receipt in read(home or default_home("node")):
        try:
            check_receipt(receipt, RunId(receipt.run_id), PeerId(receipt.server))
        except RemoteFault as fault:
            click.echo(f"left out: {fault}", err=True)
            continue
        total += receipt.samples
        if as_json:
            found = {
                "run": receipt.run_id,
                "server": receipt.server,
                "client": receipt.client,
                "microbatches": receipt.microbatches,
                "samples": receipt.samples,
                "from_unix_s": receipt.from_unix_s,
                "until_unix_s": receipt.until_unix_s,
                "signature": receipt.signature.hex(),
            }
            click.echo(json.dumps(found))
            continue
        until = datetime.datetime.fromtimestamp(receipt.until_unix_s).strftime("%Y-%m-%d %H:%M")
        click.echo(
            f"{until}  run {receipt.run_id[:16]}  {receipt.client}  "
            f"{receipt.microbatches:,} microbatches, {receipt.samples:,} samples"
        )
    click.echo(f"{total:,} samples in all", err=True)

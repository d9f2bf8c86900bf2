"""`swarmnode receipts`: print receipts for this node's work, signed by others."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import click

from swarmnode.cli.option.param import home_option


@click.command(short_help="receipts for this node's work, signed by others")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line, with signatures.")
@home_option
def command(as_json: bool, home: Path) -> None:
    """Print the receipts of the node in --home, running or not, verified again: the client and the number of samples.

    A client signs what was done for it; anybody can check that with its peer id alone.
    """
    from swarmnode.errors import RemoteFault
    from swarmnode.ids import PeerId, RunId
    from swarmnode.machine.receipt_store import read
    from swarmnode.membership.receipt import check_receipt

    total = 0
    for receipt in read(home):
        try:
            check_receipt(receipt, RunId(receipt.run_id), PeerId(receipt.server))
        except RemoteFault as fault:
            click.echo(f"left out: {fault}", err=True)
            continue
        total += receipt.samples
        if as_json:
            totals = {
                "run": receipt.run_id,
                "server": receipt.server,
                "client": receipt.client,
                "microbatches": receipt.microbatches,
                "samples": receipt.samples,
                "from_unix_s": receipt.from_unix_s,
                "until_unix_s": receipt.until_unix_s,
                "signature": receipt.signature.hex(),
            }
            click.echo(json.dumps(totals))
            continue
        until = datetime.datetime.fromtimestamp(receipt.until_unix_s).strftime("%Y-%m-%d %H:%M")
        click.echo(
            f"{until}  run {receipt.run_id[:16]}  {receipt.client}  "
            f"{receipt.microbatches:,} microbatches, {receipt.samples:,} samples"
        )
    click.echo(f"{total:,} samples in all", err=True)

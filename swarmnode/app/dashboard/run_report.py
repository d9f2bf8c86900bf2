"""The report of a run: what was trained, by whom, how long, to which loss, and how to use it and go on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swarmnode.base.atomic_file import atomic_write
from swarmnode.base.untrusted_text import markdown_text
from swarmnode.run.manifest import Manifest
from swarmnode.run.manifest.recipe import parameters_of

TEXT = "REPORT.md"
TREE = "report.json"
READ_MAX = 16 << 20
MEMBERS_MAX = 1000  # guess: rows of a report that one still opens


def run_report(
    manifest: Manifest,
    run_id: str,
    figures: Mapping[str, Any],
    members: Sequence[Mapping[str, Any]],
    source: str,
    saved: str,
) -> dict[str, Any]:
    """The report as JSON. `figures`: those on top of the run's page (app/dashboard/view.py:summary). `members`: rows of
    its contributors. `source`: the folder that commands take; `saved`: that of its checkpoints. Energy is that of the
    machines whose owners told their watts, None where none did."""
    model = manifest.model
    given = [_member(manifest, one) for one in members]
    metered = sum(float(one.get("metered_s", 0.0)) for one in members)
    return {
        "run": run_id,
        "name": manifest.name,
        "ended_unix_s": figures.get("t"),
        "model": {
            "parameters": parameters_of(model),
            "layers": model.layers,
            "width": model.width,
            "context": model.context,
            "vocabulary": model.vocabulary,
            "training": manifest.training.kind,
        },
        "data": {"source": manifest.data.source, "tokenizer": manifest.data.tokenizer, "about": manifest.about.data},
        "hours": _hours(figures.get("wall_s")),
        "machine_hours": round(sum(one["hours"] for one in given), 2) if given else None,
        "energy_kwh": round(sum(float(one.get("kwh", 0.0)) for one in members), 3) if metered else None,
        "energy_of_hours": round(metered / 3600, 2),
        "samples": figures.get("samples", 0),
        "tokens": figures.get("tokens", 0),
        "round": figures.get("round", 0),
        "loss": {
            "train": figures.get("loss_train"),
            "validation_first": figures.get("loss_validation_first"),
            "validation": figures.get("loss_validation"),
        },
        "members": given,
        "source": source,
        "checkpoints": saved,
    }


def _member(manifest: Manifest, row: Mapping[str, Any]) -> dict[str, Any]:
    """Name and hours as a machine tells them, samples and tokens as others signed them; None where nobody did."""
    receipts = row.get("receipts") or {}
    samples = receipts.get("samples")
    tokens = receipts.get("tokens", None if samples is None else samples * manifest.model.context)
    return {
        "name": str(row.get("name", "")),
        "peer": row.get("peer"),
        "hours": round(float(row.get("worked_s", 0.0)) / 3600, 2),
        "samples": samples,
        "tokens": tokens,
    }


def report_text(tree: Mapping[str, Any]) -> str:
    """`run_report` as Markdown."""
    model = tree["model"]
    loss = tree["loss"]
    source = tree["source"]
    shape = f"{model['layers']} layers of width {model['width']}, contexts of {model['context']:,} tokens"
    facts = {
        "run": f"`{tree['run']}`",
        "model": f"{model['parameters']:,} parameters: {shape}, {model['training']}",
        "data": markdown_text(tree["data"]["about"]) or f"source `{tree['data']['source']}`",
        "tokenizer": f"`{markdown_text(str(tree['data']['tokenizer']))}`",
        "hours": _known(tree["hours"]),
        "hours of all machines": _known(tree["machine_hours"]),
        "energy": _energy(tree),
        "samples, tokens, rounds": f"{tree['samples']:,}, {tree['tokens']:,}, {tree['round']:,}",
        "held-out loss, nats a token": _both(loss),
        "training loss at last": _known(loss["train"]),
    }
    lines = [f"# {markdown_text(tree['name'])}\n", "| | |\n| --- | --- |"]
    lines += [f"| {key} | {value} |" for key, value in facts.items()]
    lines += _members(tree["members"])
    lines += _texts(tree.get("texts", ()))
    lines += [
        "\n## Use it\n",
        "```sh",
        f'swarmnode generate {source} --prompt "Once upon a time"',
        f"swarmnode export {source} --out model    # transformers: from_pretrained('model'); vLLM: vllm serve model",
        f"swarmnode export {source} --gguf model.gguf    # for llama.cpp: pip install gguf",
        f"swarmnode chat {source} --page    # for conversations, in a browser",
        f"swarmnode eval {source}",
        "```",
        "\n## Go on\n",
        "```sh",
        f"swarmnode up --resume {tree['checkpoints']}    # on this machine alone",
        f"swarmnode coordinator {source}    # with the others: those who come back bring their stages",
        "```\n",
    ]
    return "\n".join(lines)


def _energy(tree: Mapping[str, Any]) -> str:
    if tree["energy_kwh"] is None:
        return "not measured: no machine told its watts (`join --watts`)"
    return f"{tree['energy_kwh']:,} kWh in {tree['energy_of_hours']:,} hours of machines that told their watts"


def _members(members: Sequence[Mapping[str, Any]]) -> list[str]:
    if not members:
        return ["\n## Who\n", "Nobody kept count: no coordinator's page was open."]
    cells = [
        (markdown_text(one["name"]) or "somebody", f"{one['hours']:.2f}", _known(one["samples"]), _known(one["tokens"]))
        for one in members[:MEMBERS_MAX]
    ]
    rows = [f"| {' | '.join(row)} |" for row in cells]
    left = len(members) - MEMBERS_MAX
    return [
        "\n## Who\n",
        "Hours as each machine tells them; samples and tokens as others signed them.\n",
        "| name | hours of work | samples | tokens |\n| --- | --- | --- | --- |",
        *rows,
        *([f"\nAnd {left:,} more: report.json has all."] if left > 0 else []),
    ]


def _texts(texts: Sequence[Mapping[str, str]]) -> list[str]:
    """The model's words after some prompts, each as a block that no text can leave."""
    lines = [] if not texts else ["\n## What it writes\n"]
    for one in texts:
        fence = "`" * (3 + max(one["prompt"].count("`"), one["text"].count("`")))
        lines.append(f"{fence}text\n> {one['prompt']}\n{one['text'].strip()}\n{fence}\n")
    return lines


def write_report(folder: Path, tree: Mapping[str, Any]) -> Path:
    """Write REPORT.md and report.json to `folder`; the path of the first. Raises OSError."""
    atomic_write(folder / TREE, (json.dumps(tree, indent=1, allow_nan=False) + "\n").encode())
    atomic_write(folder / TEXT, report_text(tree).encode())
    return folder / TEXT


def read_report(folder: Path, run_id: str) -> dict[str, Any] | None:
    """The report of run `run_id` in `folder`; None where none can be read."""
    try:
        with (folder / TREE).open("rb") as file:
            tree = json.loads(file.read(READ_MAX))
    except (OSError, ValueError, RecursionError):
        return None
    return tree if isinstance(tree, dict) and tree.get("run") == run_id else None


def _hours(wall_s: float | None) -> float | None:
    return None if wall_s is None else round(wall_s / 3600, 2)


def _both(loss: Mapping[str, float | None]) -> str:
    return f"{_known(loss['validation_first'])} at first, {_known(loss['validation'])} last"


def _known(value: float | None) -> str:
    if value is None:
        return "not known"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}".rstrip("0").rstrip(".")

"""The model card of an exported model, README.md beside its weights: as people and the Hugging Face Hub read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swarmnode.manifest import Manifest
from swarmnode.untrusted_text import printable

CARD = "README.md"
LICENCES = ("apache-2.0", "mit", "bsd-3-clause", "cc0-1.0", "cc-by-4.0", "cc-by-sa-4.0", "gpl-3.0", "openrail")
"""The Hub's names of usual licences (huggingface.co/docs/hub/repositories-licenses); it refuses a card with others."""
MEMBERS_SHOWN = 200  # guess: a page that one still scrolls


def model_card(manifest: Manifest, about: Mapping[str, Any]) -> str:
    """The card: what it is for, how it was trained, on what data, by whom. `about`: the facts in swarmnode.json, with
    `members` (name, hours of work, signed samples) where a coordinator kept them."""
    run, inner, gossip, pipeline = manifest.about, manifest.inner, manifest.gossip, manifest.pipeline
    licence = run.licence.lower()
    head = ["library_name: transformers", "pipeline_tag: text-generation", "tags: [swarmnode, decentralized-training]"]
    if licence:
        head.append(f"license: {licence if licence in LICENCES else 'other'}")
    samples, model = int(about.get("samples") or 0), manifest.model
    loss = about.get("validation")
    facts = {
        "run": f"`{about.get('run_id', '')}`",
        "samples, tokens": f"{samples:,}, {samples * model.context:,}",
        "rounds": about.get("round"),
        "held-out loss, nats a token": None if loss is None else f"{loss:.4f}",
        "model": f"{model.layers} layers of width {model.width}, contexts of {model.context} tokens",
        "pipeline": f"{pipeline.stages} stages, {pipeline.boundary} between them",
        "replicas meet by": f"{gossip.method}, {gossip.codec}, every {gossip.round_samples:,} samples",
        "inner steps": f"{inner.optimizer}, rate {inner.learning_rate:g}, batches of {inner.inner_batch} samples",
    }
    data = _plain(run.data) or f"source `{manifest.data.source}`; manifest.toml beside this names all of it."
    return "\n".join(
        [
            "---\n" + "\n".join(head) + "\n---",
            f"\n# {manifest.name}\n",
            _plain(run.why) or "A language model.",
            f"\nRun by {_plain(run.by) or 'somebody unnamed'}. Licence: {_plain(run.licence) or 'none named'}.",
            "\n## How it was trained\n",
            "By a swarm of machines over the internet, with swarmnode: each serves a stage of the model, and replicas",
            "of a stage average their weights now and then. manifest.toml has every setting.\n",
            "| | |\n| --- | --- |",
            *(f"| {key} | {value} |" for key, value in facts.items() if value is not None),
            "\n## Data\n",
            data,
            *_members(about.get("members") or []),
            "",
        ]
    )


def _members(members: list[Mapping[str, Any]]) -> list[str]:
    """The members with their hours, and what is known of the energy; nothing where no coordinator kept them."""
    if not members:
        return []
    hours = sum(float(one["hours"]) for one in members)
    more = [f"\nAnd {len(members) - MEMBERS_SHOWN} more."] if len(members) > MEMBERS_SHOWN else []
    return [
        "\n## Members\n",
        "| name | hours of work |\n| --- | --- |",
        *(f"| {_plain(str(one['name'])) or 'somebody'} | {one['hours']:.1f} |" for one in members[:MEMBERS_SHOWN]),
        *more,
        "\n## Energy\n",
        f"{len(members)} machines computed for {hours:,.1f} hours in all, as each tells. Nobody measured their watts.",
    ]


def _plain(text: str) -> str:
    """`text` of others as one line without Markdown, HTML or links."""
    return "".join(c for c in printable(text, 400) if c not in "<>[]|`\\*_#").replace("://", ": //").strip()

"""`swarmnode.paper`: what papers on outer methods train with, as settings of a manifest.

The methods' own momentum and rate are already their papers' (rules.py). What is added here are the inner optimizer, the
inner steps of a round, who meets and what travels.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarmnode.base.errors import UsageError


@dataclass(frozen=True, slots=True)
class PaperSettings:
    """`inner_steps`: of a replica between two rounds. `group` 0: all replicas of a stage meet. `verified`: whether
    `inner_steps` was read in the paper or its authors' code; where it was not, give your own."""

    paper: str
    method: str
    inner_steps: int
    codec: str = "fp32"
    optimizer: str = "adamw"
    group: int = 0
    verified: bool = True


PAPERS = {
    "diloco": PaperSettings("arXiv 2311.08105", "diloco", 500),
    "async-local-sgd": PaperSettings("arXiv 2401.09135", "delayed", 50, verified=False),
    "edit": PaperSettings("arXiv 2412.07210", "edit", 128, verified=False),
    "streaming-diloco": PaperSettings("arXiv 2501.18512", "streaming", 100, "e3m0"),
    "muloco": PaperSettings("arXiv 2505.23725", "diloco", 30, optimizer="muon"),  # github.com/bentherien/muloco-1
    "noloco": PaperSettings("arXiv 2506.10911", "noloco", 50, group=2),
    "sparseloco": PaperSettings("arXiv 2508.15706", "sparseloco", 30, "topk64"),
}


def paper(name: str, *, inner_batch: int, inner_steps: int | None = None) -> dict[str, object]:
    """The settings of paper `name` (a key of PAPERS), as `changes` of `simulate` and fields of a manifest.

    `inner_batch` is the manifest's `inner.inner_batch`: a round has `inner_steps` of them, the paper's number unless
    one is given. Packets are taken as they come (`gossip.acceptance`), as in the papers. Raises UsageError."""
    if (chosen := PAPERS.get(name)) is None:
        raise UsageError(f"no paper is called {name[:40]!r}: there are {', '.join(PAPERS)}")
    return {
        "gossip.method": chosen.method,
        "gossip.codec": chosen.codec,
        "gossip.group": chosen.group,
        "gossip.acceptance": "all",
        "gossip.round_samples": inner_batch * (inner_steps or chosen.inner_steps),
        "inner.optimizer": chosen.optimizer,
        "inner.inner_batch": inner_batch,
    }

"""From a fresh clone to a live page with a falling loss: `git clone`, `make demo`, and the page's own numbers, timed.
`swarmnode bench fresh` prints the seconds; issue 6 asks for at most 240 on two cores, installs included (which is the
package index's speed, too).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import swarmnode
from swarmnode.errors import LocalFault, UsageError

TARGET_S = 240.0
BOUND_S = 1500.0
FALLEN_NATS = 0.2  # below the first loss seen: more than the trembling of single steps
POLL_S = 0.5
_PAGE = re.compile(r"http://127\.0\.0\.1:\d+/")


def run() -> dict[str, Any]:
    """{"page told, s", "first loss, s", "loss falls, s", "losses", "target_s"}. Raises UsageError, LocalFault."""
    source = Path(swarmnode.__file__).resolve().parents[1]
    if not (source / ".git").exists():
        raise UsageError(f"{source} is no clone: there is nothing to clone from")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="swarmnode-fresh-") as folder:
        clone, log = Path(folder) / "clone", Path(folder) / "log"
        subprocess.run(["git", "clone", "-q", str(source), str(clone)], check=True)
        with log.open("wb") as out:
            demo = subprocess.Popen(["make", "demo"], cwd=clone, stdout=out, stderr=out, start_new_session=True)
        try:
            return {**_watch(demo, log, begun), "target_s": TARGET_S}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(demo.pid, signal.SIGINT)
            demo.wait(60)


def _watch(demo: subprocess.Popen[bytes], log: Path, begun: float) -> dict[str, Any]:
    row: dict[str, Any] = {}
    page, losses = "", list[float]()
    while (now := time.monotonic() - begun) < BOUND_S:
        if demo.poll() is not None:
            break
        if not page and (found := _PAGE.search(log.read_text(errors="replace"))):
            page, row["page told, s"] = found[0], now
        loss = _loss(page) if page else None
        if loss is not None and loss not in losses[-1:]:
            row.setdefault("first loss, s", now)
            losses.append(loss)
            if loss < losses[0] - FALLEN_NATS:
                return {**row, "loss falls, s": now, "losses": [losses[0], loss]}
        time.sleep(POLL_S)
    raise LocalFault(f"no falling loss after {now:.0f} s: {log.read_text(errors='replace')[-300:]}")


def _loss(page: str) -> float | None:
    try:
        with urllib.request.urlopen(f"{page}api/v1/summary", timeout=5.0) as answer:
            loss = json.load(answer)["loss_train"]
    except (OSError, ValueError, KeyError):
        return None
    return float(loss) if loss is not None else None

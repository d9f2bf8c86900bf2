"""The chain of amendments in a run's folder, and the round to begin at: for `amend` and `owner`."""

from __future__ import annotations

import json
import math
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.errors import ManifestError, RemoteFault, UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from swarmnode.membership.amendment import Amendment, Amendments

AHEAD_PERIODS = 4  # of node/access_list.py, in which all members hear of an amendment, as of a ban
PAGE_TIMEOUT_S = 5.0


def chain_of(run: Path) -> Amendments:
    """The amendments in RUN/manifest.signed. Raises ManifestError."""
    from swarmnode.manifest import SIGNED_FILE, read_signed, verify
    from swarmnode.membership.amendment import Amendments

    signed, manifest = read_signed(run / SIGNED_FILE)
    try:
        return Amendments.of(signed, manifest, verify(signed, None)[1])
    except RemoteFault as fault:
        raise ManifestError(f"{run / SIGNED_FILE}: {fault}") from None


def append(
    run: Path, key: Ed25519PrivateKey, from_round: int, values: Mapping[str, object], owners: Sequence[bytes] = ()
) -> tuple[Amendments, Amendment]:
    """Sign the next amendment of RUN with `key` and keep it in RUN/manifest.signed. Raises UsageError."""
    from swarmnode.manifest import SIGNED_FILE, read_signed, write_signed

    chain = chain_of(run)
    try:
        made = chain.sign(key, from_round, values, owners)
    except RemoteFault as fault:
        raise UsageError(str(fault)) from None
    signed, _ = read_signed(run / SIGNED_FILE)
    signed.amendments.append(chain.signed[-1])
    write_signed(run / SIGNED_FILE, signed)
    return chain, made


def round_ahead(home: Path, round_samples: int) -> int:
    """A round that comes when every member has heard, by the page of the coordinator in `home`. Raises UsageError if
    none runs there."""
    from swarmnode.daemon import ready_file
    from swarmnode.node.access_list import PERIOD_S

    ready = ready_file.read(home)
    try:
        if ready is None or not ready.dashboard:
            raise OSError("no coordinator runs there")
        with urllib.request.urlopen(f"{ready.dashboard.rstrip('/')}/api/v1/summary", timeout=PAGE_TIMEOUT_S) as page:
            view = json.load(page)
        per_s = view["tokens_per_s"] * view["samples"] / max(1, view["tokens"])
        ahead = 1 + math.ceil(AHEAD_PERIODS * PERIOD_S * float(per_s) / round_samples)
        return int(view["samples"]) // round_samples + ahead
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"--home {home}: the run's round is not known ({error}): give --from-round N, or the coordinator's home"
        ) from None

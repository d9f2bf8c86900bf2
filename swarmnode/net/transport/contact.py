"""Peers this node has met: kept on disk, and tried again after the directory has lost them.

With them, a node that starts while every bootstrap is down still finds the run. Two parts of a swarm that lost each
other ("islands") merge as soon as one node of either knows one address of the other.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarmnode.base.atomic_file import atomic_write
from swarmnode.base.bounds import SAMPLES_MAX
from swarmnode.base.damaged_file import read_own_json
from swarmnode.base.errors import RemoteFault
from swarmnode.base.identity import public_key_of
from swarmnode.base.ids import PeerId, RunId
from swarmnode.net.membership.liveness import SAMPLE
from swarmnode.net.transport.address import dialable_of

CONTACTS_MAX = 256  # guess: 60 KiB of disk; and as many runs
ADDRESSES_MAX = 8
STALE_S = 60.0  # guess: live members are heard of more often (announce periods are seconds)
RETRY_MIN_S = 3.0  # guess: a swarm that lost its members trains nothing
LATELY_S = 3600.0  # guess: a partition that may heal is younger
RETRY_LATELY_S = STALE_S / 2.0  # a healed partition is one swarm again as soon as its members would seem stale
RETRY_FIXED_S = 3.0 * RETRY_MIN_S  # derived: a bootstrap is found within 10 s of its return, for one probe of its port
RETRY_MAX_S = 600.0
FILE_BYTES_MAX = 1 << 20


@dataclass(slots=True)
class Contact:
    """A peer's addresses, when it was last heard of, and the failed tries since."""

    addresses: tuple[str, ...]
    seen_unix_s: float
    failures: int = 0
    tried_unix_s: float = 0.0
    given: tuple[str, ...] = ()  # of a bootstrap: what the user gave, which no record of its replaces

    @property
    def fixed(self) -> bool:
        """Whether it is a bootstrap given by the user, which is never forgotten."""
        return bool(self.given)

    def retry(self) -> None:
        """Be due at once, whatever was tried before."""
        self.tried_unix_s = 0.0


def whom_to_try(contacts: Mapping[PeerId, Contact], here: Collection[PeerId], now_unix_s: float) -> list[PeerId]:
    """Lost contacts that are due for a try, at most SAMPLE: bootstraps first, then the most recently seen.

    A node that has nobody `here` tries all, however lately they were heard of: it may have been restarted a moment ago.
    """
    due = [
        (not contact.fixed, -contact.seen_unix_s, peer)
        for peer, contact in contacts.items()
        if peer not in here
        and (not here or contact.fixed or now_unix_s - contact.seen_unix_s >= STALE_S)
        and now_unix_s - contact.tried_unix_s >= wait_s(contact, now_unix_s)
    ]
    return [peer for _, _, peer in sorted(due)[:SAMPLE]]


def wait_s(contact: Contact, now_unix_s: float) -> float:
    """The time from a try to the next one. From RETRY_MIN_S it doubles with each failure, up to RETRY_FIXED_S for
    bootstraps, and RETRY_LATELY_S for others that may come back within the hour."""
    lost_s = RETRY_LATELY_S if now_unix_s - contact.seen_unix_s < LATELY_S else RETRY_MAX_S
    return min(RETRY_FIXED_S if contact.fixed else lost_s, RETRY_MIN_S * 2.0 ** min(contact.failures, 16))


@dataclass(slots=True)
class Contacts:
    """The contact list of one node, and how far it knows each of its runs to be."""

    known: OrderedDict[PeerId, Contact] = field(default_factory=OrderedDict)
    samples: dict[RunId, int] = field(default_factory=dict)  # most that half of a run's replicas said, ever
    news: int = 0  # grows with each new peer or address

    def trained(self, run_id: RunId, samples: int) -> None:
        """Most replicas of `run_id` say that it has trained `samples`."""
        if samples > self.samples.get(run_id, 0):
            self.samples[run_id] = samples
            while len(self.samples) > CONTACTS_MAX:
                del self.samples[next(iter(self.samples))]

    def tell(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Add a peer named by the user: it is tried at once and never forgotten."""
        contact = self.known.get(peer)
        if contact is None or not set(addresses) <= set(contact.addresses):
            merged = dict.fromkeys((*addresses, *(contact.addresses if contact else ())))
            contact = Contact(tuple(merged)[:ADDRESSES_MAX], contact.seen_unix_s if contact else 0.0)
            self.known[peer] = contact
        contact.given = tuple(addresses)[:ADDRESSES_MAX]

    def hear(self, peer: PeerId, addresses: Iterable[str], now_unix_s: float) -> None:
        """Record that `peer` is alive at `addresses` (empty: the known ones), and at those that the user gave: a
        bootstrap behind a forwarded port announces others."""
        contact = self.known.get(peer)
        hints, known = (contact.given, contact.addresses) if contact else ((), ())
        kept = tuple(dict.fromkeys((*hints, *(tuple(addresses) or known))))[:ADDRESSES_MAX]
        if kept:
            self.news += contact is None or contact.addresses != kept
            self.known[peer] = Contact(kept, now_unix_s, given=hints)
            self.known.move_to_end(peer)
        while len(self.known) > CONTACTS_MAX:
            self.known.pop(next((peer for peer, one in self.known.items() if not one.fixed), next(iter(self.known))))

    def record_try(self, peer: PeerId, met: bool, now_unix_s: float) -> None:
        """Record the result of a try."""
        if met:
            self.hear(peer, (), now_unix_s)
        elif (contact := self.known.get(peer)) is not None:
            contact.failures += 1
            contact.tried_unix_s = now_unix_s

    def latest(self, count: int) -> list[tuple[PeerId, Contact]]:
        """The `count` most recently heard contacts."""
        return sorted(self.known.items(), key=lambda item: -item[1].seen_unix_s)[:count]

    def save(self, path: Path) -> bool:
        """Write the file atomically, readable only by its owner. Returns False if the disk fails: contacts are
        optional."""
        rows: list[dict[str, object]] = [
            {"peer": p, "addresses": c.addresses, "seen_unix_s": round(c.seen_unix_s)} for p, c in self.known.items()
        ]
        rows += [{"run": run_id, "samples": samples} for run_id, samples in self.samples.items()]
        try:
            atomic_write(path, json.dumps(rows).encode(), mode=0o600)
        except OSError:
            return False
        return True

    @classmethod
    def load(cls, path: Path, now_unix_s: float) -> Contacts:
        """The entries of the file; empty if there is none. A damaged file is put aside; its entries before the damage
        count."""
        contacts = cls()

        def take(rows: list[dict[str, Any]]) -> None:
            for row in rows[: 2 * CONTACTS_MAX]:
                if "run" in row:
                    contacts.trained(RunId(str(row["run"])), min(int(row["samples"]), SAMPLES_MAX))
                    continue
                peer = PeerId(row["peer"])
                seen_unix_s = float(row["seen_unix_s"])
                addresses = dialable_of([str(address) for address in row["addresses"]])
                try:
                    public_key_of(peer)
                except RemoteFault as fault:
                    raise ValueError(str(fault)) from None
                if addresses and seen_unix_s <= now_unix_s:
                    contacts.known[peer] = Contact(tuple(addresses[:ADDRESSES_MAX]), seen_unix_s)

        read_own_json(path, FILE_BYTES_MAX, take)
        return contacts

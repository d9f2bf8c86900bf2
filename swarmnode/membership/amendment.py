"""The owner's amendments of a run under way: a chain of signed documents that change fields of the manifest from a
round on, or the keys that may sign. The run's id stays that of the manifest as it was signed first.

They travel with the manifest to joiners, and with the access list to members (node/access_list.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode import bounds
from swarmnode.errors import ManifestError, RemoteFault
from swarmnode.identity import PUBLIC_KEY_BYTES, signed_by
from swarmnode.ids import RunId, digest
from swarmnode.manifest import Manifest, amended
from swarmnode.manifest.text import difference
from swarmnode.wire import access_pb2 as wire
from swarmnode.wire.record_pb2 import SignedManifest

AMENDMENT_BYTES_MAX = 4096
AMENDMENTS_MAX = 64  # guess: changes of one run

_DOMAIN = b"swarmnode/amendment/v1\0"


@dataclass(frozen=True, slots=True)
class Amendment:
    """One change: `values` by field from `from_round` on. `owners`, if any, are the keys that sign from the next one
    on."""

    serial: int
    from_round: int
    values: Mapping[str, object]
    owners: tuple[bytes, ...] = ()


class Amendments:
    """The chain as known here, verified. `owners` may sign the next amendment, access lists and warrants; `signers` are
    all that ever could: their invites go on working."""

    def __init__(self, manifest: Manifest, run_id: RunId, owner: bytes) -> None:
        self.run_id = run_id
        self.owners: tuple[bytes, ...] = (owner,)
        self.signers: tuple[bytes, ...] = (owner,)
        self.chain: list[Amendment] = []
        self.signed: list[wire.SignedAmendment] = []
        self._manifests = [manifest]  # after so many amendments
        self.cuts = [0]
        """The amendments that cut the stages anew, in order, after 0: as the run began."""

    @classmethod
    def of(cls, signed: SignedManifest, manifest: Manifest, run_id: RunId) -> Amendments:
        """The amendments that came with `signed`, the verified `manifest`. Raises RemoteFault."""
        amendments = cls(manifest, run_id, signed.owner)
        amendments.learn(signed.amendments)
        return amendments

    @property
    def newest(self) -> Manifest:
        """The manifest with every amendment, also those whose round is to come."""
        return self._manifests[-1]

    def after(self, serial: int) -> Manifest:
        """The manifest with the first `serial` amendments."""
        return self._manifests[serial]

    def at(self, round_index: int) -> Manifest:
        """The manifest in effect once `round_index` is done."""
        return self._manifests[self.serial(round_index)]

    def serial(self, round_index: int) -> int:
        """The number of the last amendment in effect once `round_index` is done; 0: none."""
        return sum(amendment.from_round <= round_index for amendment in self.chain)

    def cut(self, round_index: int) -> int:
        """The last amendment that cut the stages anew, of those in effect once `round_index` is done; 0: none."""
        return max(serial for serial in self.cuts if serial <= self.serial(round_index))

    def learn(self, signed: Sequence[wire.SignedAmendment]) -> list[Amendment]:
        """Add what is new in `signed`, which may begin anywhere up to the end of this chain; returns it.

        Raises RemoteFault at the first one that no owner signed, that is out of order, or that changes what cannot be
        changed; those before it are kept.
        """
        if len(signed) > AMENDMENTS_MAX:
            raise RemoteFault(f"{len(signed)} amendments; at most {AMENDMENTS_MAX}")
        before = len(self.chain)
        for each in signed:
            if each not in self.signed:
                self._add(each)
        return self.chain[before:]

    def _add(self, signed: wire.SignedAmendment) -> None:
        if len(signed.amendment) > AMENDMENT_BYTES_MAX:
            raise RemoteFault(f"amendment of {len(signed.amendment)} bytes; at most {AMENDMENT_BYTES_MAX}")
        if not any(signed_by(owner, _DOMAIN + signed.amendment, signed.signature) for owner in self.owners):
            raise RemoteFault("amendment that no owner of this run signed")
        amendment = bounds.opened(wire.Amendment, signed.amendment, "amendment")
        number = len(self.chain) + 1
        if amendment.run_id != self.run_id:
            raise RemoteFault(f"amendment of run {amendment.run_id[:16]!r}, not of {self.run_id[:16]!r}")
        if amendment.serial != number or amendment.previous != self._last():
            raise RemoteFault(f"amendment {amendment.serial} is not the next one after the {number - 1} known here")
        if self.chain and amendment.from_round < self.chain[-1].from_round:
            raise RemoteFault(f"amendment {number} from round {amendment.from_round}, before that of the one before")
        if len(amendment.names) != len(amendment.values) or any(
            len(owner) != PUBLIC_KEY_BYTES for owner in amendment.owners
        ):
            raise RemoteFault(f"amendment {number} is malformed")
        try:
            values = {name: json.loads(value) for name, value in zip(amendment.names, amendment.values, strict=True)}
            manifest = amended(self.newest, values)
        except (ValueError, RecursionError, ManifestError) as error:
            raise RemoteFault(f"amendment {number}: {error}") from None
        self.chain.append(Amendment(number, amendment.from_round, values, tuple(amendment.owners)))
        self.signed.append(signed)
        if manifest.pipeline.stages != self.newest.pipeline.stages:
            self.cuts.append(number)
        self._manifests.append(manifest)
        self.owners = tuple(amendment.owners) or self.owners
        self.signers = tuple(dict.fromkeys((*self.signers, *self.owners)))

    def sign(
        self, key: Ed25519PrivateKey, from_round: int, values: Mapping[str, object], owners: Sequence[bytes] = ()
    ) -> Amendment:
        """Add the next amendment, signed with an owner's `key`. Raises RemoteFault as `learn`."""
        raw = wire.Amendment(
            run_id=self.run_id,
            serial=len(self.chain) + 1,
            previous=self._last(),
            from_round=max([from_round, *(amendment.from_round for amendment in self.chain)]),
            names=list(values),
            values=[json.dumps(value) for value in values.values()],
            owners=owners,
        ).SerializeToString(deterministic=True)
        return self.learn([wire.SignedAmendment(amendment=raw, signature=key.sign(_DOMAIN + raw))])[0]

    def text(self, amendment: Amendment) -> str:
        """`amendment` as one line for people."""
        before, after = self._manifests[amendment.serial - 1 : amendment.serial + 1]
        says = [change.replace(": ", " ", 1) for change in difference(before, after)]
        if amendment.owners:
            says.append("owners " + ", ".join(owner.hex()[:16] for owner in amendment.owners))
        return f"amendment {amendment.serial} from round {amendment.from_round}: {'; '.join(says) or 'no change'}"

    def lines(self, round_index: int | None = None) -> list[str]:
        """All amendments for people, oldest first; with the round that is done: whether each is in force."""
        marks = ("", "") if round_index is None else (" (pending)", " (in force)")
        return [self.text(one) + marks[one.from_round <= (round_index or 0)] for one in self.chain]

    def _last(self) -> bytes:
        return digest("amendment", self.signed[-1].amendment) if self.signed else b""

"""The owner's amendments of a run under way: a chain of signed documents that change fields of the manifest from a
round on, or the keys that may sign. The run's id stays that of the manifest as it was signed first.

They travel with the manifest to joiners, and with the access list to members (train/node/access_list.py).

A chain can fork where a key was stolen: two amendments of one serial, each signed by an owner. Every node that hears of
both keeps the one it has, shows an alarm, and passes both on. The run's recovery key, which the manifest names and so
the run's id covers, ends it: of two chains that one counts in which it replaced the owners' keys more often. (As roots
of The Update Framework are replaced: TUF 1.0, section 6.1; alarms as Certificate Transparency's gossip.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.base import bounds
from swarmnode.base.bounds.table import RIVALS_MAX
from swarmnode.base.errors import ManifestError, RemoteFault
from swarmnode.base.identity import PUBLIC_KEY_BYTES, signed_by
from swarmnode.base.ids import RunId, digest
from swarmnode.base.wire import access_pb2 as wire
from swarmnode.base.wire.record_pb2 import SignedManifest
from swarmnode.run.admission.access import OwnerKeys
from swarmnode.run.manifest import Manifest, amended
from swarmnode.run.manifest.text import difference

ALARM = "ALARM: "  # begins the lines that everybody shows
AMENDMENT_BYTES_MAX = 4096
AMENDMENTS_MAX = 64  # guess: changes of one run

_DOMAIN = b"swarmnode/amendment/v1\0"


@dataclass(frozen=True, slots=True)
class Amendment:
    """One change: `values` by field from `from_round` on. `owners`, if any, are the keys that sign from the next one
    on, and `living` marks of what earlier keys signed that lives on. `recovery`: the recovery key signed it."""

    serial: int
    from_round: int
    values: Mapping[str, object]
    owners: tuple[bytes, ...] = ()
    living: frozenset[bytes] = frozenset()
    recovery: bool = False


class Amendments:
    """The chain as known here, verified. `keys` has the owners' keys after each amendment."""

    def __init__(self, manifest: Manifest, run_id: RunId, owner: bytes) -> None:
        self.run_id = run_id
        self.keys = OwnerKeys(((owner,),))
        self.rivals: dict[int, wire.SignedAmendment] = {}
        """By serial: another one that an owner signed. RIVALS_MAX at most."""
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
    def owners(self) -> tuple[bytes, ...]:
        """The keys that may sign the next amendment, access lists, invites and warrants."""
        return self.keys.now

    @property
    def signers(self) -> tuple[bytes, ...]:
        """All keys that could ever sign."""
        return tuple(dict.fromkeys(key for keys in self.keys.after for key in keys))

    @property
    def recovery(self) -> bytes:
        """The public half of the run's recovery key; empty: it has none."""
        return bytes.fromhex(self._manifests[0].access.recovery)

    @property
    def head(self) -> bytes:
        """The digest of the last amendment; empty without one."""
        return self.digest_of(len(self.signed))

    def digest_of(self, serial: int) -> bytes:
        """The digest of amendment `serial`; empty for 0."""
        return digest("amendment", self.signed[serial - 1].amendment) if serial else b""

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
        """Add what is new in `signed`, which may begin anywhere up to the end of this chain; returns it. Another chain
        takes the place of this one from where they part if the recovery key signed more often in it; else its first
        amendment there is a rival.

        Raises RemoteFault at the first one that no owner signed, that is out of order, or that changes what cannot be
        changed; those before it are kept.
        """
        if len(signed) > AMENDMENTS_MAX:
            raise RemoteFault(f"{len(signed)} amendments; at most {AMENDMENTS_MAX}")
        before = list(self.signed)
        for at, each in enumerate(signed):
            if each in self.signed:
                continue
            serial = self._parts_at(each)
            if serial:
                self._weigh(serial, signed[at:])
                break
            self._add(each)
        return [made for made, raw in zip(self.chain, self.signed, strict=True) if raw not in before]

    def _parts_at(self, signed: wire.SignedAmendment) -> int:
        """The serial of `signed` if it follows what is known here, but another one is in its place; else 0."""
        if len(signed.amendment) > AMENDMENT_BYTES_MAX:
            return 0
        amendment = bounds.opened(wire.Amendment, signed.amendment, "amendment")
        place = amendment.serial
        taken = 0 < place <= len(self.chain) and amendment.previous == self.digest_of(place - 1)
        return place if taken else 0

    def _weigh(self, serial: int, signed: Sequence[wire.SignedAmendment]) -> None:
        """Go on with the chain that parts from this one at `serial` with `signed`, or note a rival. Raises RemoteFault
        if no owner signed its first amendment."""
        other = self._begun(serial - 1)
        other._add(signed[0])
        for each in signed[1:]:
            try:
                other._add(each)
            except RemoteFault:
                break
        ours, theirs = (sum(one.recovery for one in chain) for chain in (self.chain, other.chain))
        if theirs > ours:
            rivals = {number: rival for number, rival in self.rivals.items() if number < serial}
            self.keys = other.keys
            self.chain = other.chain
            self.signed = other.signed
            self._manifests = other._manifests
            self.cuts = other.cuts
            self.rivals = rivals
        elif theirs == ours and len(self.rivals) < RIVALS_MAX:
            self.rivals.setdefault(serial, signed[0])

    def _begun(self, serial: int) -> Amendments:
        """A chain of the first `serial` amendments."""
        begun = Amendments(self._manifests[0], self.run_id, self.keys.after[0][0])
        for each in self.signed[:serial]:
            begun._add(each)
        return begun

    def _add(self, signed: wire.SignedAmendment) -> None:
        if len(signed.amendment) > AMENDMENT_BYTES_MAX:
            raise RemoteFault(f"amendment of {len(signed.amendment)} bytes; at most {AMENDMENT_BYTES_MAX}")
        text = _DOMAIN + signed.amendment
        recovery = bool(self.recovery) and signed_by(self.recovery, text, signed.signature)
        if not recovery and not any(signed_by(owner, text, signed.signature) for owner in self.owners):
            raise RemoteFault("amendment that no owner of this run signed")
        amendment = bounds.opened(wire.Amendment, signed.amendment, "amendment")
        if recovery and (amendment.names or not amendment.owners):
            raise RemoteFault("amendment of the recovery key that does not replace the owners' keys alone")
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
        owners = tuple(amendment.owners)
        living = frozenset(amendment.living)
        self.chain.append(Amendment(number, amendment.from_round, values, owners, living, recovery))
        self.signed.append(signed)
        if manifest.pipeline.stages != self.newest.pipeline.stages:
            self.cuts.append(number)
        self._manifests.append(manifest)
        self.keys = OwnerKeys((*self.keys.after, owners or self.keys.now), living if owners else self.keys.living)

    def sign(
        self,
        key: Ed25519PrivateKey,
        from_round: int,
        values: Mapping[str, object],
        owners: Sequence[bytes] = (),
        living: Sequence[bytes] = (),
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
            living=living,
        ).SerializeToString(deterministic=True)
        return self.learn([wire.SignedAmendment(amendment=raw, signature=key.sign(_DOMAIN + raw))])[0]

    def text(self, amendment: Amendment) -> str:
        """`amendment` as one line for people."""
        before, after = self._manifests[amendment.serial - 1 : amendment.serial + 1]
        says = [change.replace(": ", " ", 1) for change in difference(before, after)]
        if amendment.owners:
            by = " by the recovery key" if amendment.recovery else ""
            says.append("owners " + ", ".join(owner.hex()[:16] for owner in amendment.owners) + by)
        return f"amendment {amendment.serial} from round {amendment.from_round}: {'; '.join(says) or 'no change'}"

    def lines(self, round_index: int | None = None) -> list[str]:
        """All amendments for people, oldest first; with the round that is done: whether each is in force."""
        marks = ("", "") if round_index is None else (" (pending)", " (in force)")
        return [self.text(one) + marks[one.from_round <= (round_index or 0)] for one in self.chain]

    def alarms(self) -> list[str]:
        """A line for each serial of which owners signed two amendments."""
        return [
            f"{ALARM}owners signed two amendments {serial}, {self.digest_of(serial).hex()[:8]} and "
            f"{digest('amendment', rival.amendment).hex()[:8]}: a key may be stolen; the owner says: swarmnode owner "
            "rotate RUN --recovery FILE"
            for serial, rival in sorted(self.rivals.items())
        ]

    def _last(self) -> bytes:
        return self.head

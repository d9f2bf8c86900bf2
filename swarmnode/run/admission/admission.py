"""Admission control of one process: the owner's rules as known here, and the passes that peers have shown."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from swarmnode import __version__
from swarmnode.base import bounds
from swarmnode.base.errors import Forbidden, RemoteFault
from swarmnode.base.ids import PeerId, digest, machine_of
from swarmnode.base.ports import Clock
from swarmnode.base.remembered import REMEMBERED_MAX
from swarmnode.base.wire import access_pb2 as wire
from swarmnode.base.wire.call_pb2 import AccessListRequest
from swarmnode.run.admission.access import (
    ACCESS_LIST_BYTES_MAX,
    GRANT_NAME_BYTES,
    PASS_BYTES_MAX,
    SEQUENCE_STEP_MAX,
    AccessList,
    AccessRules,
    grant_name,
    open_access_list,
    permitted,
    too_old,
)
from swarmnode.run.admission.amendment import ALARM, Amendments


@dataclass(eq=False)
class Admission:
    """Applies `access.permitted` to peers, with the pass they showed before. `mine` is this node's own pass.
    `amendments` None: the run has none, and hears of none."""

    rules: AccessRules
    clock: Clock
    mine: wire.Pass | None = None
    amendments: Amendments | None = None

    def __post_init__(self) -> None:
        self.signed: wire.SignedAccessList | None = None  # the owner's newest list, to be passed on
        self.ahead: PeerId | None = None  # who said last that it knows more amendments
        self.renew: Callable[[], wire.Pass | None] = lambda: None  # a pass of the owner's newest key, where it is here
        self.renewals: list[Callable[[], None]] = []  # called when the owner's rules changed
        self.rival_lists: list[str] = []
        """Alarms: the owner signed two lists of one number."""
        self._passes: OrderedDict[PeerId, wire.Pass] = OrderedDict()
        self._machines: dict[bytes, set[PeerId]] = {}

    def judge(self, peer: PeerId, shown: wire.Pass | None = None) -> tuple[bool, str]:
        """Whether `peer` may take part, and the reason. `shown` None: the last pass it showed. A machine
        has one pass for all stages that it serves."""
        peer = machine_of(peer)
        fresh = shown is not None and shown.HasField("grant")
        if not fresh:
            shown = self._passes.get(peer)
        permit, reason = permitted(self.rules, peer, shown, self.clock.unix_s(), self._machines)
        if not permit and shown is not None and shown.grant.amendment >= len(self.rules.keys.after):
            self.ahead = peer
        if permit and fresh and shown is not None and not self.rules.is_open:
            self._remember(peer, shown)
        return permit, reason

    def judge_me(self, me: PeerId) -> tuple[bool, str]:
        """Whether this node may take part, with its version of the program, and the reason."""
        if reason := too_old(self.rules.access_list.least_version, __version__):
            return False, reason
        permit, reason = self.judge(me, self.mine)
        if not permit and (fresh := self.renew()) is not None:
            self.mine = fresh
            return self.judge(me, self.mine)
        return permit, reason

    def refusal(self, peer: PeerId, reason: str) -> Forbidden:
        """The refusal for `peer`. If the owner's list excludes it, the signed list is attached as evidence."""
        access_list = self.rules.access_list
        peer = machine_of(peer)
        shown = self._passes.get(peer)
        listed = peer in access_list.banned or (shown is not None and grant_name(shown.grant) in access_list.revoked)
        return Forbidden(reason, self.signed.SerializeToString() if listed and self.signed is not None else b"")

    def learn(self, signed: wire.SignedAccessList) -> bool:
        """Adopt amendments and an access list; return whether the list is newer than ours. Raises RemoteFault if no
        owner signed them."""
        if self.amendments is not None:
            try:
                self.amendments.learn(signed.amendments)
                for rival in signed.rivals:
                    self.amendments.learn([rival])
            finally:  # those before a false one count
                is_open = self.amendments.newest.access.mode == "open"
                keys = self.amendments.keys
                self.rules = replace(self.rules, is_open=is_open, amended=keys)
        if not signed.list or (self.signed is not None and signed.list == self.signed.list):
            return False
        if len(signed.list) + len(signed.signature) > ACCESS_LIST_BYTES_MAX:
            raise RemoteFault(f"access list of {len(signed.list)} bytes; at most {ACCESS_LIST_BYTES_MAX}")
        access_list = open_access_list(signed, self.rules.run_id, *self.owners)
        if access_list.amendment >= len(self.rules.keys.after):
            raise RemoteFault(f"access list under amendment {access_list.amendment}, which is not known here")
        if not self._supersedes(access_list):
            return False
        self.rival_lists.clear()
        self.rules = replace(self.rules, access_list=access_list)
        self.signed = wire.SignedAccessList(list=signed.list, signature=signed.signature)
        return True

    def _supersedes(self, access_list: AccessList) -> bool:
        """Whether `access_list`, which an owner in force signed, counts from now on: each does where the known one is
        of a key that was replaced. Raises RemoteFault for a number that leaps."""
        known = self.rules.access_list
        here = _rank(known)
        there = _rank(access_list)
        if self.signed is None or self._signed_still(self.signed):  # one of a replaced key holds until any other comes
            if there == here and access_list != known and not self.rival_lists:
                self.rival_lists.append(
                    f"{ALARM}owners signed two access lists {access_list.sequence}: a key may be stolen; the owner says"
                    ": swarmnode owner rotate RUN --recovery FILE"
                )
            if there <= here:
                return False
            if access_list.sequence > known.sequence + SEQUENCE_STEP_MAX:
                raise RemoteFault(f"access list {access_list.sequence}, where {known.sequence} is known")
        return True

    def _signed_still(self, signed: wire.SignedAccessList) -> bool:
        """Whether a key in force signed this list, which was verified when it came."""
        try:
            open_access_list(signed, self.rules.run_id, *self.owners)
        except RemoteFault:
            return False
        return True

    def alarms(self) -> list[str]:
        """Lines for people: the owner's documents contradict each other."""
        return self.rival_lists + ([] if self.amendments is None else self.amendments.alarms())

    def lines(self, round_index: int) -> list[str]:
        """The owner's amendments for people, after alarms."""
        return self.alarms() + ([] if self.amendments is None else self.amendments.lines(round_index))

    @property
    def owners(self) -> tuple[bytes, ...]:
        """The keys that sign access lists and warrants now."""
        return (self.rules.owner,) if self.amendments is None else self.amendments.owners

    def asking(self) -> AccessListRequest:
        """The words by which a peer knows what is known here."""
        asked = AccessListRequest(sequence=self.rules.access_list.sequence, list_digest=self._list_digest())
        if self.amendments is not None:
            asked.amendments = len(self.amendments.chain)
            asked.head = self.amendments.head
            asked.rivals = len(self.amendments.rivals)
        return asked

    def news(self, asked: AccessListRequest) -> wire.SignedAccessList:
        """The documents that a peer lacks that `asked` so: all amendments where its last one is not among ours."""
        signed = wire.SignedAccessList()
        other = bool(asked.list_digest) and asked.list_digest != self._list_digest()
        newer = not asked.list_digest and self.rules.access_list.sequence > asked.sequence
        if self.signed is not None and (newer or other):
            signed.CopyFrom(self.signed)
        if (known := self.amendments) is not None:
            had = asked.amendments
            same = had <= len(known.chain) and asked.head in (b"", known.digest_of(had))
            signed.amendments.extend(known.signed[had if same or not asked.head else 0 :])
            if asked.rivals < len(known.rivals):
                for serial, rival in known.rivals.items():  # the asker may have either
                    signed.rivals.extend([rival, known.signed[serial - 1]])
        return signed

    def _list_digest(self) -> bytes:
        return b"" if self.signed is None else digest("list", self.signed.list)[:GRANT_NAME_BYTES]

    def _remember(self, peer: PeerId, shown: wire.Pass) -> None:
        kept = wire.Pass()
        kept.CopyFrom(shown)
        self._passes[peer] = kept
        self._passes.move_to_end(peer)
        self._machines.setdefault(grant_name(shown.grant), set()).add(peer)
        if len(self._passes) > REMEMBERED_MAX:  # forgotten peers show theirs again
            gone, old = self._passes.popitem(last=False)
            name = grant_name(old.grant)
            self._machines[name].discard(gone)
            if not self._machines[name]:
                del self._machines[name]


def _rank(access_list: AccessList) -> tuple[int, int]:
    return access_list.amendment, access_list.sequence


def parse_pass(raw: bytes) -> wire.Pass:
    """The pass in `raw`, unverified. Raises RemoteFault if it is too long or does not parse."""
    if len(raw) > PASS_BYTES_MAX:
        raise RemoteFault(f"pass of {len(raw)} bytes; at most {PASS_BYTES_MAX}")
    return bounds.opened(wire.Pass, raw, "pass")

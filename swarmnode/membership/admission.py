"""Admission control of one process: the owner's rules as known here, and the passes that peers have shown."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

from swarmnode import __version__, bounds
from swarmnode.errors import Forbidden, RemoteFault
from swarmnode.ids import PeerId
from swarmnode.membership.access import (
    ACCESS_LIST_BYTES_MAX,
    PASS_BYTES_MAX,
    AccessRules,
    grant_name,
    open_access_list,
    permitted,
    too_old,
)
from swarmnode.membership.amendment import Amendments
from swarmnode.ports import Clock
from swarmnode.remembered import REMEMBERED_MAX
from swarmnode.wire import access_pb2 as wire


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
        self._passes: OrderedDict[PeerId, wire.Pass] = OrderedDict()
        self._machines: dict[bytes, set[PeerId]] = {}

    def judge(self, peer: PeerId, shown: wire.Pass | None = None) -> tuple[bool, str]:
        """Whether `peer` may take part, and the reason. `shown` None: the last pass it showed."""
        fresh = shown is not None and shown.HasField("grant")
        if not fresh:
            shown = self._passes.get(peer)
        permit, reason = permitted(self.rules, peer, shown, self.clock.unix_s(), self._machines)
        if permit and fresh and shown is not None and not self.rules.is_open:
            self._remember(peer, shown)
        return permit, reason

    def judge_me(self, me: PeerId) -> tuple[bool, str]:
        """Whether this node may take part, with its version of the program, and the reason."""
        if reason := too_old(self.rules.access_list.least_version, __version__):
            return False, reason
        return self.judge(me, self.mine)

    def refusal(self, peer: PeerId, reason: str) -> Forbidden:
        """The refusal for `peer`. If the owner's list excludes it, the signed list is attached as evidence."""
        access_list = self.rules.access_list
        shown = self._passes.get(peer)
        listed = peer in access_list.banned or (shown is not None and grant_name(shown.grant) in access_list.revoked)
        return Forbidden(reason, self.signed.SerializeToString() if listed and self.signed is not None else b"")

    def learn(self, signed: wire.SignedAccessList) -> bool:
        """Adopt amendments and an access list; return whether the list is newer than ours. Raises RemoteFault if no
        owner signed them."""
        if self.amendments is not None:
            self.amendments.learn(signed.amendments)
            is_open, signers = self.amendments.newest.access.mode == "open", self.amendments.signers
            self.rules = replace(self.rules, is_open=is_open, signers=signers)
        if not signed.list:
            return False
        if len(signed.list) + len(signed.signature) > ACCESS_LIST_BYTES_MAX:
            raise RemoteFault(f"access list of {len(signed.list)} bytes; at most {ACCESS_LIST_BYTES_MAX}")
        access_list = open_access_list(signed, self.rules.run_id, *self.owners)
        if access_list.sequence <= self.rules.access_list.sequence:
            return False
        self.rules = replace(self.rules, access_list=access_list)
        self.signed = wire.SignedAccessList(list=signed.list, signature=signed.signature)
        return True

    @property
    def owners(self) -> tuple[bytes, ...]:
        """The keys that sign access lists and warrants now."""
        return (self.rules.owner,) if self.amendments is None else self.amendments.owners

    def news(self, sequence: int, amendments: int) -> wire.SignedAccessList:
        """The documents that a peer lacks that has the access list of `sequence` and so many `amendments`."""
        signed = wire.SignedAccessList()
        if self.signed is not None and self.rules.access_list.sequence > sequence:
            signed.CopyFrom(self.signed)
        if self.amendments is not None:
            signed.amendments.extend(self.amendments.signed[amendments:])
        return signed

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


def parse_pass(raw: bytes) -> wire.Pass:
    """The pass in `raw`, unverified. Raises RemoteFault if it is too long or does not parse."""
    if len(raw) > PASS_BYTES_MAX:
        raise RemoteFault(f"pass of {len(raw)} bytes; at most {PASS_BYTES_MAX}")
    return bounds.opened(wire.Pass, raw, "pass")

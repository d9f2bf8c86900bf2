"""The door of one process: what it knows of the owner's rules, and who has shown it a pass."""

from __future__ import annotations

from collections import OrderedDict

from google.protobuf.message import DecodeError

from swarmnode import bounds
from swarmnode.errors import Forbidden, RemoteFault
from swarmnode.ids import PeerId
from swarmnode.membership.access import GUEST_LIST_BYTES_MAX, PASS_BYTES_MAX, Rules, grant_name, open_guests, permitted
from swarmnode.ports import Clock
from swarmnode.wire import access_pb2 as wire

PASSES_MAX = 4096  # guess: peers whose pass is remembered, 200 bytes each; those forgotten show theirs again


class Door:
    """Asks `access.permitted` of everybody, with what they showed before. `mine` is this node's own pass."""

    def __init__(self, rules: Rules, clock: Clock, mine: wire.Pass | None = None) -> None:
        self.rules = rules
        self.mine = mine
        self.signed: wire.SignedGuestList | None = None  # the owner's newest list, to be passed on
        self._clock = clock
        self._passes: OrderedDict[PeerId, wire.Pass] = OrderedDict()
        self._machines: dict[bytes, set[PeerId]] = {}

    def judge(self, peer: PeerId, shown: wire.Pass | None = None) -> tuple[bool, str]:
        """Whether `peer` may take part, and why (not); `shown` None: the pass it showed last."""
        fresh = shown is not None and shown.HasField("grant")
        if not fresh:
            shown = self._passes.get(peer)
        permit, reason = permitted(self.rules, peer, shown, self._clock.unix_s(), self._machines)
        if permit and fresh and shown is not None and not self.rules.is_open:
            self._remember(peer, shown)
        return permit, reason

    def refusal(self, peer: PeerId, reason: str) -> Forbidden:
        """What `peer` is told: with the owner's list when it is on it, so that it need not take our word."""
        guests = self.rules.guests
        shown = self._passes.get(peer)
        listed = peer in guests.banned or (shown is not None and grant_name(shown.grant) in guests.revoked)
        return Forbidden(reason, self.signed.SerializeToString() if listed and self.signed is not None else b"")

    def learn(self, signed: wire.SignedGuestList) -> bool:
        """Take in a guest list. True when it is newer than ours. Raises RemoteFault when the owner did not sign it."""
        if len(signed.list) + len(signed.signature) > GUEST_LIST_BYTES_MAX:
            raise RemoteFault(f"guest list of {len(signed.list)} bytes; at most {GUEST_LIST_BYTES_MAX}")
        guests = open_guests(signed, self.rules.run_id, self.rules.owner)
        if guests.sequence <= self.rules.guests.sequence:
            return False
        self.rules = Rules(self.rules.run_id, self.rules.owner, self.rules.is_open, guests)
        self.signed = signed
        return True

    def _remember(self, peer: PeerId, shown: wire.Pass) -> None:
        kept = wire.Pass()
        kept.CopyFrom(shown)
        self._passes[peer] = kept
        self._passes.move_to_end(peer)
        self._machines.setdefault(grant_name(shown.grant), set()).add(peer)
        if len(self._passes) > PASSES_MAX:
            gone, old = self._passes.popitem(last=False)
            name = grant_name(old.grant)
            self._machines[name].discard(gone)
            if not self._machines[name]:
                del self._machines[name]


def parse_pass(raw: bytes) -> wire.Pass:
    """The pass in `raw`, nothing verified. Raises RemoteFault when it is too long or does not parse."""
    if len(raw) > PASS_BYTES_MAX:
        raise RemoteFault(f"pass of {len(raw)} bytes; at most {PASS_BYTES_MAX}")
    try:
        found = wire.Pass.FromString(raw)
    except DecodeError:
        raise RemoteFault("pass that does not parse") from None
    bounds.check(found)
    return found

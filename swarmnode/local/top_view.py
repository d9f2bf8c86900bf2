"""Display of one node, with rates and the course of the loss: `swarmnode top`."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rich.console import Group
from rich.table import Table
from rich.text import Text

from swarmnode.ids import PeerId, short
from swarmnode.local.swarm_view import loss_text, nbytes_text, of_stages, stage_text, state_name
from swarmnode.metrics import name
from swarmnode.wire.control_pb2 import StatusReply

LOOKS_MAX = 120
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(slots=True)
class NodeWatch:
    """The last statuses of one node."""

    looks: deque[tuple[float, StatusReply]] = field(default_factory=lambda: deque(maxlen=LOOKS_MAX))

    def add(self, at_s: float, status: StatusReply) -> None:
        self.looks.append((at_s, status))

    @property
    def now(self) -> StatusReply:
        return self.looks[-1][1]

    def rate(self, counter: str, seconds: float = 5.0) -> float:
        """Growth per second, over the last `seconds`, of all series of `counter` with this prefix."""
        last_s, last = self.looks[-1]
        first_s, first = next(look for look in self.looks if look[0] >= last_s - seconds)
        if last_s <= first_s:
            return 0.0
        return (_sum(last, counter) - _sum(first, counter)) / (last_s - first_s)


def _sum(status: StatusReply, counter: str) -> float:
    prefix, _, label = counter.partition("|")
    return sum(value for key, value in status.counters.items() if key.startswith(prefix) and label in key)


def spark(values: list[float]) -> str:
    """Values as a row of bars; "" for fewer than two."""
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(_BARS[min(7, int(8 * (value - low) / span))] for value in values[-40:])


def picture(watch: NodeWatch) -> Group:
    """The complete display."""
    status = watch.now
    facts = Table.grid(padding=(0, 2))
    up, down = watch.rate(f'{name.LINK_BYTES}|direction="sent"'), watch.rate(f'{name.LINK_BYTES}|direction="received"')
    losses = [look.loss_train for _, look in watch.looks if look.loss_train]
    busy = watch.rate(name.COMPUTE_SECONDS)
    limits = status.limits
    rows = [
        ("state", f"{state_name(status.state)}, stage {of_stages(status)}, round {status.round}"),
        ("compute", f"{100 * min(1.0, busy):.0f} % of the device, {status.inner_steps:,} inner steps"),
        ("fed here", f"{status.tokens_per_second:,.0f} tokens/s"),
        ("run", f"{status.samples_total:,} samples, {status.tokens_total:,} tokens"),
        ("loss", f"{loss_text(status.loss_train or None)} {spark(losses)}"),
        ("traffic", f"up {nbytes_text(up)}/s, down {nbytes_text(down)}/s"),
        ("memory", nbytes_text(status.resident_nbytes)),
        ("limits", ", ".join(f"{key} {text}" for key, text in sorted(limits.limits.items())) or "none"),
    ]
    if not limits.running and limits.reason:
        rows.insert(1, ("paused", limits.reason))
    if "quota" in limits.limits:
        rows.append(("today", f"{nbytes_text(limits.quota_used_nbytes)} of {limits.limits['quota']}"))
    for key, value in rows:
        facts.add_row(Text(key, style="bold"), Text(value, style="yellow" if key == "paused" else ""))
    peers = Table("stage", "peer", "state", "samples/s", "queue", "a sample in", box=None, header_style="bold")
    for peer in sorted(status.peers, key=lambda peer: (peer.stage, peer.peer_id)):
        peers.add_row(
            stage_text(peer.stage, status.stages),
            short(PeerId(peer.peer_id)),
            "banned" if peer.banned else state_name(peer.state),
            f"{peer.samples_per_second:,.1f}",
            str(peer.queue),
            f"{1000 * peer.latency_s:,.0f} ms" if peer.latency_s else "",
        )
    title = Text(f"swarmnode {status.version}  {status.run_name} {status.run_id[:16]}", style="bold")
    return Group(title, Text(), facts, Text(), peers)

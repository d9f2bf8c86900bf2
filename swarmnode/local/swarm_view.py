"""Display of a running swarm: a live table on a terminal, periodic lines elsewhere."""

from __future__ import annotations

import collections
from collections import deque
from dataclasses import dataclass, field
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from swarmnode.ids import PeerId, short
from swarmnode.local.session import Screen, SessionView
from swarmnode.local.summary import NodeFacts, Summary, Totals
from swarmnode.machine.sensors import local_time
from swarmnode.metrics import name
from swarmnode.pipeline.staleness import shares_text
from swarmnode.wire.control_pb2 import StatusReply
from swarmnode.wire.record_pb2 import NodeState

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


LINE_PERIOD_S = 5.0
NOTES_MAX = 6


def screen_for(console: Console, stream: TextIO) -> Screen:
    """The live view if `console` is a terminal that can move its cursor, else lines on `stream`."""
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveScreen(console)
    return PlainScreen(stream)


class PlainScreen:
    """A line every `LINE_PERIOD_S`, and each note at once."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._next_s = 0.0

    def show(self, picture: SessionView) -> None:
        if picture.wall_s >= self._next_s:
            self._next_s = picture.wall_s + LINE_PERIOD_S
            self._write(line(picture))

    def note(self, text: str) -> None:
        self._write(text)

    def close(self) -> None:
        pass

    def _write(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


class LiveScreen:
    """A table by stage, redrawn for each picture, with the last notes below."""

    def __init__(self, console: Console) -> None:
        self._notes: collections.deque[str] = collections.deque(maxlen=NOTES_MAX)
        self._picture: SessionView | None = None
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
        self._live.start()

    def show(self, picture: SessionView) -> None:
        self._picture = picture
        self._draw()

    def note(self, text: str) -> None:
        self._notes.append(text)
        self._draw()

    def close(self) -> None:
        self._live.stop()

    def _draw(self) -> None:
        notes = Text("\n".join(self._notes), style="dim")
        table = [render(self._picture)] if self._picture is not None else []
        self._live.update(Group(*table, notes), refresh=True)


def render(picture: SessionView) -> Table:
    """The whole swarm as one table: nodes by stage, dead ones below living ones."""
    table = Table(title=line(picture), title_justify="left", title_style="bold", expand=False)
    if picture.page:
        table.caption, table.caption_justify = f"dashboard {picture.page}", "left"
    for heading in ("stage", "node", "peer", "state"):
        table.add_column(heading)
    for heading in ("tokens/s", "steps", "round", "train", "validation", "memory"):
        table.add_column(heading, justify="right")
    order = sorted(picture.nodes, key=lambda n: (bool(n.reason), n.stage if n.stage is not None else 1 << 30, n.name))
    for node in order:
        table.add_row(*cells(node), style="dim" if node.reason else ("" if node.training else "yellow"))
    return table


def stage_text(stage: int, stages: int) -> str:
    """`stage` of a run of `stages` as a table shows it: "feeder" for a node that only feeds (membership/place.py)."""
    return "feeder" if stage == stages else str(stage)


def of_stages(status: StatusReply) -> str:
    """The stage of a node among those of its run."""
    if status.stage == status.stages:
        return f"none of {status.stages}: it only feeds"
    return f"{status.stage} of {status.stages}"


def cells(node: NodeFacts) -> list[str]:
    """A row of the table."""
    status = node.status
    stage = "-" if node.stage is None else stage_text(node.stage, 1 << 30 if status is None else status.stages)
    if status is None:
        return [stage, node.name, "", node.reason or "starting", *[""] * 6]
    return [
        stage,
        node.name,
        short(PeerId(status.peer_id)),
        node.reason or state_name(status.state),
        f"{status.tokens_per_second:,.0f}" if status.tokens_per_second else "",
        f"{status.inner_steps:,}",
        str(status.round),
        loss_text(status.loss_train or None, ""),
        loss_text(status.loss_validation or None, ""),
        nbytes_text(status.resident_nbytes),
    ]


def line(picture: SessionView) -> str:
    """The swarm in one line: time, nodes, samples, speed, losses, round, bytes sent."""
    t = picture.totals
    alive = [node for node in picture.nodes if not node.reason]
    training = sum(node.training for node in alive)
    clock = picture.wall_s if picture.ready_s is None else picture.ready_s
    parts = [
        f"{clock:6.1f} s",
        f"nodes {training}/{len(alive)}",
        f"samples {t.samples:,}",
        f"tokens/s {picture.tokens_per_s:,.0f}",
        f"loss {loss_text(t.loss_train)} validation {loss_text(t.loss_validation)}",
        f"round {t.round}",
        f"sent {nbytes_text(sum(t.bytes.values()))}",
    ]
    return "  ".join(parts)


def conclusion(summary: Summary) -> str:
    """The summary as a few lines of text."""
    t: Totals = summary.totals
    mb, ex = t.microbatches, t.exchanges
    sent = ", ".join(f"{kind} {nbytes_text(nbytes)}" for kind, nbytes in t.bytes.items())
    ends = collections.Counter(summary.exit_reasons.values())
    first, last = loss_text(t.loss_validation_first), loss_text(t.loss_validation)
    rows = [
        ("run", summary.run),
        ("stopped", f"{summary.stopped}, after {summary.wall_s:.1f} s"),
        ("trained", f"{t.samples:,} samples, {t.tokens:,} tokens, {summary.tokens_per_s:,.0f} tokens/s"),
        ("loss", f"validation {first} at first, {last} at last, train {loss_text(t.loss_train)} (nats per token)"),
        ("rounds", f"{t.round}; replicas' outer steps: {ex['paired']} paired, {ex['lone']} lone"),
        (
            "microbatches",
            f"{mb['done']:,} done, {mb['lost']} lost, {mb['retried']} retried, {mb['duplicate']} duplicate",
        ),
        ("staleness", f"inner steps between forward and backward: {shares_text(t.staleness)}"),
        ("recoveries", f"{t.recoveries}; {summary.killed} nodes killed on purpose"),
        ("sent", sent),
        ("nodes", ", ".join(f"{number} × {reason}" for reason, number in ends.items())),
        ("folder", summary.folder),
        ("model", summary.model or "none"),
    ]
    return "\n".join(f"{key:>12}  {value}" for key, value in rows)


def state_name(state: int) -> str:
    """Readable form of `NODE_STATE_TRAINING`: training."""
    try:
        return NodeState.Name(state).removeprefix("NODE_STATE_").lower()
    except ValueError:
        return f"state {state}"


def loss_text(nats: float | None, unknown: str = "-") -> str:
    """Three decimals, or `unknown`."""
    return unknown if nats is None else f"{nats:.3f}"


def nbytes_text(nbytes: float) -> str:
    """Bytes in decimal units, as links are measured: 1.5 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def limits_text(status: StatusReply) -> str:
    """The limits that are set, and the reason if paused."""
    limits = ", ".join(f"{name} {text}" for name, text in sorted(status.limits.limits.items())) or "none"
    paused = status.limits.reason if status.limits.reason and not status.limits.running else ""
    if paused and status.limits.until_s:
        paused += f"; until {local_time(status.limits.until_s)}"
    return f"paused: {paused}\n{limits}" if paused else limits


def status_tables(status: StatusReply) -> list[Table]:
    """A node's status, its non-zero counters, and the peers it knows if it works with any."""
    facts = Table(title=f"{status.run_name} {status.run_id[:16]}", title_justify="left", show_header=False)
    for key, value in _status_rows(status):
        facts.add_row(key, value)
    for line in status.amendments:
        facts.add_row("amended", line)
    counters = Table(Column("counter", overflow="fold"), "value", title="counters", title_justify="left")
    for key, number in sorted(status.counters.items()):
        if number:
            counters.add_row(key, f"{number:,.6g}" if number % 1 else f"{number:,.0f}")
    peers = Table(
        "peer", "stage", "state", "samples/s", "queue", "round", "answers in", title="peers", title_justify="left"
    )
    for peer in sorted(status.peers, key=lambda peer: (peer.stage, peer.peer_id)):
        state = "banned" if peer.banned else state_name(peer.state)
        speed = f"{peer.samples_per_second:.1f}"
        latency = f"{peer.latency_s * 1000:,.0f} ms a sample" if peer.latency_s else "-"  # not asked yet
        who = short(PeerId(peer.peer_id))
        peers.add_row(
            who, stage_text(peer.stage, status.stages), state, speed, str(peer.queue), str(peer.round), latency
        )
    return [facts, counters] if status.trains_nothing else [facts, counters, peers]


def _status_rows(status: StatusReply) -> list[tuple[str, str]]:
    who = [("peer", status.peer_id), ("version", status.version)]
    clock = [("clock", status.clock)] if status.clock else []
    up = ("up", f"{status.uptime_s:,.0f} s")
    memory = ("memory", nbytes_text(status.resident_nbytes))
    metrics = ("metrics", f"http://{status.metrics_address}/metrics")
    if status.trains_nothing:
        return [*who, ("role", "a meeting point of the run: it trains nothing"), *clock, up, memory, metrics]
    return [
        *who,
        ("stage", of_stages(status)),
        ("state", state_name(status.state)),
        *clock,
        up,
        ("samples of the run", f"{status.samples_total:,}"),
        ("round", str(status.round)),
        ("inner steps", f"{status.inner_steps:,}"),
        ("tokens/s fed here", f"{status.tokens_per_second:,.0f}"),
        ("loss, train", loss_text(status.loss_train or None)),
        ("loss, validation", loss_text(status.loss_validation or None)),
        memory,
        ("limits", limits_text(status)),
        metrics,
        ("addresses", "\n".join(status.addresses)),
    ]

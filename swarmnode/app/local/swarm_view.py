"""Display of a running swarm: a live table on a terminal, periodic lines elsewhere."""

from __future__ import annotations

import collections
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from swarmnode.app.daemon.empty_stages import empty_stages, sleepers
from swarmnode.app.daemon.ready_file import page_here
from swarmnode.app.dashboard.alarm import more_of
from swarmnode.app.local.session import Screen, SessionView
from swarmnode.app.local.summary import NodeFacts, Summary, Totals
from swarmnode.app.machine.sensors import local_time
from swarmnode.base.ids import PeerId, machine_of, short, stage_name, stages_name
from swarmnode.base.metrics import name
from swarmnode.base.metrics.events import nbytes_text
from swarmnode.base.wire.record_pb2 import (
    NODE_STATE_DRAINING,
    NODE_STATE_JOINING,
    NODE_STATE_LEFT,
    NODE_STATE_PAUSED,
    NODE_STATE_SYNCING,
    NODE_STATE_TRAINING,
    NodeState,
)
from swarmnode.base.wire.report_pb2 import StatusReply, Wait
from swarmnode.train.pipeline.microbatch_size import shares_text

LOOKS_MAX = 120
LOSSES_MAX = 1000
STATE_WORDS = {
    NODE_STATE_JOINING: "fetching its weights",
    NODE_STATE_SYNCING: "falling in with the others",
    NODE_STATE_PAUSED: "paused",
    NODE_STATE_DRAINING: "leaving: it finishes what it holds",
    NODE_STATE_LEFT: "has left",
}
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(slots=True)
class NodeWatch:
    """The last statuses of one node."""

    looks: deque[tuple[float, StatusReply]] = field(default_factory=lambda: deque(maxlen=LOOKS_MAX))
    losses: list[float] = field(default_factory=list)
    """Of all looks; of old ones, in a long life, every second, fourth, ..."""

    def add(self, at_s: float, status: StatusReply) -> None:
        self.looks.append((at_s, status))
        if status.loss_train:
            self.losses = [*(self.losses[::2] if len(self.losses) == LOSSES_MAX else self.losses), status.loss_train]

    @property
    def now(self) -> StatusReply:
        return self.looks[-1][1]

    def rate(self, counter: str, seconds: float = 5.0) -> float:
        """Growth per second, over the last `seconds`, of all series of `counter` with this prefix."""
        return self._growth(lambda status: _sum(status, counter), seconds)

    def _growth(self, value: Callable[[StatusReply], float], seconds: float) -> float:
        last_s, last = self.looks[-1]
        first_s, first = next(look for look in self.looks if look[0] >= last_s - seconds)
        return (value(last) - value(first)) / (last_s - first_s) if last_s > first_s else 0.0


def _sum(status: StatusReply, counter: str) -> float:
    prefix, _, label = counter.partition("|")
    return sum(value for key, value in status.counters.items() if key.startswith(prefix) and label in key)


def spark(values: list[float]) -> str:
    """Values as a row of at most 40 bars; "" for fewer than two."""
    if len(values) < 2:
        return ""
    low = min(values)
    span = (max(values) - min(values)) or 1.0
    bars = min(40, len(values))
    shown = (values[-1 - part * len(values) // bars] for part in reversed(range(bars)))
    return "".join(_BARS[min(7, int(8 * (value - low) / span))] for value in shown)


def picture(watch: NodeWatch) -> Group:
    """All that `status` shows, once or live: the panel, and the peers."""
    status = watch.now
    if status.trains_nothing:
        return Group(panel(watch))
    peers = Table("stage", "peer", "state", box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("samples/s", "queue", "a sample in"):
        peers.add_column(heading, justify="right")
    for peer in sorted(status.peers, key=lambda peer: (peer.stage, peer.peer_id)):
        peers.add_row(
            str(peer.stage + 1),
            short(PeerId(peer.peer_id)),
            "banned" if peer.banned else state_name(peer.state),
            f"{peer.samples_per_second:,.1f}",
            str(peer.queue),
            f"{1000 * peer.latency_s:,.0f} ms" if peer.latency_s else "",  # not asked yet
        )
    return Group(panel(watch), Text(), peers) if status.peers else Group(panel(watch))


def panel(watch: NodeWatch) -> Table:
    """A node in a few lines, whole at 60 columns: its place among the stages, who is missing, what it does and gave."""
    status = watch.now
    run = f"{status.run_name} {status.run_id[:16]}"
    return _grid(
        [("run", run), ("peer", f"{short(PeerId(status.peer_id))}, swarmnode {status.version}"), *_facts(watch)]
    )


def _grid(facts: Iterable[tuple[str, str | Text]]) -> Table:
    """A line for each fact that has a value."""
    grid = Table.grid(Column(style="bold", no_wrap=True), Column(overflow="fold"), padding=(0, 2, 0, 0))
    for key, value in facts:
        if value:
            text = Text(value) if isinstance(value, str) else value  # no markup: names and paths may hold brackets
            grid.add_row(key, text, style="yellow" if key in ("paused", "clock", "waits") else "")
    return grid


def _facts(watch: NodeWatch) -> list[tuple[str, str | Text]]:
    status = watch.now
    memory = nbytes_text(status.resident_nbytes)
    metrics = f"http://{status.metrics_address}/metrics"
    if status.trains_nothing:
        role = "a meeting point of the run: it trains nothing"
        more = [("clock", status.clock), ("up", span_text(status.uptime_s)), ("memory", memory), ("metrics", metrics)]
        return [("role", role), *more]
    up = watch.rate(f'{name.LINK_BYTES}|direction="sent"')
    down = watch.rate(f'{name.LINK_BYTES}|direction="received"')
    speed = f"{status.run_tokens_per_second:,.0f} tokens/s of the run, {with_us(status):,.0f} with us"
    busy = f"; {100 * min(1.0, watch.rate(name.COMPUTE_SECONDS)):.0f} % of the device"
    measured = len(watch.looks) > 1 and not empty_stages(status)
    limits = status.limits
    quota = f" ({nbytes_text(limits.quota_used_nbytes)} used)" if "quota" in limits.limits else ""
    page = page_here(status.run_id) or status.page
    return [
        ("stages", stage_strip(status)),
        ("", headline(status)),
        ("paused", "" if limits.running or not limits.reason else paused_text(status)),
        ("waits", "\n".join(map(wait_text, status.waits))),
        ("clock", status.clock),
        ("speed", speed + busy if measured else ""),
        ("given", given_text(status)),
        ("run so far", f"round {status.round}, {status.tokens_total:,} tokens"),
        ("meetings", meetings_text(status.meets_every_steps, status.meets_every_steps_planned)),
        ("loss", f"{loss_text(status.loss_train or None)} {spark(watch.losses)}" if watch.losses else ""),
        ("validation", loss_text(status.loss_validation or None, "")),
        ("traffic", f"up {nbytes_text(up)}/s, down {nbytes_text(down)}/s" if measured else ""),
        ("memory", memory),
        ("limits", ", ".join(f"{key} {text}" for key, text in sorted(limits.limits.items())) + quota),
        ("amended", "\n".join(status.amendments)),
        ("page", f"{page}node/{short(PeerId(status.peer_id))}" if page else page),
    ]


def meetings_text(steps: float, planned: float) -> str:
    """`replicas meet every 10 steps, as planned`; "" before they met twice."""
    if not steps:
        return ""
    apart = "as planned" if round(steps) <= round(planned) else f"planned: every {planned:,.3g}"
    return f"replicas meet every {steps:,.3g} steps ({apart})"


def stage_strip(status: StatusReply) -> Text:
    """The pipeline, a sign for each stage: ■ served, □ empty, in brackets and lit those that are ours."""
    empty = set(empty_stages(status))
    strip = Text()
    ours = our_stages(status)
    for stage in range(status.stages):
        mine = stage in ours and status.state
        sign = "□" if stage in empty else "■"
        strip.append(f"[{sign}]" if mine else f" {sign} ", style="bold green" if mine else "red" * (stage in empty))
    return strip


def our_stages(status: StatusReply) -> range:
    """The stages that this machine serves: its node's own, and those of its parts, which follow each other."""
    parts = [peer.stage for peer in status.peers if machine_of(PeerId(peer.peer_id)) == status.peer_id]
    return range(min([status.stage, *parts]), max([status.stage, *parts]) + 1)


def headline(status: StatusReply) -> str:
    """The node's place, and whom the run waits for: "stage 2 of 3; waiting for two more machines", or "stage 1 of 2;
    stage 2 sleeps until 22:00 with 12D3…abcd"."""
    if not status.state:
        return "looking for the stage that needs this machine most"
    asleep = sleepers(status)
    missing = [stage for stage in empty_stages(status) if stage != status.stage and stage not in asleep]
    state = "" if status.state == NODE_STATE_TRAINING else f", {STATE_WORDS.get(status.state, '')}"
    ours = our_stages(status)
    place = of_stages(status) if len(ours) == 1 else f"{stages_name(ours)} of {status.stages}"
    words = f"{place}{state}"
    words += "".join(f"; {stage_name(stage)} sleeps {until}" for stage, until in asleep.items())
    if missing and status.state != NODE_STATE_DRAINING:
        return f"{words}; waiting for {more_of('machine', len(missing))}"
    return f"{words}; every stage has a machine" if not state and not asleep else words


def wait_text(wait: Wait) -> str:
    """A node's reason to wait, and the person's remedy."""
    return f"{wait.says}. What helps: {wait.can_do}."


def trains(status: StatusReply) -> bool:
    """Whether work passes through this machine: its state alone does not say so."""
    return status.state == NODE_STATE_TRAINING and not any(wait.stops for wait in status.waits)


def with_us(status: StatusReply) -> float:
    """Tokens per second that the run reads with this machine's part; what the run reads may be heard of later."""
    return min(status.given_tokens_per_second, status.run_tokens_per_second)


def given_text(status: StatusReply) -> str:
    """The tokens that this machine gave, by its receipts."""
    masked = f", {status.given.targets:,} of them targets" if status.given.targets != status.given.tokens else ""
    return f"{status.tokens_given:,} tokens read{masked}"


def thanks(status: StatusReply) -> str:
    """A sentence for whoever gave this machine, with what it gave to the run so far."""
    hours = span_text(status.uptime_s)
    if status.tokens_given:
        before = status.tokens_given_before
        lately = f", {status.tokens_given - before:,} of them" if before else ""
        return f"thank you: {status.tokens_given:,} tokens of {status.run_name} trained here{lately} in {hours}"
    return f"thank you for {hours}: no text of {status.run_name} came to this machine this time"


def span_text(seconds: float) -> str:
    """A duration as people say it: 40 s, 12 min, 3 h 05 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60:02} min"


LINE_PERIOD_S = 5.0


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
            self._write("  ".join(parts(picture)))

    def note(self, text: str) -> None:
        self._write(text)

    def close(self) -> None:
        pass

    def _write(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


class LiveScreen:
    """A table by stage, redrawn for each picture, with the notes above."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
        self._live.start()

    def show(self, picture: SessionView) -> None:
        self._live.update(render(picture, self._live.console.width), refresh=True)

    def note(self, text: str) -> None:
        self._live.console.print(Text(text, style="dim"))

    def close(self) -> None:
        self._live.stop()


COLUMNS = (  # heading, from which width of the terminal on
    *(("stage", 0), ("node", 0), ("peer", 100), ("state", 0), ("tokens/s", 0), ("steps", 100), ("round", 0)),
    *(("train", 0), ("validation", 72), ("memory", 84)),
)


def render(picture: SessionView, width: int = 160) -> Group:
    """The whole swarm as one table that fits `width`: nodes by stage, dead ones below living ones."""
    kept = [number for number, (_, least) in enumerate(COLUMNS) if width >= least]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for number in kept:
        table.add_column(COLUMNS[number][0], justify="right" if number > 3 else "left")
    order = sorted(picture.nodes, key=lambda n: (bool(n.reason), n.stage if n.stage is not None else 1 << 30, n.name))
    for node in order:
        row = cells(node)
        table.add_row(
            *(Text(row[i]) for i in kept), style="dim" if node.reason else ("" if node.training else "yellow")
        )
    told = max((list(node.status.amendments) for node in picture.nodes if node.status is not None), key=len, default=[])
    page = [f"dashboard {picture.page}"] if picture.page else []
    head = Text("  ".join(part.strip() for part in parts(picture)), style="bold")
    return Group(head, table, *map(Text, [*told, *page]), Text("Ctrl-C stops all nodes in order", style="dim"))


def of_stages(status: StatusReply) -> str:
    """The stage of a node among those of its run: "stage 2 of 3"."""
    return f"{stage_name(status.stage)} of {status.stages}"


def cells(node: NodeFacts) -> list[str]:
    """A row of the table."""
    status = node.status
    stage = "-" if node.stage is None else str(node.stage + 1)
    if status is None:
        return [stage, node.name, "", node.reason or "starting", *[""] * 6]
    return [
        stage,
        node.name,
        short(PeerId(status.peer_id)),
        node.reason or ("ready" if status.waits and not trains(status) and node.training else state_name(status.state)),
        f"{status.tokens_per_second:,.0f}" if status.tokens_per_second else "",
        f"{status.inner_steps:,}",
        str(status.round),
        loss_text(status.loss_train or None, ""),
        loss_text(status.loss_validation or None, ""),
        nbytes_text(status.resident_nbytes),
    ]


def parts(picture: SessionView) -> list[str]:
    """The swarm in a few words each: time, nodes, samples, speed, losses, round, bytes sent."""
    t = picture.totals
    alive = [node for node in picture.nodes if not node.reason]
    training = sum(node.training for node in alive)
    clock = picture.wall_s if picture.ready_s is None else picture.ready_s
    return [
        f"{clock:6.1f} s",
        f"nodes {training}/{len(alive)}",
        f"samples {t.samples:,}",
        f"tokens/s {picture.tokens_per_s:,.0f}",
        f"loss {loss_text(t.loss_train)} validation {loss_text(t.loss_validation)}",
        f"round {t.round}",
        f"sent {nbytes_text(sum(t.bytes.values()))}",
    ]


def conclusion(summary: Summary) -> Table:
    """The summary in a few lines."""
    t: Totals = summary.totals
    mb = t.microbatches
    ex = t.exchanges
    sent = ", ".join(f"{kind} {nbytes_text(nbytes)}" for kind, nbytes in t.bytes.items())
    ends = collections.Counter(summary.exit_reasons.values())
    first = loss_text(t.loss_validation_first)
    last = loss_text(t.loss_validation)
    rows: list[tuple[str, str | Text]] = [
        ("run", summary.run),
        ("stopped", f"{summary.stopped}, after {summary.wall_s:.1f} s"),
        ("trained", f"{t.samples:,} samples, {t.tokens:,} tokens, {summary.tokens_per_s:,.0f} tokens/s"),
        ("loss", f"validation {first} at first, {last} at last, train {loss_text(t.loss_train)} (nats per token)"),
        ("rounds", f"{t.round}; replicas' outer steps: {ex['paired']} paired, {ex['lone']} lone"),
        ("meetings", meetings_text(t.meets_every_steps, t.meets_every_steps_planned)),
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
    return _grid(rows)


def state_name(state: int) -> str:
    """Readable form of `NODE_STATE_TRAINING`: training."""
    try:
        return NodeState.Name(state).removeprefix("NODE_STATE_").lower()
    except ValueError:
        return f"state {state}"


def loss_text(nats: float | None, unknown: str = "-") -> str:
    """Three decimals, or `unknown`."""
    return unknown if nats is None else f"{nats:.3f}"


def paused_text(status: StatusReply) -> str:
    """Why it is paused, and until when."""
    until = f"; until {local_time(status.limits.until_s)}" if status.limits.until_s else ""
    return f"{status.limits.reason}{until}"

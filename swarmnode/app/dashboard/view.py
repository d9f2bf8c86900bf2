"""Renders the board as JSON for the API and the page's event stream. Pure; the shapes are in openapi.json."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from swarmnode.app.dashboard.alarm import Health, parties
from swarmnode.app.dashboard.board import SILENT_AFTER, Board, NodeView
from swarmnode.app.dashboard.history import HistoryPoint
from swarmnode.app.dashboard.totals import LATE, SENT, energy_of
from swarmnode.app.machine.sensors import local_time
from swarmnode.base.concurrency import processors
from swarmnode.base.ids import PeerId, machine_of
from swarmnode.base.wire import record_pb2, report_pb2
from swarmnode.net.membership.receipt import receipt_to_json
from swarmnode.run.admission.amendment import ALARM
from swarmnode.run.manifest import Manifest
from swarmnode.run.manifest.gossip_compat import planned_meeting_steps
from swarmnode.run.manifest.recipe import PRESETS
from swarmnode.train.pipeline.microbatch_size import LOOPBACK, SETTLED_S, slowness

LINKS_SHOWN_MAX = 600  # guess: more than a screen can show clearly
ROUNDS_SHOWN = 60
ISLANDS_SHARE = 0.9  # guess: this share of the serving nodes must have reported links before islands are shown
LINK_KINDS = {report_pb2.LINK_KIND_DIRECT: "direct", report_pb2.LINK_KIND_RELAYED: "relayed"}

Json = dict[str, object]


def state_of(node: NodeView) -> str:
    """The node's state on the page: a NodeState, `gone` or `silent`."""
    if node.gone_s is not None:
        return "left" if node.gone_why == "left" else "gone"
    if node.failures >= SILENT_AFTER:
        return "silent"
    return record_pb2.NodeState.Name(node.state)[11:].lower()


def node_row(node: NodeView) -> Json:
    """The short form of one node, for the grid."""
    status = node.status
    return {
        "peer": node.peer,
        "name": node.label,
        "stage": node.stage,
        "state": state_of(node),
        "speed": round(node.speed, 2),
        "queue": node.queue,
        "round": node.round,
        "version": node.version,
        "joined": round(node.joined_s, 1),
        "rtt_ms": None if node.rtt_s is None else round(1000 * node.rtt_s, 1),
        "skew_s": None if node.skew_s is None else round(node.skew_s, 2),
        "loss": None if status is None or not 0 < status.loss_train < 1e4 else round(status.loss_train, 4),
        "steps": 0 if status is None else status.inner_steps,
        "busy": rounded(node.busy),
        "memory": 0 if status is None else status.resident_nbytes,
        "why": node.why,
    }


def summary(board: Board, now_s: float) -> Json:
    """The numbers on top of the page."""
    manifest = board.manifest
    living = board.living()
    rate = board.samples_per_s()
    last = board.validations.last()
    target = target_of(manifest)
    first = min(board.validations, default=None)
    sent = {key.removeprefix("sent_"): round(board.totals[key]) for key in SENT}
    return {
        "t": round(now_s, 3),
        "phase": phase(board, now_s),
        "trained": round(board.trained_s, 1),
        "samples": board.samples,
        "samples_target": target,
        "tokens": board.samples * manifest.model.context,
        "tokens_per_s": round(rate * manifest.model.context, 1),
        "time_left_s": round(max(0, target - board.samples) / rate, 1) if target and rate > 0 else None,
        "loss_train": rounded(board.loss_train(now_s)),
        "loss_validation": None if last is None else rounded(last[1]),
        "loss_validation_first": None if first is None else rounded(board.validations[first][1]),
        "round": board.round_last(),
        "amendments": board.amendments(board.samples // manifest.gossip.round_samples),
        "nodes": len({machine_of(node.peer) for node in living}),
        "serving": sum(node.serving and node.stage < manifest.pipeline.stages for node in living),
        "replicas": replicas(board),
        "asleep": [
            {"stage": stage, "name": node.label, "until": node.resumes_s or None} for stage, node in sleepers(board)
        ],
        "paired": round(board.totals["paired"]),
        "lone": round(board.totals["lone"]),
        "meets_every_steps": rounded(board.meets_every_steps(now_s)),
        "meets_every_steps_planned": round(planned_meeting_steps(manifest), 2),
        "worked_s": round(board.totals["worked_s"]),
        **energy_of(board.totals["metered_s"], board.totals["joules"]),
        "recoveries": round(board.totals["recoveries"]),
        "microbatches": {key: round(board.totals[key]) for key in ("done", "lost", "retried")},
        "staleness": [round(board.totals[key]) for key in LATE],
        "sent": sent,
        "gossip_dense": round(board.totals["dense"]),
    }


def target_of(manifest: Manifest) -> int | None:
    """The samples at which the learning rate is at its least; None where it stays, or nobody chose when."""
    inner = manifest.inner
    chosen = inner.decay_samples not in {preset.inner.decay_samples for preset in PRESETS.values()}
    return inner.decay_samples if chosen and inner.decay != "constant" else None


def phase(board: Board, now_s: float) -> str:
    """One word for the run: `looking` for it, `waiting` for its first sample, `training`, `broken` while a stage has
    nobody, `asleep` where all who had such stages are paused, `stopped` while nobody is here at all, or `ended` if it
    had reached its target then."""
    if not board.living():
        if not board.began_s or now_s - board.began_s < board.manifest.limits.record_ttl_s:
            return "looking"
        if board.samples:
            return "ended" if board.samples >= (target_of(board.manifest) or math.inf) else "stopped"
    if not board.samples:
        return "waiting"
    empty = replicas(board).count(0)
    if not empty:
        return "training"
    return "asleep" if len(sleepers(board)) == empty else "broken"


def run(board: Board, run_id: str, join: Sequence[str], version: str) -> Json:
    """The facts of the run that do not change while the coordinator runs."""
    manifest = board.manifest
    return {
        "run_id": run_id,
        "name": manifest.name,
        "stages": manifest.pipeline.stages,
        "context": manifest.model.context,
        "parameters": sum(board.parameters),
        "stage_parameters": list(board.parameters),
        "layers": manifest.model.layers,
        "width": manifest.model.width,
        "round_samples": manifest.gossip.round_samples,
        "ends": target_of(manifest),
        "method": manifest.gossip.method,
        "codec": manifest.gossip.codec,
        "data": manifest.data.source,
        "about": dataclasses.asdict(manifest.about),
        "join": list(join),
        "version": version,
    }


def replicas(board: Board) -> list[int]:
    """The number of nodes that serve each stage. Nodes that do not answer do not count."""
    counts = [0] * board.manifest.pipeline.stages
    for node in board.nodes.values():
        if node.serving and node.failures < SILENT_AFTER and node.stage < len(counts):
            counts[node.stage] += 1
    return counts


def sleepers(board: Board) -> list[tuple[int, NodeView]]:
    """The stages that nobody serves now but a paused node holds, each with the one that comes back first."""
    first = dict[int, NodeView]()
    for node in board.nodes.values():
        if node.asleep and node.stage < board.manifest.pipeline.stages:
            known = first.setdefault(node.stage, node)
            first[node.stage] = min(known, node, key=lambda one: (one.resumes_s or math.inf, one.peer))
    return [(stage, first[stage]) for stage, serving in enumerate(replicas(board)) if not serving and stage in first]


def links(board: Board) -> list[Json]:
    """Links between living nodes, busiest first. Each appears once, as counted by the end with more bytes."""
    rows: dict[tuple[PeerId, PeerId], Json] = {}
    for node in board.living():
        for link in node.links:
            other = PeerId(link.peer_id)
            if other not in board.nodes or other == node.peer or not board.nodes[other].living:
                continue
            pair = (node.peer, other) if node.peer < other else (other, node.peer)
            forth = link.sent_nbytes
            back = link.received_nbytes
            total = forth + back
            kept = rows.get(pair)
            if kept is not None and kept["nbytes"] >= total:  # type: ignore[operator]
                if kept["latency_ms"] is None and link.latency_s > 0:
                    kept["latency_ms"] = round(1000 * link.latency_s, 2)
                continue
            latency = round(1000 * link.latency_s, 2) if link.latency_s > 0 else (kept or {}).get("latency_ms")
            rows[pair] = {
                "a": pair[0],
                "b": pair[1],
                "nbytes": total,
                "a_to_b": forth if pair[0] == node.peer else back,
                "latency_ms": latency,
                "kind": LINK_KINDS.get(link.kind, "unknown"),
            }
    return sorted(rows.values(), key=lambda row: (-row["nbytes"], row["a"], row["b"]))[:LINKS_SHOWN_MAX]  # type: ignore[operator]


def contributors(board: Board) -> list[Json]:
    """All nodes that ever took part, sorted by samples in receipts, then by claimed work."""
    members = board.contributions
    rows = [(told, board.ledger.total(peer, members), peer) for peer, told in members.items()]
    rows.sort(key=lambda row: (-row[1].samples if row[1] else 0, -row[0].total("worked_s"), row[2]))
    return [told.to_json(peer, thanks) for told, thanks, peer in rows]


def receipts(board: Board, peer: PeerId) -> Json:
    """The receipts that `peer` has shown, in the form of `swarmnode receipts --json`, so that anyone can check the
    signatures. `counts`: whether the client took part itself."""
    shown = board.ledger.of(peer)
    rows = [{**receipt_to_json(one), "counts": one.client in board.contributions} for one in shown]
    return {"receipts": sorted(rows, key=lambda row: (-row["samples"], row["client"], row["from_unix_s"]))}  # type: ignore[operator]


def recent_rounds(board: Board) -> list[Json]:
    """The last ROUNDS_SHOWN rounds, oldest first."""
    return [board.rounds[index].to_json() for index in sorted(board.rounds)[-ROUNDS_SHOWN:]]


def series(points: Sequence[HistoryPoint], most: int) -> list[list[object]]:
    """About `most` of `points`, evenly thinned, always with the last. `HistoryPoint.to_json` lists the columns."""
    step = max(1, -(-len(points) // max(1, most)))
    kept = list(points[::step])
    if points and kept[-1] is not points[-1]:
        kept.append(points[-1])
    return [point.to_json() for point in kept]


def validation_series(board: Board) -> list[list[object]]:
    """[samples, t, nats per token] of every measurement, oldest first."""
    return [[samples, round(t, 1), rounded(loss)] for samples, (t, loss) in sorted(board.validations.items())]


def node_detail(board: Board, node: NodeView, now_s: float, *, private: bool) -> Json:
    """Everything known of one node. Addresses are left out on a public page (`private` False)."""
    status = node.status
    contribution = board.contributions.get(node.peer)
    return {
        **node_row(node),
        "answered_s_ago": round(now_s - node.answered_s, 1) if node.answered_s else None,
        "heard_s_ago": round(now_s - node.heard_s, 1),
        "addresses": list(node.addresses) if private else [],
        "gone_why": node.gone_why,
        "up_s": 0.0 if status is None else round(status.uptime_s, 1),
        "tokens_per_s": 0.0 if status is None else round(status.tokens_per_second, 1),
        "standing": standing(board, node.peer),
        "waits": [] if status is None else [f"{wait.says}. What helps: {wait.can_do}." for wait in status.waits],
        "counters": {} if status is None else {key: rounded(value) for key, value in sorted(status.counters.items())},
        "links": links_of(node, board),
        "entries": [entry.to_json() for entry in reversed(board.timeline) if entry.peer == node.peer][:100],
        "contribution": None
        if contribution is None
        else contribution.to_json(node.peer, board.ledger.total(node.peer, board.contributions)),
    }


def standing(board: Board, peer: PeerId) -> Json:
    """The place of `peer` among those who gave, by samples that others signed for; and what they signed each day."""
    totals = ((each, board.ledger.total(each, board.contributions)) for each in board.contributions)
    signed = {each: total.samples for each, total in totals if total is not None}
    own = signed.get(peer, 0)
    return {
        "rank": 1 + sum(samples > own for samples in signed.values()) if own else None,
        "of": len(signed),
        "share": rounded(own / sum(signed.values())) if own else 0.0,
        "days": sorted([day, samples] for (server, day), samples in board.ledger.days.items() if server == peer),
    }


def links_of(node: NodeView, board: Board) -> list[Json]:
    """The links in the report of `node`, in its order: busiest first."""
    rows: list[Json] = []
    for link in node.links:
        other = board.nodes.get(PeerId(link.peer_id))
        rows.append(
            {
                "peer": link.peer_id,
                "name": other.label if other is not None else "",
                "stage": other.stage if other is not None else None,
                "sent": link.sent_nbytes,
                "received": link.received_nbytes,
                "latency_ms": round(1000 * link.latency_s, 2) if link.latency_s > 0 else None,
                "kind": LINK_KINDS.get(link.kind, "unknown"),
            }
        )
    return rows


def health(board: Board, points: Sequence[HistoryPoint], now_s: float) -> Health:
    """The frozen input of the alarms."""
    answering = [node for node in board.living() if node.failures < SILENT_AFTER]
    told = [node for node in answering if node.serving and node.links]
    if len(told) < ISLANDS_SHARE * sum(node.serving for node in answering):
        told = []
    pairs = ((node.peer, PeerId(link.peer_id)) for node in told for link in node.links)
    label = {node.peer: node.label for node in told}
    rounds = [board.rounds[index] for index in sorted(board.rounds)]
    return Health(
        replicas=replicas(board),
        asleep={stage: _until(node, now_s) for stage, node in sleepers(board)},
        versions=[node.version for node in answering],
        texts=[(node.label, node.text) for node in board.living() if node.text],
        skews_s=[(node.label, node.skew_s) for node in answering if node.skew_s is not None],
        silent=sorted(node.label for node in board.living() if node.failures >= SILENT_AFTER),
        groups=[sorted(label[peer] for peer in group) for group in parties(pairs, label)],
        losses=[point.train for point in points[-64:] if point.train is not None],
        stalled_s=now_s - board.grew_s if board.grew_s else 0.0,
        stall_s=board.manifest.limits.microbatch_timeout_s,
        rounds=[(at.paired, at.lone) for at in rounds[-8:]],
        trained=board.samples > 0 and phase(board, now_s) != "looking",
        living=len(board.living()),
        slowness=_slowness(board, now_s),
        forked=[line for line in board.amendments(0) if line.startswith(ALARM)],
    )


def _until(node: NodeView, now_s: float) -> str:
    """Until when `node` sleeps, and its name: "until 22:00 with brave-otter"."""
    until = f"until {local_time(node.resumes_s - now_s)} " if node.resumes_s > now_s else ""
    return f"{until}with {node.label}"


def _slowness(board: Board, now_s: float) -> tuple[str, str] | None:
    """By the announced speeds of nodes; None until they serve, and the board watches, for long enough to measure."""
    serving = [node for node in board.living() if node.serving and node.stage < board.manifest.pipeline.stages]
    if now_s - max([board.began_s, *(node.joined_s for node in serving)]) < SETTLED_S:
        return None
    here = sum(bool(node.addresses) and all(a.startswith(LOOPBACK) for a in node.addresses) for node in serving)
    at_once = len(serving) - here + min(here, processors())
    speeds = [(node.stage, node.speed) for node in serving]
    return slowness(board.manifest, speeds, board.samples_per_s(), at_once)


def rounded(value: float | None) -> float | None:
    """Round to six significant digits. None for values that JSON cannot hold."""
    if value is None or value != value or abs(value) == float("inf"):
        return None
    return float(f"{value:.6g}")


def timeline(board: Board) -> list[Json]:
    """The latest entries of the timeline, newest first."""
    return [entry.to_json() for entry in reversed(board.timeline)]

"""Slow links and a partition in network namespaces: `unshare ... python wan_lab.py FOLDER`, as nat_lab.py.

Four nodes of two stages, each behind its own 20 Mbit/s link. The network is cut in two halves that hold both stages:
each trains on by itself. When the cut heals, the halves are one swarm again: replicas of the two sides pair. Prints
one JSON object: what was seen.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nat_lab import events, host, said, sh, start, wait  # type: ignore[import-not-found]

RATE = "20mbit"
HALVES = (("boot", "a", "c"), ("b", "d"))
STAGES = {"a": 0, "b": 0, "c": 1, "d": 1}
INDEX = {"boot": 1, "a": 2, "b": 3, "c": 4, "d": 5}
ACROSS = (("a", "b"), ("c", "d"))  # replicas of a stage, on the two sides
PARTITIONED_ROUNDS = 4  # that each side must end on its own
UNDER_WAY = 2  # rounds whose packets may be there when the network is cut: this one's, and an early partner's


def cut() -> None:
    """No packet goes from one half to the other; connections are not closed, they fall silent."""
    left, right = (", ".join(f"81.0.{INDEX[name]}.0/24" for name in half) for half in HALVES)
    sh(
        "nft -f -",
        f"""
table ip cut {{
  chain forward {{
    type filter hook forward priority 0
    ip saddr {{ {left} }} ip daddr {{ {right} }} drop
    ip saddr {{ {right} }} ip daddr {{ {left} }} drop
  }}
}}
""",
    )


def rounds(home: Path, after: int) -> list[dict[str, Any]]:
    """The exchanges a node logged after its first `after` events."""
    return [line for line in events(home)[after:] if line["event"] in ("exchange.paired", "exchange.lone")]


def paired(folder: Path, name: str, others: Sequence[str], after: int, under_way: int = 0) -> bool:
    """Whether `name` averaged with one of `others` after its first `after` events, but for the first `under_way` rounds
    after these."""
    peers = {json.loads((folder / other / "ready.json").read_text())["peer_id"] for other in others}
    logged = rounds(folder / name, after)[under_way:]
    return any(e["event"] == "exchange.paired" and e["fields"]["peer"] in peers for e in logged)


def main(folder: Path) -> None:
    sh("mount -t tmpfs tmpfs /run")
    sh("sysctl -qw net.ipv4.ip_forward=1")
    sh("ip link set lo up")
    for name, index in INDEX.items():
        host(index, name)
        sh(f"ip netns exec {name} tc qdisc add dev eth0 root tbf rate {RATE} burst 32kb latency 60ms")
        sh(f"tc qdisc add dev c{index} root tbf rate {RATE} burst 32kb latency 60ms")
    run = folder / "run"
    processes = [start("boot", folder, "bootstrap", str(run), "--listen", "/ip4/81.0.1.2/tcp/4001")]
    ready = folder / "boot" / "ready.json"
    address = wait(lambda: ready.exists() and json.loads(ready.read_text())["addresses"], "the bootstrap", folder)[0]
    common = ["--run", str(run / "manifest.signed"), "--cache", str(folder / "cache")]
    for name, stage in STAGES.items():
        listen = ["--listen", f"/ip4/81.0.{INDEX[name]}.2/tcp/4001", "--stage", str(stage)]
        processes.append(start(name, folder, "join", address, *common, *listen))
    for name in STAGES:
        wait(lambda name=name: said(folder / name, "node.ready"), f"{name} serves", folder)
    for name, other in ACROSS:
        wait(lambda name=name, other=other: paired(folder, name, [other], 0), f"{name} pairs with {other}", folder)

    cut()
    began = time.monotonic()
    marks = {name: len(events(folder / name)) for name in STAGES}
    for name in STAGES:
        wait(
            lambda name=name: (
                sum(e["fields"]["delta_norm"] > 0 for e in rounds(folder / name, marks[name])) >= PARTITIONED_ROUNDS
            ),
            f"{name} trains on in its half",
            folder,
        )
    cut_s = time.monotonic() - began
    across = [
        (name, other)
        for name, other in ACROSS
        if paired(folder, name, [other], marks[name], UNDER_WAY)
        or paired(folder, other, [name], marks[other], UNDER_WAY)
    ]

    sh("nft delete table ip cut")
    began = time.monotonic()
    marks = {name: len(events(folder / name)) for name in STAGES}
    for name, other in ACROSS:
        wait(
            lambda name=name, other=other: paired(folder, name, [other], marks[name]),
            f"{name} pairs with {other} again",
            folder,
        )
    lost = [name for name in STAGES for e in events(folder / name) if e["event"] == "node.left"]
    healed_s = time.monotonic() - began
    print(json.dumps({"cut_s": round(cut_s, 1), "healed_s": round(healed_s, 1), "across": across, "lost": lost}))
    for process in processes:
        process.kill()


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main(Path(sys.argv[1]))

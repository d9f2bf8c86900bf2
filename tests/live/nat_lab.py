"""A little internet in network namespaces: `unshare -Urnmpf --kill-child --mount-proc python nat_lab.py FOLDER`.

The namespace it starts in is the internet's core. A public bootstrap; two nodes behind NATs that let nothing in; one
behind a NAT with an open port, as a cloud's address or a router's port forwarding. Everything dies with this process.
Public-looking addresses: libp2p takes no relay at a private one. Over iroh, which has no relay here, one of the two has
an open port as well. Prints one JSON object: what the nodes said.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BOUND_S = 200.0
CANNOT = 77  # this kernel or machine does not allow it; stderr says what


def sh(command: str, text: str | None = None) -> None:
    done = subprocess.run(command.split(), input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{command}: {done.stderr.strip() or done.returncode}", file=sys.stderr)
        sys.exit(CANNOT)


def host(index: int, name: str) -> None:
    """Namespace `name` at 81.0.INDEX.2, its router the core."""
    sh(f"ip netns add {name}")
    sh(f"ip link add c{index} type veth peer name eth0 netns {name}")
    sh(f"ip addr add 81.0.{index}.1/24 dev c{index}")
    sh(f"ip link set c{index} up")
    for command in (f"addr add 81.0.{index}.2/24 dev eth0", "link set eth0 up", "link set lo up"):
        sh(f"ip -n {name} {command}")
    sh(f"ip -n {name} route add default via 81.0.{index}.1")


def behind_nat(index: int, name: str, port: int | None = None, protocol: str = "tcp") -> None:
    """Namespace `name` at 192.168.INDEX.2 behind a NAT; with `port`, the NAT hands that port of `protocol` in."""
    gate = f"{name}-gate"
    host(index, gate)
    sh(f"ip netns add {name}")
    sh(f"ip -n {gate} link add lan type veth peer name eth0 netns {name}")
    sh(f"ip -n {gate} addr add 192.168.{index}.1/24 dev lan")
    sh(f"ip -n {gate} link set lan up")
    for command in (f"addr add 192.168.{index}.2/24 dev eth0", "link set eth0 up", "link set lo up"):
        sh(f"ip -n {name} {command}")
    sh(f"ip -n {name} route add default via 192.168.{index}.1")
    sh(f"ip netns exec {gate} sysctl -qw net.ipv4.ip_forward=1")
    let_in = f"iifname eth0 {protocol} dport {port} dnat to 192.168.{index}.2" if port else ""
    forward = f"iifname eth0 {protocol} dport {port} accept" if port else ""
    rules = f"""
table ip nat {{
  chain in {{
    type nat hook prerouting priority -100
    {let_in}
  }}
  chain out {{
    type nat hook postrouting priority 100
    oifname eth0 masquerade
  }}
}}
table ip filter {{
  chain forward {{
    type filter hook forward priority 0
    ct state established,related accept
    {forward}
    iifname eth0 drop
  }}
  chain input {{
    type filter hook input priority 0
    ct state established,related accept
    iifname eth0 drop
  }}
}}
"""
    sh(f"ip netns exec {gate} nft -f -", rules)


def start(namespace: str, folder: Path, *words: str) -> subprocess.Popen[bytes]:
    home = folder / namespace
    home.mkdir()
    command = [
        "ip",
        "netns",
        "exec",
        namespace,
        sys.executable,
        "-m",
        "swarmnode.app.cli.main",
        *words,
        "--home",
        str(home),
    ]
    with (home / "stderr").open("wb") as errors:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)


def events(home: Path) -> list[dict[str, Any]]:
    path = home / "events.jsonl"
    whole = path.read_text().split("\n")[:-1] if path.exists() else []  # the last line may be half written
    return [json.loads(line) for line in whole]


def wait(condition: Any, what: str, folder: Path) -> Any:
    end = time.monotonic() + BOUND_S
    while not (found := condition()):
        if time.monotonic() > end:
            for log in sorted(folder.glob("*/stderr")):
                print(f"== {log}\n{log.read_text()[-1500:]}", file=sys.stderr)
            sys.exit(f"not within {BOUND_S:g} s: {what}")
        time.sleep(0.2)
    return found


def said(home: Path, event: str) -> dict[str, Any] | None:
    return next((line["fields"] for line in events(home) if line["event"] == event), None)


def has_trained(home: Path) -> bool:
    """Whether the node came to a round with weights of its own making."""
    return any(
        line["event"].startswith("exchange.") and line["fields"].get("delta_norm", 0) > 0 for line in events(home)
    )


def main(folder: Path) -> None:
    sh("mount -t tmpfs tmpfs /run")
    sh("sysctl -qw net.ipv4.ip_forward=1")
    sh("ip link set lo up")
    host(1, "boot")
    run = folder / "run"
    iroh = 'kind = "iroh"' in (run / "manifest.toml").read_text()
    protocol = "udp" if iroh else "tcp"
    behind_nat(2, "alice", 4001 if iroh else None, protocol)
    behind_nat(3, "bob")
    behind_nat(4, "carol", 4001, protocol)
    processes = [start("boot", folder, "bootstrap", str(run), "--listen", f"/ip4/81.0.1.2/{protocol}/4001")]
    ready = folder / "boot" / "ready.json"
    address = wait(lambda: ready.exists() and json.loads(ready.read_text())["addresses"], "the bootstrap", folder)[0]
    signed = str(run / "manifest.signed")
    cache = str(folder / "cache")
    join = ["join", address, "--run", signed, "--cache", cache, "--listen", f"/ip4/0.0.0.0/{protocol}/4001", "--stage"]
    processes += [start(name, folder, *join, stage) for name, stage in (("alice", "1"), ("bob", "2"), ("carol", "2"))]
    names = ["alice", "bob", "carol"]
    found = {
        name: wait(lambda name=name: said(folder / name, "node.reach"), f"{name}'s reach", folder) for name in names
    }
    if iroh:
        wait(processes[2].poll, "bob's end", folder)
        found["bob"]["says"] = (folder / "bob" / "stderr").read_text().splitlines()[-1]
        names = ["alice", "carol"]
    for name in names:
        wait(lambda name=name: said(folder / name, "node.ready"), f"{name} serves", folder)
    for name in names[1:]:  # only alice feeds, so what they train on has come through the NATs
        wait(lambda name=name: has_trained(folder / name), f"{name} trains", folder)
    records = {name: json.loads((folder / name / "ready.json").read_text())["addresses"] for name in names}
    print(json.dumps({"reach": found, "addresses": records}))
    for process in processes:
        process.kill()


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main(Path(sys.argv[1]))

"""Which published advisories p2pd is open to, by the modules that it says it is made of: the source of docs/p2pd.md.

    git clone --depth 1 https://github.com/golang/vulndb
    python deploy/advisories.py vulndb

p2pd is packed, so its list of modules is read from the memory of a running one (Linux). Whether an advisory's code can
be reached in p2pd is a question for people.
"""

from __future__ import annotations

import json
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hivemind import hivemind_cli

BINARY = Path(hivemind_cli.__file__).with_name("p2pd")
START_MAX_S = 20.0
REGION_BYTES_MAX = 256 << 20
GO = re.compile(rb"go(1\.[0-9]+(?:\.[0-9]+)?)")
DEPENDENCY = re.compile(rb"dep\t([\w./-]{3,120})\t(v[\w.+-]{3,60})\t")


def modules() -> dict[str, str]:
    """Go modules of p2pd and their versions; "stdlib" is the compiler's."""
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        command = [str(BINARY), "-listen", f"/unix{folder}/p2pd", "-hostAddrs", "/ip4/127.0.0.1/tcp/0"]
        p2pd = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_for(Path(folder) / "p2pd")
            for data in memory(p2pd.pid):
                found |= {name.decode(): version.decode() for name, version in DEPENDENCY.findall(data)}
        finally:
            p2pd.terminate()
            p2pd.wait()
    compiler = GO.search(BINARY.read_bytes())
    return found | ({"stdlib": compiler[1].decode()} if compiler else {})


def wait_for(socket: Path) -> None:
    """Until p2pd has unpacked itself and listens."""
    end = time.perf_counter() + START_MAX_S
    while not socket.exists():
        if time.perf_counter() > end:
            raise SystemExit(f"p2pd does not start within {START_MAX_S:g} s")
        select.select([], [], [], 0.05)


def memory(pid: int) -> Iterator[bytes]:
    """What a process can read of itself."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, rights = line.split()[:2]
        start, end = (int(text, 16) for text in span.split("-"))
        if "r" in rights and end - start < REGION_BYTES_MAX:
            try:
                with open(f"/proc/{pid}/mem", "rb") as file:
                    file.seek(start)
                    yield file.read(end - start)
            except OSError:  # the kernel's own pages
                continue


def key(version: str) -> tuple[int, int, int, bool, str]:
    """Orders versions as Go does, well enough for these."""
    base, _, before = version.removeprefix("v").partition("-")
    numbers = [int(part) if part.isdigit() else 0 for part in base.split(".")] + [0, 0, 0]
    return numbers[0], numbers[1], numbers[2], not before, before


def is_open(version: str, affected: dict[str, Any]) -> bool:
    """Whether `version` lies in a range of an OSV entry's `affected`."""
    for span in affected.get("ranges", ()):
        inside = False
        for event in span["events"]:
            if "introduced" in event:
                inside |= event["introduced"] == "0" or key(event["introduced"]) <= key(version)
            elif "fixed" in event and key(event["fixed"]) <= key(version):
                inside = False
        if inside:
            return True
    return False


def main(folder: Path) -> None:
    """Print module, id, aliases, summary and packages of each."""
    here = modules()
    for path in sorted((folder / "data" / "osv").glob("*.json")):
        entry = json.loads(path.read_text())
        for affected in entry.get("affected", ()) if not entry.get("withdrawn") else ():
            name = affected["package"]["name"]
            if name in here and is_open(here[name], affected):
                packages = [each["path"] for each in affected.get("ecosystem_specific", {}).get("imports", ())]
                aliases = " ".join(entry.get("aliases", ()))
                fields = (f"{name} {here[name]}", entry["id"], aliases, entry.get("summary", ""), " ".join(packages))
                sys.stdout.write("  ".join(fields) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

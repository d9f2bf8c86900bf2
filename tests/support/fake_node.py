"""Stands in for a node process in the tests of `up`: real control socket, real files, no training.

    fake_node.py join|bootstrap ... --home HOME [--stage S] [--name N]      as `swarmnode join` is called

FAKE in the environment: "crash" ends node-01 while it starts, "crash-later" ends it in training, "unable-later" too, as
what cannot work here, "deaf" makes node-01 ignore every wish to end it, "helper" starts a grandchild that outlives its
parent unless it is killed.
"""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

from swarmnode.app.control.service import ControlServer
from swarmnode.app.daemon import ready_file
from swarmnode.app.daemon.ready_file import Ready
from swarmnode.base.metrics import name
from swarmnode.base.wire.record_pb2 import NODE_STATE_LEFT, NODE_STATE_TRAINING
from swarmnode.base.wire.report_pb2 import StatusReply


def option(flag: str, default: str = "") -> str:
    return sys.argv[sys.argv.index(flag) + 1] if flag in sys.argv else default


class FakeNode:
    """Each status asked for is one step of progress, so that nothing depends on how fast the machine is."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.name = option("--name")
        self.stage = int(option("--stage", "1")) - 1
        self.asked = 0
        self.all_here = 0  # times asked since
        self.stop = asyncio.Event()

    @property
    def mode(self) -> str:
        return os.environ.get("FAKE", "") if self.name == "node-01" else ""

    def status(self) -> StatusReply:
        self.asked += 1
        # Only once all have started, whoever is slow to: bootstrap and two nodes leave a file when they can be reached.
        self.all_here += len(list(self.home.parent.glob("*/argv.json"))) == 3
        if self.mode == "unable-later" and self.all_here > 2:
            sys.stderr.write("swarmnode: data.paths: train.txt of node-01 is gone\n")
            sys.stderr.flush()
            os._exit(78)
        if self.mode == "crash-later" and self.all_here > 2:
            sys.stderr.write("a terrible thing\nswarmnode: the disk of node-01 is full\n")
            sys.stderr.flush()
            os._exit(70)
        steps = self.asked
        return StatusReply(
            run_id="ab" * 32,
            peer_id=f"peer-{self.name}",
            stage=self.stage,
            stages=2,
            state=NODE_STATE_LEFT if self.stop.is_set() else NODE_STATE_TRAINING,
            samples_total=32 * steps,
            tokens_total=4096 * steps,
            round=steps // 2,
            inner_steps=steps,
            loss_train=5.0 / steps,
            loss_validation=5.5 / steps,
            loss_validation_first=5.5,
            loss_validation_samples=32.0 * steps,
            counters={
                name.series(name.MICROBATCHES, outcome="done"): 4.0,
                name.series(name.EXCHANGES, outcome="paired"): 1.0,
                name.series(name.LINK_BYTES, kind="pipeline", direction="sent"): 1000.0,
                name.series(name.LINK_BYTES, kind="pipeline", direction="received"): 1000.0,
            },
        )

    def leave(self, reason: str, checkpoint: str = "", stopping: bool = False) -> None:
        if self.mode != "deaf" and not self.stop.is_set():
            (self.home / "asked").write_text(str(time.monotonic_ns()))
            self.stop.set()

    async def run(self) -> int:
        if self.mode == "crash":
            sys.stderr.write("swarmnode: no memory for node-01\n")
            return 70
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.leave, "SIGTERM")
        if os.environ.get("FAKE") == "helper":
            helper = await asyncio.create_subprocess_exec("sleep", "1000")
            (self.home / "helper.pid").write_text(str(helper.pid))
        server = ControlServer(self.home, self)  # type: ignore[arg-type]
        control = await server.start()
        address = f"/ip4/127.0.0.1/tcp/1/p2p/12D3KooW{self.name.replace('-0', 'x')}AAAAAAAAAAAA"
        ready_file.write(self.home, Ready(os.getpid(), "ab" * 32, self.name, (address,), "127.0.0.1:1", str(control)))
        (self.home / "argv.json").write_text(json.dumps(sys.argv[1:]))
        await self.stop.wait()
        await server.stop()
        ready_file.clear(self.home)
        (self.home / "left").write_text(str(time.monotonic_ns()))
        return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(FakeNode(Path(option("--home"))).run()))

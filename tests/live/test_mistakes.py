"""Mistakes against a live bootstrap: one clear line, the right exit code, no traceback, and the swarm goes on."""

import asyncio
import socket
from dataclasses import replace
from pathlib import Path

from swarmnode import manifest as manifests
from swarmnode.local.child import Child, NodePlan, node_command
from swarmnode.manifest import PRESETS, SIGNED_FILE, DataSpec, ModelSpec
from tests.support.processes import BOUND_S, said

OTHER_RUN = "ab" * 32
NOBODY = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWNjStcekxZuKJtEW2TaSTxnK55TAvdxvzrt8w5mRGsHdq"


def corrupt_text_run(folder: Path) -> Path:
    """A run whose training text is garbage."""
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "train.txt").write_bytes(b"no letters \xff\xfe" * 100)
    run = replace(PRESETS["tiny"], data=DataSpec(source="text", paths=("data",)))
    manifests.init(folder, run)
    manifests.sign_folder(folder)
    return folder / SIGNED_FILE


def giant_run(folder: Path) -> Path:
    """A valid run of which no machine has memory for a stage."""
    model = ModelSpec(layers=2, width=1 << 16, heads=512, kv_heads=512, ffn=1 << 18, vocabulary=256)
    folder.mkdir()
    manifests.init(folder, replace(PRESETS["tiny"], model=model))
    manifests.sign_folder(folder)
    return folder / SIGNED_FILE


async def test_mistakes_are_answered_in_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    manifests.init(folder, PRESETS["tiny"])
    manifests.sign_folder(folder)
    signed = folder / SIGNED_FILE
    forged = tmp_path / "forged.signed"
    raw = bytearray(signed.read_bytes())
    raw[raw.index(b"alpha") + 8] ^= 1
    forged.write_bytes(bytes(raw))
    shards = corrupt_text_run(tmp_path / "garbage")
    giant = giant_run(tmp_path / "giant")

    async def body() -> dict[str, tuple[int, str]]:
        plan = NodePlan("bootstrap", tmp_path / "boot", signed, tmp_path / "cache", bootstrap=True)
        bootstrap = await Child.start(plan, node_command(plan))
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = str(taken.getsockname()[1])
            try:
                async with asyncio.timeout(BOUND_S):
                    while bootstrap.ready is None:
                        await bootstrap.poll()
                        assert bootstrap.alive, "the bootstrap ended"
                        await asyncio.sleep(0.1)
                here = bootstrap.ready.addresses[0]

                def join(name: str, *arguments: str) -> list[str]:
                    return ["join", *arguments, "--home", str(tmp_path / name), "--listen", "/ip4/127.0.0.1/tcp/0"]

                cases = {
                    "unreachable": join("a", NOBODY, "--run", str(signed)),
                    "wrong run id": join("b", here, "--run", OTHER_RUN),
                    "forged manifest": join("c", here, "--run", str(forged)),
                    "metrics port taken": [*join("d", here, "--run", str(signed)), "--metrics-port", port],
                    "listen port taken": [*join("e", here, "--run", str(signed))[:-1], f"/ip4/127.0.0.1/tcp/{port}"],
                    "corrupt text": [
                        *join("f", here, "--run", str(shards)),
                        "--stage",
                        "0",
                        "--data-root",
                        str(shards.parent),
                    ],
                    "files of a stranger": [*join("i", here, "--run", str(shards)), "--stage", "0"],
                    "more than there is": join("j", here, "--run", str(giant)),
                    "no such stage": [*join("g", here, "--run", str(signed)), "--stage", "7"],
                }
                results = await asyncio.gather(*(said(*case) for case in cases.values()))
                await bootstrap.poll()
                assert bootstrap.alive, "the bootstrap goes on"
                return dict(zip(cases, results, strict=True))
            finally:
                await bootstrap.leave("the test is over")
                if not await bootstrap.wait(BOUND_S):
                    bootstrap.kill()
                    await bootstrap.wait(BOUND_S)

    found = await body()
    expected = {
        "unreachable": (21, "no bootstrap answers"),
        "wrong run id": (21, "is the run id right"),
        "forged manifest": (78, "signature"),
        "metrics port taken": (2, "--metrics-port"),
        "listen port taken": (2, "in use"),
        "corrupt text": (78, "not UTF-8"),
        "files of a stranger": (77, "--data-root"),
        "more than there is": (20, "bytes) are free"),
        "no such stage": (2, "stage"),
    }
    for name, (code, words) in expected.items():
        got, error = found[name]
        lines = [line for line in error.splitlines() if line.startswith("swarmnode:")]
        assert "Traceback" not in error, f"{name}: {error}"
        assert len(lines) == 1, f"{name}: {error}"
        assert (got, words in lines[0]) == (code, True), f"{name}: exit {got}: {error}"
    assert "node.s" not in (tmp_path / "f" / "events.jsonl").read_text(), "neither started nor of any state to others"

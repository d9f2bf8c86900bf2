"""Mistakes against a live bootstrap: one clear line, the right exit code, no traceback, and the swarm goes on."""

import asyncio
import socket
from dataclasses import replace
from pathlib import Path

from swarmnode.app.local.child import Child
from swarmnode.run.manifest import DataSpec, ModelSpec
from swarmnode.run.manifest.recipe import PRESETS
from tests.support.processes import HERE, bootstrap, end, said, signed_run

TINY = PRESETS["tiny"]
OTHER_RUN = "ab" * 32
NOBODY = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWNjStcekxZuKJtEW2TaSTxnK55TAvdxvzrt8w5mRGsHdq"
GIANT = ModelSpec(layers=2, width=1 << 16, heads=512, kv_heads=512, ffn=1 << 18, vocabulary=256)


async def test_mistakes_are_answered_in_one_line(tmp_path: Path) -> None:
    signed = signed_run(tmp_path / "run")
    giant = signed_run(tmp_path / "giant", replace(TINY, model=GIANT))
    forged = tmp_path / "forged.signed"
    raw = bytearray(signed.read_bytes())
    raw[raw.index(b"alpha") + 8] ^= 1
    forged.write_bytes(bytes(raw))
    garbage = tmp_path / "garbage"
    garbage.mkdir()
    (garbage / "tokenizer.json").write_bytes(b"no letters \xff\xfe" * 100)
    text = signed_run(garbage, replace(TINY, data=DataSpec(tokenizer="tokenizer.json")))
    children = list[Child]()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        try:
            here, *_ = await bootstrap(children, tmp_path / "boot", signed)
            cases: dict[str, tuple[list[object], int, str]] = {
                "unreachable": ([NOBODY, "--run", signed, *HERE], 21, "no meeting point answers"),
                "wrong run id": ([here, "--run", OTHER_RUN, *HERE], 21, "is the run id right"),
                "forged manifest": ([here, "--run", forged, *HERE], 78, "signature"),
                "metrics port": ([here, "--run", signed, "--metrics-port", port, *HERE], 2, "--metrics-port"),
                "listen port": ([here, "--run", signed, "--listen", f"/ip4/127.0.0.1/tcp/{port}"], 2, "in use"),
                "corrupt tokenizer": (
                    [here, "--run", text, "--stage", 1, "--data-root", garbage, *HERE],
                    78,
                    "not a Hugging Face tokenizer.json",
                ),
                "files of a stranger": ([here, "--run", text, "--stage", 1, *HERE], 77, "--data-root"),
                "more than there is": ([here, "--run", giant, *HERE], 20, "bytes) are free"),
                "no such stage": ([here, "--run", signed, "--stage", 7, *HERE], 2, "this run has stages 1-2"),
            }
            found = await asyncio.gather(
                *(said("join", *map(str, case), "--home", str(tmp_path / name)) for name, (case, *_) in cases.items())
            )
            await children[0].poll()
            assert children[0].alive, "the bootstrap goes on"
        finally:
            await end(children)
    for (name, (_, code, words)), (got, error) in zip(cases.items(), found, strict=True):
        lines = [line for line in error.splitlines() if line.startswith("swarmnode:")]
        assert "Traceback" not in error and len(lines) == 1, f"{name}: {error}"
        assert (got, words in lines[0]) == (code, True), f"{name}: exit {got}: {error}"
    log = (tmp_path / "corrupt tokenizer" / "events.jsonl").read_text()
    assert "node.s" not in log, "neither started nor of any state to others"

"""The cost of a data set for feeders and the organiser (`swarmnode bench data`).

A data set of random tokens lies behind a web server on loopback that gives 50 Mbit/s in all. One of four feeders draws
its blocks, with the coroutines of a node, and trains nothing: it takes tokens at a pace. Tokenising: `data make`
against the tokenizers library alone, on the same documents with the same tokenizer, one after the other in turns.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from benchmarks.memory_network import MemoryNetwork, MemoryTransport
from benchmarks.swarm.dashboard import SilentTelemetry
from swarmnode.data.blocks import BlockLedger
from swarmnode.data.chat_template import ChatTemplate
from swarmnode.data.chunk_store import ChunkCache
from swarmnode.data.demo_corpus import documents as demo_documents
from swarmnode.data.document_row import Reading
from swarmnode.data.document_source import find_work
from swarmnode.data.index import CHUNK_NBYTES, INDEX_FILE, Index, ShardEntry, Split, parse_index
from swarmnode.data.set_maker import BATCH_DOCUMENTS, HELD_OUT_CHUNK_TOKENS, Encoding, make_part
from swarmnode.data.tokens import HuggingFaceTokenizer
from swarmnode.identity import Identity
from swarmnode.ids import RunId, digest64
from swarmnode.manifest import DataSpec, Manifest, ModelSpec
from swarmnode.node.chunk_samples import ChunkSamples
from swarmnode.transfer.chunk_set import ChunkSources, data_set_of
from swarmnode.transport.throttle import RateThrottle
from swarmnode.transport.web import AddressRules, HttpRangeReader

LINE_BPS = 50e6
TOKENS_PER_S = 1e6  # of one feeder: two megabytes, a third of the line; a thousand CPUs take less
FEEDERS = 4
CONTEXT = 2048
VOCABULARY = 50_000
RUN = RunId("da" * 32)


def run(*, full: bool = False) -> dict[str, Any]:
    """{"feeder": ..., "tokenising": ...}; `full` with a set of 1 GB, else of 100 MB."""
    with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as folder:
        place = Path(folder)
        index = _random_set(place / "set", 240 if full else 24)
        feeder = asyncio.run(_feeder(index, place, 60.0 if full else 12.0))
        return {"feeder": feeder, "tokenising": _tokenising(place, 16 << 20 if full else 4 << 20, 3)}


def _random_set(folder: Path, chunks: int) -> Index:
    """A data set of random tokens, in shards of 64 chunks."""
    folder.mkdir()
    rng = np.random.default_rng(7)

    def split(name: str, count: int, tokens: int) -> Split:
        shards = []
        for number, first in enumerate(range(0, count, 64)):
            hashes, here = list[bytes](), min(64, count - first)
            with (folder / f"{name}-{number:05}.bin").open("wb") as file:
                for _ in range(here):
                    raw = rng.integers(0, VOCABULARY, tokens, dtype=np.uint16).astype("<u2").tobytes()
                    hashes.append(hashlib.sha256(raw).digest())
                    file.write(raw)
            shards.append(ShardEntry(f"{name}-{number:05}.bin", here * tokens, b"".join(hashes)))
        return Split(tokens, 1, tuple(shards))

    train = split("train", chunks, CHUNK_NBYTES // 2 + 1)
    made = Index(bytes(32), VOCABULARY, 0, False, train, split("validation", 1, HELD_OUT_CHUNK_TOKENS))
    (folder / INDEX_FILE).write_bytes(made.canonical())
    return parse_index(made.canonical())


@asynccontextmanager
async def _shaped_server(folder: Path) -> AsyncIterator[str]:
    """Ranges of the files in `folder`, at LINE_BPS for all requests together."""
    line = RateThrottle().up
    line.bps = LINE_BPS

    async def give(request: web.Request) -> web.StreamResponse:
        data = (folder / request.match_info["name"]).read_bytes()
        part = request.http_range if "Range" in request.headers else slice(0, len(data))
        first, last = part.start or 0, min(part.stop or len(data), len(data))
        answer = web.StreamResponse(status=206 if "Range" in request.headers else 200)
        answer.content_length = last - first
        if answer.status == 206:
            answer.headers["Content-Range"] = f"bytes {first}-{last - 1}/{len(data)}"
        await answer.prepare(request)
        for at in range(first, last, 64 << 10):
            piece = data[at : min(at + (64 << 10), last)]
            await line.spend(len(piece))
            await answer.write(piece)
        return answer

    application = web.Application()
    application.router.add_get("/{name}", give)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        server: Any = site._server
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        await runner.cleanup()


async def _feeder(index: Index, place: Path, seconds: float) -> dict[str, Any]:
    manifest = Manifest(
        model=ModelSpec(context=CONTEXT, vocabulary=VOCABULARY),
        data=DataSpec(source="index", index=index.digest.hex()),
    )
    loop, telemetry, throttle = asyncio.get_running_loop(), SilentTelemetry(), RateThrottle()
    reader = HttpRangeReader(AddressRules(private=True), throttle)
    me = Identity.of_seed(b"m" * 32).peer_id
    async with _shaped_server(place / "set") as url:
        transport = MemoryTransport(MemoryNetwork(), me, RUN)
        data = data_set_of(manifest, ChunkCache(place / "cache"), None, telemetry)
        data.fetch_from(ChunkSources(RUN, [url], reader, transport, telemetry, tuple, tuple))
        begun = loop.time()
        await data.open()
        samples = ChunkSamples(data, manifest)
        ledger = BlockLedger(me, manifest.seed, samples.span)
        feeders = [me, *(Identity.of_seed(bytes([n]) * 32).peer_id for n in range(1, FEEDERS))]
        block, _ = ledger.take(feeders)
        await samples.fetch(_samples(manifest, block))
        samples.train(_samples(manifest, block)[:8])
        first_s = loop.time() - begun
        drew, drawn, waited_s, used = asyncio.Event(), 0, 0.0, set[int]()
        fetching = asyncio.get_running_loop().create_task(samples.prefetch(lambda: ledger.coming(feeders), drew))
        begun = loop.time()
        while loop.time() - begun < seconds:
            numbers = _samples(manifest, block)
            if not samples.here(numbers):
                before = loop.time()
                await samples.fetch(numbers)
                waited_s += loop.time() - before
            used |= set(samples.chunks_of(numbers))
            drawn += samples.train(numbers).nbytes
            await asyncio.sleep(len(numbers) * CONTEXT / TOKENS_PER_S)
            ledger.finish(block)
            block, reason = ledger.take(feeders)
            if reason != "own":
                break  # the others have more to do than there is time
            drew.set()
        trained_s = loop.time() - begun
        fetching.cancel()
        await asyncio.gather(fetching, return_exceptions=True)
        await reader.close()
    whole = sum(index.chunk(number).nbytes for number in used)
    return {
        "set": f"{index.train.tokens * 2 / 1e9:.2f} GB in {index.count} chunks behind {LINE_BPS / 1e6:.0f} Mbit/s",
        "seconds to the first microbatch": round(first_s, 2),
        "of them its chunk takes at the line's rate": round(CHUNK_NBYTES * 8 / LINE_BPS, 2),
        "tokens a second": round(drawn / 2 / trained_s),
        "share of time waited for text": round(waited_s / trained_s, 4),
        "bytes of chunks drawn from, a byte of tokens drawn": round(whole / drawn, 3),
        "bytes fetched in all, with those ahead": throttle.down.total_nbytes,
        "bytes drawn": drawn,
    }


def _samples(manifest: Manifest, block: int) -> range:
    return range(block * manifest.data.block_samples, (block + 1) * manifest.data.block_samples)


def _tokenising(place: Path, nbytes: int, repeats: int) -> dict[str, Any]:
    import tokenizers

    texts = list(_texts(nbytes))
    source = place / "text"
    source.mkdir()
    for number, text in enumerate(texts):
        (source / f"{number:06}.txt").write_bytes(text)
    inner: Any = tokenizers.ByteLevelBPETokenizer()
    inner.train_from_iterator([text.decode(errors="replace") for text in texts[:64]], 4096, show_progress=False)
    encoding = Encoding(HuggingFaceTokenizer(inner._tokenizer, b"b" * 32), ChatTemplate())
    works = find_work([str(source)], Reading())
    total = sum(map(len, texts))
    wall, cpu = list[tuple[float, float]](), list[tuple[float, float]]()  # (ours, the library alone), seconds

    def make(repeat: int) -> None:
        for number, work in enumerate(works):
            make_part(place, f"part-{repeat}-{number}", work, Reading(), encoding, 0)

    def library(repeat: int) -> None:
        decoded = (text.decode(errors="replace") for text in texts)
        while batch := list(itertools.islice(decoded, BATCH_DOCUMENTS)):
            for one in inner._tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                assert one.ids

    for repeat in range(repeats):
        timed = [_timed(partial(work, repeat)) for work in (make, library)]
        wall.append((timed[0][0], timed[1][0]))
        cpu.append((timed[0][1], timed[1][1]))
    made, alone = (statistics.median(total / pair[at] / 1e6 for pair in wall) for at in (0, 1))
    return {
        "MB of text": round(total / 1e6, 1),
        "data make, MB/s": round(made, 2),
        "the library alone, MB/s": round(alone, 2),
        "ratio": round(statistics.median(other / ours for ours, other in wall), 3),
        "ratio of CPU seconds, which other load does not change": round(
            statistics.median(other / ours for ours, other in cpu), 3
        ),
    }


def _timed(work: Callable[[], None]) -> tuple[float, float]:
    """Seconds by the clock, and of CPU in all threads."""
    begun, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - begun, time.process_time() - used


def _texts(nbytes: int) -> Iterator[bytes]:
    """Documents of the demo corpus, again and again with another first line, until there are so many bytes."""
    given, total = list(demo_documents()), 0
    for turn in itertools.count():
        for name, text in given:
            if total >= nbytes:
                return
            made = f"# {turn} {digest64(turn, name)}\n".encode() + text
            total += len(made)
            yield made

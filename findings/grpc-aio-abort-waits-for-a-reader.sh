#!/usr/bin/env bash
# grpcio 1.85.1, Python: a server's `await context.abort(...)` does not end a stream whose client reads nothing.
#
# Guess: a server drops a slow reader by bounding `await context.write(message)` with a timeout and then calling
# `context.abort(RESOURCE_EXHAUSTED)`: the call is over at once, as a gRPC status has no flow control of its own.
# Seen: the status stands behind the message that flow control holds back. `abort` returns when the client has read it,
# and raises ExecuteBatchError when the client goes. Until then the coroutine, its locks and its place among
# `maximum_concurrent_rpcs` are held: free what the stream holds before you abort.
#
# Prints: "write timed out", "abort still waits after 3 s", "abort ended once the client read: AbortError".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check grpcio==1.85.1
GRPC_VERBOSITY=NONE "$folder/venv/bin/python" - "$folder/socket" <<'PYTHON'
import asyncio
import sys

import grpc
import grpc.aio

MESSAGE = bytes(1_000_000)  # more than a client that reads nothing has room for
said = []


async def stream(request, context):
    try:
        async with asyncio.timeout(1.0):
            for _ in range(100):
                await context.write(MESSAGE)
    except TimeoutError:
        said.append("write timed out")
    try:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too slow")
    except BaseException as error:
        said.append(type(error).__name__)
        raise


async def main(path):
    server = grpc.aio.server()
    handlers = {"Watch": grpc.unary_stream_rpc_method_handler(stream)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("x.Y", handlers),))
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        call = channel.unary_stream("/x.Y/Watch")(b"")
        await call.read()
        await asyncio.sleep(4.0)
        assert said == ["write timed out"], said
        print(said[0])
        print("abort still waits after 3 s")
        try:
            while await call.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error
        for _ in range(100):
            if len(said) > 1:
                break
            await asyncio.sleep(0.1)
        assert said[1:] == ["AbortError"], said
        print(f"abort ended once the client read: {said[1]}")
    await server.stop(None)


assert grpc.__version__ == "1.85.1", grpc.__version__
asyncio.run(main(sys.argv[1]))
PYTHON

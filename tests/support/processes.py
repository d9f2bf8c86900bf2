"""Commands and nodes as real processes."""

import asyncio
import re
import signal
import tempfile
from pathlib import Path

from swarmnode.app.local.child import Child, NodePlan, environment, node_command
from swarmnode.app.local.spawn import NODE, SPAWNER
from swarmnode.run.manifest import Manifest
from swarmnode.run.manifest.folder import SIGNED_FILE, init, sign_folder
from swarmnode.run.manifest.recipe import PRESETS

BOUND_S = 240.0  # for one condition, on a machine that others load
POLL_S = 0.25  # each look costs a node and the test some milliseconds
# All that a node says on stderr: nothing of asyncio, of gRPC, of Go's dials (tests/conftest.py looks at all logs).
OURS = re.compile(
    r"(peer|control|metrics|dashboard|joined by|left:|starts again:|paused:|waits:|stage (?:\d+|none)|"
    r"stages [\d, -]*\d (?:to|of)|none of \d+:|archive of|thank you:?|looking for|others join with|swarmnode:|"
    r"this machine|no archive is|--data-root:|the run keeps|one node each on) .*|"
    r".* holds a secret and others could read it .*|"
    r"a meeting point .*|"
    r"(loading|opening|checking|looking|asking|trying|measuring|making|choosing|estimating|simulating)( .*)? \.\.\."
)
HERE = ["--listen", "/ip4/127.0.0.1/tcp/0"]


def signed_run(folder: Path, run: Manifest = PRESETS["tiny"]) -> Path:
    """The signed manifest of a new run in `folder`, with its owner's key beside it."""
    init(folder, run)
    sign_folder(folder)
    return folder / SIGNED_FILE


async def bootstrap(children: list[Child], home: Path, signed: Path) -> tuple[str, ...]:
    """Start a bootstrap, one of `children`; where it is, once it is up."""
    plan = NodePlan("bootstrap", home, signed, home.parent / "cache", bootstrap=True)
    child = await Child.start(plan, node_command(plan))
    children.append(child)
    await until(children, lambda: child.ready is not None, "the bootstrap is up")
    assert child.ready is not None
    return tuple(child.ready.addresses)


async def ended(*arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `swarmnode ARGUMENTS`, forked where that can be: its imports are most of its time.
    tests/cli/test_starting.py shows that a forked process is like one of its own."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error:
        process = await SPAWNER.start([*NODE, *arguments], environment(), out, error)
        try:
            async with asyncio.timeout(BOUND_S):
                code = await process.wait()
        except BaseException:
            process.send_signal(signal.SIGKILL)
            raise
        out.seek(0)
        error.seek(0)
        return code, out.read().decode(), error.read().decode()


async def said(*arguments: str) -> tuple[int, str]:
    """(exit code, stderr) of `swarmnode ARGUMENTS`."""
    code, _, error = await ended(*arguments)
    return code, error


async def output_of(*arguments: str) -> str:
    """stdout of `swarmnode ARGUMENTS`, which must succeed."""
    code, out, error = await ended(*arguments)
    assert code == 0, error
    return out


async def output_of_piped(stdin: str, *arguments: str) -> str:
    """The same, with `stdin` for it to read, as a process of its own."""
    pipe = asyncio.subprocess.PIPE
    command = [*NODE, *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment())
    async with asyncio.timeout(BOUND_S):
        out, error = await process.communicate(stdin.encode())
    assert process.returncode == 0, error.decode()
    return out.decode()


async def until(children: list[Child], condition: object, what: str) -> None:
    assert callable(condition)
    try:
        async with asyncio.timeout(BOUND_S):
            while not condition():
                await asyncio.gather(*(child.poll() for child in children))
                assert all(child.alive for child in children), [
                    (child.name, (child.plan.home / "stderr.log").read_text()[-500:]) for child in children
                ]
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise AssertionError(f"not within {BOUND_S:g} s: {what}: {[child.status for child in children]}") from None


async def end(children: list[Child]) -> None:
    await asyncio.gather(*(child.leave("the test is over") for child in children))
    for child in children:
        if not await child.wait(BOUND_S):
            child.kill()
            await child.wait(BOUND_S)
        child.bury()


def worked(child: Child) -> bool:
    """Whether a microbatch of its was accepted: its gradient went into an inner step, or came back to the feeder."""
    return child.status is not None and (child.status.inner_steps > 0 or child.status.tokens_per_second > 0)

"""A run handed around as one line: strangers join with nothing else, and work."""

import asyncio
import json
import stat
from dataclasses import replace
from pathlib import Path

import psutil

from benchmarks.swarm.harness import LOAD
from swarmnode.app.local.child import Child, NodePlan
from swarmnode.app.local.spawn import NODE
from swarmnode.run.admission.access import grant_name
from swarmnode.run.admission.invite import decode
from swarmnode.run.manifest import AccessSpec
from swarmnode.run.manifest.recipe import PRESETS
from tests.support.processes import (
    BOUND_S,
    HERE,
    bootstrap,
    end,
    output_of,
    output_of_piped,
    said,
    signed_run,
    until,
    worked,
)


async def test_a_run_by_invitation(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    children = list[Child]()
    signed = signed_run(folder, replace(PRESETS["tiny"], access=AccessSpec(mode="invited")))
    boot = str(tmp_path / "boot")
    try:
        here, *_ = await bootstrap(children, tmp_path / "boot", signed)
        secret_file = tmp_path / "invite"
        wheel = f"https://example.org/w.whl#sha256={'ab' * 32}"
        assert not await output_of("invite", str(folder), "--home", boot, "--out", str(secret_file), "--wheel", wheel)
        install, line = secret_file.read_text().splitlines()
        assert install.startswith("# install: ") and wheel in install
        assert stat.S_IMODE(secret_file.stat().st_mode) == 0o600
        secret_file.chmod(0o644)  # as a mail program saves it

        for number in range(2):  # one by a file, one on the command line, which hides it
            home = tmp_path / f"n{number}"
            plan = NodePlan(f"node-{number}", home, signed, tmp_path / "cache")
            by = ["--invite-file", str(secret_file)] if number == 0 else [line]
            command = [*NODE, "join", *by, "--stage", str(number + 1), "--max-load", LOAD]
            children.append(await Child.start(plan, [*command, "--home", str(home), *HERE]))
        await until(children, lambda: all(map(worked, children[1:])), "two nodes with an invite train")
        assert stat.S_IMODE(secret_file.stat().st_mode) == 0o600, "joining by a file makes it private"
        for child in children:
            for process in [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]:
                assert line not in " ".join(process.cmdline()), "no command line shows the secret"
                assert line not in str(process.environ())
            for path in child.plan.home.rglob("*"):
                assert not path.is_file() or line.encode() not in path.read_bytes(), f"{path} holds the secret"

        seen = json.loads(await output_of("doctor", line, "--json", "--home", str(tmp_path / "patient")))
        assert seen["exit_code"] == 0 and seen["stages"] == [0, 1] and seen["tokens_per_s"] > 0, seen
        assert seen["verdict"].startswith("you can hold stages 1-2, about "), seen
        seen = json.loads(await output_of("doctor", "--json", "--home", str(home)))
        peers = next(check for check in seen["checks"] if check["name"] == "peers")
        assert peers["ok"] and any(check["name"] == "reach" for check in seen["checks"]), seen

        # Its home is taken: a second one there says so, and does not disturb it.
        code, error = await said("join", line, "--home", str(home), *HERE)
        assert (code, "another swarmnode" in error) == (2, True), error
        assert (home / "ready.json").exists(), "the first one's ready.json is still there"

        # Another owner's key in the invite, everything else right.
        signed_run(tmp_path / "other-run")
        code, error = await said("invite", str(tmp_path / "other-run"), "--home", boot)
        assert (code, "is of run" in error) == (2, True), error

        other = await output_of("identity", "--home", str(tmp_path / "other"))
        bound = (await output_of_piped(line, "invite", "-", "--machine", other.strip())).strip()
        assert children[0].ready is not None
        cases = {
            "no invite": ["join", here, "--run", children[0].ready.run_id],
            "another machine's invite": ["join", bound],
        }
        found = await asyncio.gather(
            *(said(*case, "--home", str(tmp_path / f"c{at}"), *HERE) for at, case in enumerate(cases.values()))
        )
        for name, (code, error) in zip(cases, found, strict=True):
            assert code == 77 and "Traceback" not in error, f"{name}: exit {code}: {error}"

        name = grant_name(decode(line).grant).hex()  # type: ignore[arg-type]
        assert f"revoked {name}" in await output_of("access", str(folder), "--revoke", name)
        for child in children[1:]:
            assert await child.wait(BOUND_S), "whose invite was taken back leaves"
            child.bury()
            assert "exit 77" in child.reason and "taken back" in child.reason, child.reason
    finally:
        await end([child for child in children if child.alive])

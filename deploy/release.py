"""Make a release in dist/ from the commit that is checked out: `make release`, with `KEY=...` also its signed tag.

Wheel and source are built twice from the commit's own files, and must be equal byte by byte: whoever builds the commit
gets the same hashes. Beside them lie SHA256SUMS, the packages that requirements.txt pins as an SBOM (CycloneDX), the
provenance (in-toto statement, SLSA provenance v1) and the release notes. The tag's message has the hashes, so that one
signature is for all of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SUMS = "SHA256SUMS"
SBOM = "sbom.cdx.json"
PROVENANCE = "provenance.json"
NOTES = "NOTES.md"
BUILD_TYPE = "make release"
UNTOLD = " (not released yet)"


def run(*words: str, cwd: Path = ROOT, **environment: str) -> str:
    """The output of a command. Raises CalledProcessError."""
    env = os.environ | environment
    return subprocess.run(words, cwd=cwd, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def version_in(root: Path) -> str:
    """The version that the package says it has."""
    found = re.search(r'^__version__ = "([^"]+)"$', (root / "swarmnode/__init__.py").read_text(), re.MULTILINE)
    assert found is not None, "no version in swarmnode/__init__.py"
    return found[1]


def notes(changelog: str, version: str) -> str:
    """The changelog's section of `version`. Raises SystemExit without one, and where something is still unreleased."""
    parts = (part.partition("\n") for part in changelog.split("\n## ")[1:])
    sections = {title.removesuffix(UNTOLD).split(" ")[0]: text for title, _, text in parts}
    if any(line.startswith(("*", "-")) for line in sections.get("Unreleased", "").splitlines()):
        raise SystemExit(f"CHANGELOG.md lists changes as unreleased: move them to the section of {version}")
    if version not in sections:
        raise SystemExit(f"CHANGELOG.md has no section of {version}")
    return f"# swarmnode {version}\n\n{sections[version].strip()}\n"


def provenance(hashes: Mapping[str, str], source: str, commit: str, lock: str) -> dict[str, Any]:
    """What was made of what: an in-toto statement. `lock`: SHA-256 of requirements.txt."""
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": value}} for name, value in sorted(hashes.items())],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"source": source},
                "resolvedDependencies": [
                    {"uri": f"git+{source}", "digest": {"gitCommit": commit}},
                    {"uri": "requirements.txt", "digest": {"sha256": lock}},
                ],
            },
            "runDetails": {"builder": {"id": "a maintainer's machine"}},
        },
    }


def build(commit: str, out: Path, when: str) -> None:
    """Wheel and source of `commit` in `out`."""
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "tree.tar"
        tree = Path(folder) / "tree"
        tree.mkdir()
        run("git", "archive", "-o", str(archive), commit)
        run("tar", "-xf", str(archive), "-C", str(tree))
        pinned = str(tree / "constraints.txt")
        words = (sys.executable, "-m", "build", "--outdir", str(out), str(tree))
        run(*words, SOURCE_DATE_EPOCH=when, PIP_CONSTRAINT=pinned)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main(key: str) -> None:
    """Fill dist/. `key`: a maintainer's, for the tag; "" for none."""
    if run("git", "status", "--porcelain"):
        raise SystemExit("this checkout has changes that are in no commit: commit or stash them, then make release")
    version = version_in(ROOT)
    commit = run("git", "rev-parse", "HEAD")
    told = notes((ROOT / "CHANGELOG.md").read_text(), version)
    when = run("git", "log", "-1", "--format=%ct")
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    with tempfile.TemporaryDirectory() as again:
        for out in (dist, Path(again)):
            build(commit, out, when)
        for made in sorted(dist.iterdir()):
            if digest(made) != digest(Path(again) / made.name):
                raise SystemExit(f"{made.name} differs when it is built again: this release cannot be checked")
    hashes = {made.name: digest(made) for made in dist.iterdir()}
    cyclonedx = (sys.executable, "-m", "cyclonedx_py", "requirements", "requirements.txt", "--output-reproducible")
    run(*cyclonedx, "-o", str(dist / SBOM))
    remote = subprocess.run(
        ("git", "remote", "get-url", "origin"), cwd=ROOT, capture_output=True, text=True, check=False
    )
    source = remote.stdout.strip() or "unknown"
    made_of = provenance(hashes, source, commit, digest(ROOT / "requirements.txt"))
    (dist / PROVENANCE).write_text(json.dumps(made_of, indent=1) + "\n")
    (dist / NOTES).write_text(told)
    sums = "".join(f"{digest(made)}  {made.name}\n" for made in sorted(dist.iterdir()))
    (dist / SUMS).write_text(sums)
    sys.stdout.write(sums)
    if not key:
        sys.stdout.write("no tag: say make release KEY=... with the id of a GPG key, or the path of an SSH key\n")
        return
    form = ("-c", "gpg.format=ssh") if Path(key).is_file() else ()
    run("git", *form, "tag", "-s", "-u", key, "-m", f"swarmnode {version}\n\n{sums}", f"v{version}")
    sys.stdout.write(f"tag v{version} is signed: git push origin v{version}, and publish dist/ with it\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")

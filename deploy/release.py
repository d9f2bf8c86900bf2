"""Make a release in dist/ from the commit that is checked out: `make release`, with `KEY=...` also its signed tag.

Wheel and source are built twice from the commit's own files, and must be equal byte by byte: whoever builds the commit
gets the same hashes. Beside them lie SHA256SUMS, the packages that requirements.txt pins as an SBOM (CycloneDX), the
provenance (in-toto statement, SLSA provenance v1) and the release notes; an index for pip and uv, the site and the
source, so that dist/ is what a static host serves at the project's address (served.py). The key signs SHA256SUMS and
the tag, whose message has the hashes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
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
                    {"uri": source, "digest": {"gitCommit": commit}},
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


def main(key: str) -> None:
    """Fill dist/. `key`: a maintainer's, for the tag; "" for none."""
    if run("git", "status", "--porcelain"):
        raise SystemExit("this checkout has changes that are in no commit: commit or stash them, then make release")
    from address import SOURCE, address, stale  # beside this file, in each checkout that may be released
    from served import digest, serve

    if stale():
        raise SystemExit("pyproject.toml has a new address: make docs writes it into the pages; then commit")
    where = address()
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
    made_of = provenance(hashes, f"{where}/{SOURCE}", commit, digest(ROOT / "requirements.txt"))
    (dist / PROVENANCE).write_text(json.dumps(made_of, indent=1) + "\n")
    (dist / NOTES).write_text(told)
    tree = subprocess.run(("git", "archive", commit), cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["description"]
    serve(dist, tree, where, version, about, int(when))
    sums = "".join(f"{digest(made)}  {made.name}\n" for made in sorted(dist.iterdir()) if made.is_file())
    (dist / SUMS).write_text(sums)
    sys.stdout.write(sums)
    sys.stdout.write(f"serve dist/ at {where}\n")
    if not key:
        sys.stdout.write("no tag: say make release KEY=... with the id of a GPG key, or the path of an SSH key\n")
        return
    by_ssh = Path(key).is_file()
    if by_ssh:
        run("ssh-keygen", "-q", "-Y", "sign", "-f", key, "-n", "file", str(dist / SUMS))
    else:
        run("gpg", "--batch", "--yes", "--armor", "--detach-sign", "-u", key, str(dist / SUMS))
    form = ("-c", "gpg.format=ssh") if by_ssh else ()
    run("git", *form, "tag", "-s", "-u", key, "-m", f"swarmnode {version}\n\n{sums}", f"v{version}")
    sys.stdout.write(f"tag v{version} is signed: git push origin v{version}, and serve dist/ with it\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")

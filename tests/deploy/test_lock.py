"""What is installed is what was looked at: hashes of the very versions that constraints.txt pins, images by digest, and
no line that would fetch another project's package."""

import hashlib
import importlib.util
import platform
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.fresh import make_environment, make_wheel

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ("requirements.txt", "requirements-cpu.txt")
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}\Z")
ELSEWHERE = (
    "nvidia-",
    "cuda-",
    "triton",
    "colorama",
    "greenlet",
)  # of another system than the one constraints.txt is of
LINK = re.compile(r"\]\((?!https?:|#)")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TEXTS = [
    path
    for pattern in ("*.md", "docs/**/*", "deploy/**/*", "examples/**/*", "swarmnode/**/*.py", "Makefile")
    for path in sorted(ROOT.glob(pattern))
    if path.suffix in (".md", ".py", ".yaml", ".yml", ".sh", ".service", ".env", ".sbatch", ".cuda", "")
    and path.is_file()
    if path.name != "CHANGELOG.md"  # what was
]


def pins(text: str) -> dict[str, str]:
    found = (line.split("==") for line in text.splitlines() if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in found}


def locked(name: str) -> dict[str, tuple[str, list[str]]]:
    """Package: (version, hashes) of a file that `deploy/lock.py` makes."""
    found: dict[str, tuple[str, list[str]]] = {}
    last = ""
    for line in (ROOT / name).read_text().splitlines():
        if line.startswith("#") or not line:
            continue
        words = line.removesuffix("\\").split()
        if line.startswith(" "):
            found[last][1].extend(words)
        else:
            requirement = Requirement(line.removesuffix("\\").strip())
            last = canonicalize_name(requirement.name)
            assert last not in found, last
            found[last] = (str(requirement.specifier), [])
    return found


CONSTRAINTS = pins((ROOT / "constraints.txt").read_text())


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_is_pinned_as_it_was_tested_and_hashed(name: str) -> None:
    found = locked(name)
    assert len(found) > 60
    for package, (version, hashes) in found.items():
        assert hashes and all(HASH.match(each) for each in hashes), package
        known = CONSTRAINTS.get(package)
        if known is None:
            assert package.startswith(ELSEWHERE) or package in ("setuptools", "httpx2-jsfetch"), f"{package}: make lock"
        else:
            assert version == f"=={known}", (
                f"{package} is {version} in {name} and {known} in constraints.txt: make lock"
            )


@pytest.mark.parametrize("name", LOCKS)
def test_all_that_a_node_needs_is_there(name: str) -> None:
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["s3"], *extras["build"]]
    names = {canonicalize_name(Requirement(text).name) for text in wanted}
    assert names - locked(name).keys() == ({"torch"} if "cpu" in name else set())
    assert set(PROJECT["build-system"]["requires"]) == set(extras["build"]), "what builds it is in the files"
    assert not [package for package in locked("requirements-cpu.txt") if package.startswith(("nvidia-cu", "cuda-"))]


def test_installed_versions_are_the_pinned_ones() -> None:
    """Not everything is installed everywhere; what is has the version that the hashes are of."""
    differ = {}
    for package, version in CONSTRAINTS.items():
        try:
            here = metadata.version(package).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
        if here != version:
            differ[package] = (here, version)
    assert not differ, "make setup, or write the new versions down in constraints.txt and `make lock`"


def test_images_are_named_by_digest() -> None:
    for path in (ROOT / "deploy" / "docker").glob("Dockerfile*"):
        froms = re.findall(r"(?m)^FROM (\S+)", path.read_text())
        assert froms and all(image.endswith("@${PYTHON_DIGEST}") for image in froms), path.name
        assert re.search(r"(?m)^ARG PYTHON_DIGEST$", path.read_text()), "no default: without one the build refuses"
        assert "--require-hashes" in path.read_text()
    compose = (ROOT / "deploy" / "compose" / "compose.yaml").read_text()
    images = [image for image in re.findall(r"(?m)^\s*image: (\S+)", compose) if image != "swarmnode"]
    assert len(images) == 2 and all(re.search(r"@\$\{[A-Z]+_DIGEST:\?", image) for image in images)
    for path in (ROOT / "deploy" / "kubernetes").glob("*.yaml"):
        images = re.findall(r"(?m)^\s*image: (\S+)", path.read_text())
        assert images and all(re.search(r"@sha256:[0-9a-f]{64}\Z", image) for image in images), path.name
    script = (ROOT / "deploy" / "docker" / "digests.sh").read_text()
    wanted = set(re.findall(r"\$\{([A-Z_0-9]+):\?", compose))
    assert wanted == set(re.findall(r"echo \"([A-Z_0-9]+)=", script))
    named = set(re.findall(r"image: ([a-z]+/[a-z]+:[\w.]+)@", compose)) | {"python:3.11-slim-bookworm"}
    assert named == set(re.findall(r"\$\(digest ([^)]+)\)", script)), "the tags whose digests are looked up"


def test_no_line_installs_another_projects_package() -> None:
    """`swarmnode` on PyPI is not this, and until ours is there neither is `swarmnode-trainer`: files and URLs alone."""
    ours = re.compile(r"(?<![\w./_-])swarmnode(?:-trainer)?(?:\[[\w,]*\])?(?![\w./:*_-])")
    lines = [(path, line) for path in TEXTS for line in path.read_text(errors="replace").splitlines()]
    installs = [(path, re.split(r"\bpip[3\"']?,? (?:install|download)\b", line)[1:]) for path, line in lines]
    assert sum(bool(found) for _, found in installs) >= 10
    wrong = [(str(path.relative_to(ROOT)), found) for path, found in installs if any(map(ours.search, found))]
    assert not wrong


@pytest.mark.nightly
def test_the_wheel_is_ours(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    assert wheel.name.startswith("swarmnode_trainer-") and wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as found:
        names = found.namelist()
        scripts = next(found.read(name).decode() for name in names if name.endswith("entry_points.txt"))
        about = next(found.read(name).decode() for name in names if name.endswith("/METADATA"))
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"swarmnode", "swarmnode_methods", "swarmsim"}
    assert "swarmnode = swarmnode.app.cli:run" in scripts
    assert not LINK.findall(about), "a link of the README that leads nowhere from a wheel"
    assert PROJECT["project"]["urls"]["Homepage"] in about
    made = {
        path.relative_to(ROOT).as_posix()
        for package in ("swarmnode", "swarmnode_methods", "swarmsim")
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".c", ".h")
    }
    assert made <= set(names)
    assert not [name for name in names if name.endswith((".so", ".key", ".signed"))]
    commands = make_environment(wheel, tmp_path / "fresh")
    (site,) = commands.parent.glob("lib/python*/site-packages")
    fleet = str(site / "swarmsim" / "examples" / "home.csv")
    for words in (["init", "run"], ["plan", "run", fleet], ["simulate", "--for", "5s"]):
        done = subprocess.run(
            [str(commands / "swarmnode"), *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="another p2pd")
def test_the_advisories_are_of_this_p2pd() -> None:
    from hivemind import hivemind_cli

    page = (ROOT / "docs" / "p2pd.md").read_text()
    here = hashlib.sha256(Path(hivemind_cli.__file__).with_name("p2pd").read_bytes()).hexdigest()
    assert here in page, "another p2pd: run deploy/advisories.py and write the page anew"
    assert f"hivemind {CONSTRAINTS['hivemind']}." in page


def test_advisories_are_found_by_version() -> None:
    spec = importlib.util.spec_from_file_location("advisories", ROOT / "deploy" / "advisories.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def ranges(*events: tuple[str, str]) -> dict[str, object]:
        return {"ranges": [{"events": [{kind: version} for kind, version in events]}]}

    twice = ranges(("introduced", "0"), ("fixed", "1.2.3"), ("introduced", "1.3.0"), ("fixed", "1.4.0-rc.2"))
    found = [
        version
        for version in ("1.2.2", "1.2.3", "1.2.9", "1.3.0", "1.4.0-rc.1", "1.4.0")
        if module.is_open(version, twice)
    ]
    assert found == ["1.2.2", "1.3.0", "1.4.0-rc.1"]
    assert module.is_open("v0.0.0-20200604182044-b73af7476f6c", ranges(("introduced", "0")))
    assert not module.is_open("1.0.0", ranges(("introduced", "1.0.1")))

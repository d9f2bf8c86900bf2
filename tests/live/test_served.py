"""A release, served at one address over loopback: installed from there by uv, pipx and pip, and joined with."""

import functools
import hashlib
import html
import html.parser
import http.server
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from tests.live.test_people import test_a_volunteer_joins_sees_herself_on_the_page_and_pauses as volunteer
from tests.support.fresh import ROOT

PATH = "/swarm"
INSTALLERS = ("uv==0.13.9", "pipx==1.18.4")
BOUND_S = 900
# With the tested builds of PyTorch where this machine keeps them; uv has no word for pip's folder of wheels.
FOUND = {"UV_FIND_LINKS": os.environ["PIP_FIND_LINKS"]} if "PIP_FIND_LINKS" in os.environ else {}
test_a_volunteer_with_the_served_release_is_on_the_page = volunteer


def output(*words: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    """stdout of a command that succeeds."""
    done = subprocess.run(
        list(map(str, words)),
        cwd=cwd,
        env=os.environ | FOUND | variables,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def fetched(*words: str | Path, **more: Any) -> str:
    """`output` of a command that asks a package registry; where none answers the test is skipped."""
    try:
        return output(*words, **more)
    except AssertionError as error:
        if re.search(r"(?i)temporary failure in name|connection refused|no matching distribution", str(error)):
            pytest.skip(f"no package registry here: {str(error)[-200:]}")
        raise


@dataclass(frozen=True)
class Served:
    """A release in `folder`, served at `address`; `tools` has the installers' commands."""

    folder: Path
    address: str
    tools: Path

    def line(self, program: str) -> list[str]:
        """The line that the front page prints for `program`, as words. PyTorch's own index is out of reach of tests."""
        page = (self.folder / "index.html").read_text()
        found = re.search(rf"^(?:<pre>)?({program} .*?)(?:</pre>)?$", page, re.MULTILINE)
        assert found is not None
        return shlex.split(html.unescape(found[1]).replace("--torch-backend auto ", ""))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("release")
    clone = folder / "clone"
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}{PATH}"
        output("git", "clone", "-q", ROOT, clone)
        project = clone / "pyproject.toml"
        text, count = re.subn(r'(?m)^Homepage = ".*"$', f'Homepage = "{address}/"', project.read_text())
        assert count == 1, "one setting"
        project.write_text(text)
        output(sys.executable, "deploy/address.py", cwd=clone)
        output("git", "-c", "user.name=T", "-c", "user.email=t@t", "commit", "-qam", "Our address", cwd=clone)
        key = folder / "key"
        output("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key)
        signer = {"GIT_COMMITTER_NAME": "T", "GIT_COMMITTER_EMAIL": "t@t"}
        fetched("make", "-s", "release", f"PYTHON={sys.executable}", f"KEY={key}", cwd=clone, **signer)
        (folder / PATH[1:]).symlink_to(clone / "dist")
        venv.create(folder / "tools", with_pip=True, symlinks=True)
        fetched(folder / "tools/bin/pip", "install", "-q", *INSTALLERS)
        yield Served(clone / "dist", address, folder / "tools" / "bin")
        server.shutdown()


@pytest.fixture(scope="module")
def commands(served: Served) -> Path:
    """The commands that uv installed, by the line of the front page."""
    there = served.tools.parent / "by-uv"
    words = served.line("uv")
    at = {"UV_TOOL_DIR": str(there / "tools"), "UV_TOOL_BIN_DIR": str(there / "bin"), "UV_CACHE_DIR": str(there / "c")}
    output(served.tools / words[0], *words[1:], "--python", sys.executable, cwd=served.tools, **at)
    return there / "bin"


class Links(html.parser.HTMLParser):
    """What a page links to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if name in ("href", "src") and value]


def test_every_link_of_the_folder_leads_somewhere_and_no_other_address_is_left(served: Served) -> None:
    pages = [path for path in served.folder.rglob("*.html") if "source" not in path.relative_to(served.folder).parts]
    assert len(pages) > 40
    dead = []
    for page in pages:
        for link in Links(page).found:
            parts = urlsplit(link.removeprefix(f"{served.address}/"))
            if parts.scheme or not parts.path:
                continue
            ours = link.startswith(f"{served.address}/")
            start = served.folder if ours or parts.path.startswith("/") else page.parent
            target = start / unquote(parts.path).removeprefix(PATH).lstrip("/")
            if not (target.is_file() or (target / "index.html").is_file()):
                dead.append((page.relative_to(served.folder), link))
    assert not dead
    assert served.address in (served.folder / "source" / "docs" / "volunteer.md").read_text()
    told = [path for path in served.folder.rglob("*") if path.is_file() and path.suffix in (".md", ".html", ".yaml")]
    assert not [path for path in told if "https://example.org/swarmnode" in path.read_text(errors="replace")]
    metadata = next(served.folder.glob("*.metadata")).read_text()
    for link in re.findall(rf"\]\({re.escape(served.address)}/([^)#]*)", metadata):
        assert (served.folder / link).exists(), f"the readme in the wheel links to {link}"
    contact = (served.folder / ".well-known" / "security.txt").read_text()
    assert "Contact: mailto:security@127.0.0.1\n" in contact and "\nExpires: " in contact


def test_each_file_has_its_hash_and_the_hashes_their_signature(served: Served) -> None:
    sums = served.folder / "SHA256SUMS"
    told = {name: value for value, name in (line.split("  ") for line in sums.read_text().splitlines())}
    files = {path.name for path in served.folder.iterdir() if path.is_file()} - {"SHA256SUMS", "SHA256SUMS.sig"}
    assert set(told) == files and {"sbom.cdx.json", "provenance.json", "NOTES.md"} < files
    for name, expected in told.items():
        assert hashlib.sha256((served.folder / name).read_bytes()).hexdigest() == expected, name
    check = ["ssh-keygen", "-Y", "check-novalidate", "-n", "file", "-s", f"{sums}.sig"]
    signed = sums.read_bytes()
    assert subprocess.run(check, input=signed, check=False, capture_output=True).returncode == 0
    assert subprocess.run(check, input=signed + b"x", check=False, capture_output=True).returncode != 0
    assert "v0.1.0" in output("git", "tag", cwd=served.folder.parent)


def test_uv_takes_our_package_from_our_index_and_knows_where_it_came_from(served: Served, commands: Path) -> None:
    python = commands.parent / "tools" / "swarmnode-trainer" / "bin" / "python"
    asked = "from swarmnode.base.project_address import project_address; print(project_address())"
    assert output(python, "-c", asked, cwd=commands).strip() == served.address
    assert output(commands / "swarmnode", "--version", cwd=commands).split()[-1] == "0.1.0"


def test_pipx_and_pip_install_it(served: Served, tmp_path: Path) -> None:
    words = served.line("pipx")
    home = {"PIPX_HOME": str(tmp_path / "pipx"), "PIPX_BIN_DIR": str(tmp_path / "bin"), "PIPX_DEFAULT_BACKEND": "uv"}
    output(served.tools / words[0], *words[1:], "--python", sys.executable, cwd=tmp_path, **home)
    assert output(tmp_path / "bin" / "swarmnode", "--version", cwd=tmp_path).split()[-1] == "0.1.0"
    shutil.rmtree(tmp_path / "pipx")
    words = served.line("pip")
    venv.create(tmp_path / "pip", with_pip=True, symlinks=True)
    output(tmp_path / "pip/bin/pip", *words[1:], "--no-deps", cwd=tmp_path)
    index = ("--force-reinstall", "--no-deps", "--index-url", f"{served.address}/simple/", "swarmnode-trainer")
    output(tmp_path / "pip/bin/pip", "install", *index, cwd=tmp_path)
    assert "0.1.0" in output(tmp_path / "pip/bin/pip", "show", "swarmnode-trainer", cwd=tmp_path)


@pytest.mark.parametrize("version", ["3.12", "3.13", "3.14"])
def test_the_index_resolves_for_other_pythons(served: Served, version: str, tmp_path: Path) -> None:
    asked = ("python", "find", "--no-python-downloads", version)
    found = subprocess.run([str(served.tools / "uv"), *asked], capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(f"no Python {version} here")
    output(served.tools / "uv", "venv", "-q", "--python", found.stdout.strip(), tmp_path / "e", cwd=tmp_path)
    words = served.line("uv")[3:]
    at = ("--python", tmp_path / "e", "--dry-run")
    output(served.tools / "uv", "pip", "install", *at, *words, cwd=tmp_path)

"""The folder that a static host serves at the project's address: what `make release` adds to the release's files."""

from __future__ import annotations

import hashlib
import html
import io
import shutil
import sys
import tarfile
import time
import zipfile
from email.parser import BytesParser
from pathlib import Path

from address import ROOT, SITE, SOURCE, mailbox, with_links

sys.path.insert(0, str(ROOT))
from swarmnode.base.project_address import INDEX, PACKAGE, install_lines, is_placeholder

TOP_FILES = ("constraints.txt", "requirements.txt", "requirements-cpu.txt")
YEAR_S = 365 * 86400
STYLE = (
    "body{font:16px/1.6 system-ui,sans-serif;max-width:48rem;margin:0 auto;padding:1rem;color:#1b1f24;background:#fff}"
    "pre{background:#f3f5f8;padding:.8rem;white-space:pre-wrap;overflow-wrap:anywhere;border-radius:6px}"
    "td{padding:.15rem .8rem .15rem 0;vertical-align:top}.scroll{overflow-x:auto}code{font-size:.9em}a{color:#1f5fd6}"
    "@media(prefers-color-scheme:dark){body{color:#e3e7ec;background:#14171b}pre{background:#20252b}a{color:#8db4ff}}"
)


def digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _page(title: str, body: str) -> str:
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{title}</title><style>{STYLE}</style>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def write_simple_index(folder: Path) -> None:
    """An index of the wheel and the source in `folder` (PEP 503), with the wheel's metadata beside it (PEP 658)."""
    index = folder / INDEX
    (index / PACKAGE).mkdir(parents=True)
    (wheel,) = folder.glob("*.whl")
    (source,) = folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as inside:
        (name,) = (each for each in inside.namelist() if each.endswith(".dist-info/METADATA"))
        told = inside.read(name)
    metadata = folder / f"{wheel.name}.metadata"
    metadata.write_bytes(told)
    python = html.escape(BytesParser().parsebytes(told)["Requires-Python"])
    links = []
    for each in (wheel, source):
        beside = f' data-core-metadata="sha256={digest(metadata)}"' if each == wheel else ""
        href = f"../../{each.name}#sha256={digest(each)}"
        links.append(f'<a href="{href}" data-requires-python="{python}"{beside}>{each.name}</a><br>')
    (index / "index.html").write_text(_page("Simple index", f'<a href="{PACKAGE}/">{PACKAGE}</a>'), encoding="utf-8")
    (index / PACKAGE / "index.html").write_text(_page(PACKAGE, "\n".join(links)), encoding="utf-8")


def write_front_page(folder: Path, where: str, version: str, about: str) -> None:
    """The page at the address itself."""
    lines = install_lines(where, version)
    rows = "\n".join(
        f'<tr><td><a href="{each.name}">{each.name}</a></td><td>{each.stat().st_size:,} bytes</td></tr>'
        for each in sorted(folder.iterdir())
        if each.is_file() and each.name != "index.html"
    )
    body = f"""<h1>swarmnode {version}</h1>
<p>{html.escape(about)}</p>
<p><a href="{SITE}">Documentation</a> · <a href="{SITE}volunteer/">Give a machine</a> · <a href="{SITE}recipes/">From
your text to a model that talks</a> · <a href="NOTES.md">What is new</a></p>
<h2>Install</h2>
<p>Python 3.11 or newer on Linux (on Windows: WSL2). With <a href="https://docs.astral.sh/uv/">uv</a>, which takes
PyTorch for your graphics card, or without one the small one for the processor (0.3 GB to load, 1.1 GB on disk, a minute
or two; with a card some gigabytes):</p>
<pre>{html.escape(lines["uv"])}</pre>
<p>With pipx, or pip in an environment of its own:</p>
<pre>{html.escape(lines["pipx"])}
{html.escape(lines["pip"])}</pre>
<p>Then <code>swarmnode join</code> with the line that you were sent, or <code>swarmnode quickstart</code>.</p>
<h2>Files</h2>
<p><a href="SHA256SUMS">SHA256SUMS</a> has the hash of each. The same commit gives the same wheel and source on any
machine: <a href="{SOURCE}SECURITY.md">how to check, and where to report a weakness</a>.</p>
<div class="scroll"><table>{rows}</table></div>"""
    (folder / "index.html").write_text(_page(f"swarmnode {version}", body), encoding="utf-8")


def write_security_contact(folder: Path, where: str, when: int) -> None:
    """security.txt (RFC 9116), good for a year from `when`. It counts where the address is a host without a path."""
    known = folder / ".well-known"
    known.mkdir()
    until = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(when + YEAR_S))
    told = f"Contact: mailto:{mailbox(where)}\nExpires: {until}\nPolicy: {where}/{SOURCE}SECURITY.md\n"
    (known / "security.txt").write_text(told, encoding="utf-8")


def serve(folder: Path, tree: bytes, where: str, version: str, about: str, when: int) -> None:
    """Make `folder`, which has the release's files, the whole that is served. `tree`: the commit as a tar file;
    build/site is there. Raises SystemExit without a site."""
    site = ROOT / "build/site"
    if not (site / "index.html").is_file():
        raise SystemExit("build/site is missing: make site")
    shutil.copytree(site, folder / SITE)
    with tarfile.open(fileobj=io.BytesIO(tree)) as inside:
        inside.extractall(folder / SOURCE, filter="data")
    for name in TOP_FILES:
        shutil.copyfile(folder / SOURCE / name, folder / name)
    notes = folder / "NOTES.md"
    notes.write_text(with_links(notes.read_text(encoding="utf-8"), "CHANGELOG.md", where), encoding="utf-8")
    write_simple_index(folder)
    write_security_contact(folder, where, when)
    write_front_page(folder, where, version, about)
    if is_placeholder(where):
        told = f"pyproject.toml: Homepage is a placeholder, {where}: set yours, make docs, commit, make release\n"
        sys.stdout.write(told)

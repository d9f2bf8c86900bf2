"""Where the project lives: one address, `Homepage` in pyproject.toml, and everything that is made of it.

`make release` fills a folder that any static host can serve there:

    ADDRESS/                    what it is, how to install it, the release's files
    ADDRESS/simple/             an index for pip and uv (PEP 503, with PEP 658's metadata)
    ADDRESS/docs/               the site
    ADDRESS/source/PATH         each file of the commit

Pages and recipes write the address out, so that a line can be pasted from them. `make docs` (this file, run) puts a new
address in place of the old one, which `WRITTEN` in docs/volunteer.md remembers. Weaknesses are reported to the mailbox
that RFC 2142 names for them, at the address's host.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from posixpath import normpath
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[1]
SITE = "docs/"
SOURCE = "source/"
WRITTEN = re.compile(r"<!-- The address, written by `make docs` from pyproject\.toml: (\S+) -->")
REMEMBERED_IN = "docs/volunteer.md"
TEXT_ENDINGS = (".md", ".txt", ".yaml", ".yml", ".sh", ".service", ".env", "Dockerfile")
TEXT_FOLDERS = ("docs/", "deploy/", "examples/")
TEXT_FILES = ("README.md", "SECURITY.md", "CONTRIBUTING.md", "AGENTS.md")
LINK = re.compile(r"(!?\[[^\]]*\])\((?!https?:|mailto:|#)([^)#\s]*)(#[^)\s]*)?\)")


def address(root: Path = ROOT) -> str:
    """The setting, without a slash at its end. Raises ValueError for anything but an address of HTTP."""
    found = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Homepage"]
    parts = urlsplit(found)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"pyproject.toml, [project.urls], Homepage: {found!r} is no address like https://HOST/PATH")
    return str(found).rstrip("/")


def mailbox(where: str) -> str:
    """The mailbox for reports of weaknesses at the host of `where` (RFC 2142, section 4)."""
    return f"security@{urlsplit(where).hostname}"


def place_of(path: str, where: str) -> str:
    """The URL of a file or folder of the repository: a page of the site, or the file as it is."""
    if path.startswith("docs/"):
        inside = path.removeprefix("docs/")
        page = re.sub(r"(^|/)README\.md$", r"\1", inside)
        return f"{where}/{SITE}" + (f"{page.removesuffix('.md')}/" if page.endswith(".md") else page)
    return f"{where}/{SOURCE}{path}"


def with_links(text: str, page: str, where: str, *, inside: str = "") -> str:
    """`text` of the repository's file `page` with its relative links made absolute. Links to files below `inside` stay
    as they are."""
    here = page.rpartition("/")[0]

    def absolute(link: re.Match[str]) -> str:
        target = normpath(f"{here}/{link[2]}".lstrip("/"))
        if inside and target.startswith(inside):
            return link[0]
        return f"{link[1]}({place_of(target, where)}{link[3] or ''})"

    return LINK.sub(absolute, text)


def texts(root: Path = ROOT) -> Iterator[Path]:
    """The files that may write the address out."""
    listed = subprocess.run(("git", "ls-files"), cwd=root, check=True, capture_output=True, text=True).stdout.split(
        "\n"
    )
    for name in listed:
        if name in TEXT_FILES or (name.startswith(TEXT_FOLDERS) and name.endswith(TEXT_ENDINGS)):
            yield root / name


def remembered(root: Path = ROOT) -> str:
    """The address that the texts have now. Raises ValueError without its line."""
    found = WRITTEN.search((root / REMEMBERED_IN).read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f"{REMEMBERED_IN} has lost the line that remembers the address: git checkout {REMEMBERED_IN}")
    return found[1]


def renamed(text: str, old: str, new: str) -> str:
    """`text` with the address and the mailbox `new` in place of `old`."""
    return text.replace(old, new).replace(mailbox(old), mailbox(new))


def stale(root: Path = ROOT) -> Mapping[Path, str]:
    """Texts that write another address than the setting, and what they should be."""
    old = remembered(root)
    new = address(root)
    if old == new:
        return {}
    now = {path: path.read_text(encoding="utf-8") for path in texts(root)}
    return {path: renamed(text, old, new) for path, text in now.items() if renamed(text, old, new) != text}


if __name__ == "__main__":
    for path, text in stale().items():
        path.write_text(text, encoding="utf-8")

"""The address where this package's project lives, as the installed wheel says (pyproject.toml, `Homepage`), and how it
is installed from there. `make release` makes what lies there (deploy/served.py)."""

from __future__ import annotations

from importlib import metadata
from urllib.parse import urlsplit

PACKAGE = "swarmnode-trainer"
INDEX = "simple/"
PLACEHOLDER_HOSTS = ("example.org", "example.com")  # RFC 2606: nobody's


def is_placeholder(where: str) -> bool:
    """Whether nobody has set the address yet."""
    return urlsplit(where).hostname in PLACEHOLDER_HOSTS


def project_address() -> str:
    """The address, without a slash at its end; "" where none was set when the package was made."""
    try:
        told = metadata.metadata(PACKAGE).get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        return ""
    found = [url for kind, _, url in (line.partition(", ") for line in told) if kind == "Homepage"]
    return "" if not found or is_placeholder(found[0]) else found[0].rstrip("/")


def with_uv(wheel: str, constraints: str = "") -> str:
    """The command by which uv installs a wheel, or the package of an index, with PyTorch for this machine's card or
    processor."""
    pinned = f"-c {constraints} " if constraints else ""
    return f"uv tool install --torch-backend auto {pinned}{wheel}"


def install_lines(where: str, version: str) -> dict[str, str]:
    """The commands that install release `version` from the address `where`, by the program that carries them out."""
    constraints = f"{where}/constraints.txt"
    wheel = f"{where}/{PACKAGE.replace('-', '_')}-{version}-py3-none-any.whl"
    return {
        "uv": with_uv(f"--index {where}/{INDEX} {PACKAGE}=={version}", constraints),
        "pipx": f"pipx install --pip-args='-c {constraints}' {wheel}",
        "pip": f"pip install -c {constraints} {wheel}",
    }

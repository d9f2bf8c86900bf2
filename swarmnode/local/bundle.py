"""Bundle logs of nodes on this machine into one file for analysis, without private data."""

from __future__ import annotations

import getpass
import gzip
import io
import json
import platform
import re
import socket
import tarfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from swarmnode import __version__
from swarmnode.atomic_file import atomic_file, write_fault
from swarmnode.errors import UsageError

# An explicit list, so that no key, weights or cache gets in by accident.
FILES = ("events.jsonl.1", "events.jsonl", "stderr.log", "stdout.log", "status.json")
FILE_BYTES_MAX = 32 << 20
PACKAGES = ("torch", "hivemind", "numpy", "grpcio", "aiohttp")


# Remove private data from logs: addresses, names of machines and people, secrets. Pure.
#
# Equal addresses become equal words throughout one bundle, so that events between two machines can still be followed.
# Peer ids stay: they are public, and a log is useless without them.

_IP4 = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])")
_HEX = r"[0-9A-Fa-f]{1,4}"
_IP6 = re.compile(
    rf"(?<![\w:])(?:(?:{_HEX}:){{7}}{_HEX}|(?:{_HEX}(?::{_HEX}){{0,6}})?::(?:{_HEX}(?::{_HEX}){{0,6}})?)(?![\w:])"
)
_DNS = re.compile(r"(/dns[46]?/)([^/\s\"]+)")
_URL_USER = re.compile(r"(\w://)(?:[^/@\s\"]{1,512}|[^/@:\s\"]{0,256}:[^@\s\"]{1,512})@")
_SECRET = re.compile(
    r"(?i)(\"?(?<![\w-])(?=[\w-]*?"
    r"(?:secret|password|passwd|token(?!s|iz)|api[_-]?key|credential|authorization|invite))[\w-]++\"?\s{0,9}[:=]\s{0,9})"
    r"(\"[^\"]*\"|[^\s,;}]+)"
)
_INVITE = re.compile(r"\bswarm\d+\.[A-Za-z0-9_\-]{20,}")
# Secrets recognisable by their format.
_TOKEN = re.compile(
    r"""(?<![A-Za-z0-9])(?:
      (?:AKIA|ASIA|AROA|AIDA|AGPA|ANPA|ABIA|ACCA)[0-9A-Z]{16}    # Amazon
    | (?:hf|api_org)_[A-Za-z0-9]{16,}                             # Hugging Face
    | (?:ghp|gho|ghu|ghs|ghr)_[A-Za-z0-9]{16,} | github_pat_\w{16,}
    | glpat-[\w-]{16,} | xox[abeoprs]-[\w-]{10,} | npm_[A-Za-z0-9]{16,} | pypi-[\w-]{16,} | dop_v1_[0-9a-f]{16,}
    | sk-[\w-]{16,} | (?:sk|rk|pk)_(?:live|test)_\w{10,}          # OpenAI, Anthropic; Stripe
    | AIza[\w-]{35} | ya29\.[\w-]{10,}                            # Google
    | eyJ[\w-]{8,512}\.[\w-]{8,}(?:\.[\w-]*)?                        # JSON Web Tokens
    )""",
    re.VERBOSE,
)
_HEADER = re.compile(r"(?i)\b((?:bearer|basic|digest|negotiate|token)\s+)(?![a-z]{1,20}\b)[A-Za-z0-9._~+/=:-]{8,}")
# Parameters of a signed URL: X-Amz-Signature, X-Goog-Credential, sig, AWSAccessKeyId, ...
_QUERY = re.compile(
    r"(?i)([?&;](?:[\w.-]{0,64}?(?:signature|credential|security-token|accesskeyid|secret|password|apikey|access_token)"
    r"|sig|key|token|auth|code)=)[^&\s\"'<>\\]+"
)
_PEM_NAME = "[A-Z0-9 ]{1,60}"
_PEM = re.compile(
    rf"-----BEGIN {_PEM_NAME}-----"
    rf"(?:(?:(?!-----BEGIN)(?:[A-Za-z0-9+/=:,.\s-]|\\[nr])){{0,20000}}?-----END {_PEM_NAME}-----"
    rf"|(?:[A-Za-z0-9+/=\s]|\\[nr]){{0,20000}})"
)
_PEM_END = re.compile(rf"-----END {_PEM_NAME}-----")
_PEM_LINE = re.compile(r"(?<![A-Za-z0-9+/=])[A-Za-z0-9+/=]{16,76}(?:\\[nr]|\s)+\Z")
_PEM_LINE_MAX = 100
_PUBLIC = ("127.", "0.0.0.0", "169.254.169.254", "255.255.255.255")
HIDDEN = "[hidden]"


class Redactor:
    """Removes addresses, secrets, and `words` (a home's path, a user's or machine's name), each of which is replaced by
    its second item."""

    def __init__(self, words: Sequence[tuple[str, str]] = ()) -> None:
        # Longest first: a home's path contains its owner's name.
        self._words = sorted(((word, name) for word, name in words if len(word) > 2), key=lambda pair: -len(pair[0]))
        self._known: dict[str, str] = {}
        self.hidden = 0

    def text(self, text: str) -> str:
        """`text` in a form that may be shown to others."""
        text = self._without_ends(_PEM.sub(self._count, text))
        text = _URL_USER.sub(self._behind_first, text)
        text = _QUERY.sub(self._behind_first, text)
        text = _HEADER.sub(self._behind_first, text)
        text = _SECRET.sub(self._secret, text)
        text = _INVITE.sub(self._count, text)
        text = _TOKEN.sub(self._count, text)
        text = _DNS.sub(lambda found: found[1] + self._name(found[2], "host"), text)
        text = _IP4.sub(self._ip4, text)
        text = _IP6.sub(lambda found: found[0] if found[0] in ("::", "::1") else self._name(found[0], "ip6"), text)
        for word, name in self._words:
            text = text.replace(word, name)
        return text

    def _secret(self, found: re.Match[str]) -> str:
        self.hidden += 1
        quote = '"' if found[2].startswith('"') else ""
        return f"{found[1]}{quote}{HIDDEN}{quote}"

    def _without_ends(self, text: str) -> str:
        """`text` without keys whose beginning was lost from the log: lines of base64 before a key's last line."""
        kept, done = [], 0
        for end in _PEM_END.finditer(text):
            start = end.start()
            while line := _PEM_LINE.search(text, max(done, start - _PEM_LINE_MAX), start):
                start = line.start()
            kept += [text[done:start], HIDDEN]
            done, self.hidden = end.end(), self.hidden + 1
        return "".join([*kept, text[done:]])

    def _behind_first(self, found: re.Match[str]) -> str:
        self.hidden += 1
        return f"{found[1]}{HIDDEN}{'@' if found[0].endswith('@') else ''}"

    def _count(self, found: re.Match[str]) -> str:
        self.hidden += 1
        return HIDDEN

    def _ip4(self, found: re.Match[str]) -> str:
        if found[0].startswith(_PUBLIC) or any(int(part) > 255 for part in found[0].split(".")):
            return found[0]
        return self._name(found[0], "ip4")

    def _name(self, what: str, kind: str) -> str:
        self.hidden += 1
        return self._known.setdefault(what, f"{kind}-{len(self._known) + 1}")


def homes(folders: Sequence[Path]) -> list[Path]:
    """The nodes' homes in `folders` or directly below. Raises UsageError if there is none."""
    globs = ("events.jsonl", "*/events.jsonl")
    folders_with_logs = sorted({log.parent for folder in folders for glob in globs for log in folder.glob(glob)})
    if not folders_with_logs:
        raise UsageError(f"no log of a node in {', '.join(map(str, folders))}; give its --home")
    return folders_with_logs


def redactor() -> Redactor:
    """A redactor for the names of this machine and its user."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = ""
    home = str(Path.home())
    words = [(home, "~"), (socket.gethostname(), "thishost")]
    if user not in ("root", "user"):
        words.append((user, "user"))
    return Redactor([(word, name) for word, name in words if word not in ("/", "localhost")])


def about() -> dict[str, object]:
    """Versions of this machine's system and packages."""
    versions = {"swarmnode": __version__}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {"python": platform.python_version(), "system": platform.platform(), "packages": versions}


def write(out: Path, nodes: Sequence[Path], hide: Redactor | None) -> list[str]:
    """Bundle the logs of `nodes` (homes) into `out`, a .tar.gz; return the names inside. Raises LocalFault if it cannot
    be written."""
    inside: list[str] = []

    def add(bundle: tarfile.TarFile, name: str, text: str) -> None:
        data = (text if hide is None else hide.text(text)).encode()
        row = tarfile.TarInfo(name)
        row.size, row.mode = len(data), 0o600
        bundle.addfile(row, io.BytesIO(data))
        inside.append(name)

    try:
        with (
            atomic_file(out) as raw,
            gzip.GzipFile("", "wb", 6, raw, 0) as packed,
            tarfile.open(fileobj=packed, mode="w") as bundle,
        ):
            add(bundle, "about.json", json.dumps(about(), indent=1))
            for index, home in enumerate(nodes):
                for name in FILES:
                    if (home / name).is_file():
                        add(bundle, f"{index:02d}-{home.name}/{name}", _tail(home / name))
    except OSError as error:
        raise write_fault(out, error, advice="free space there, or give another --out") from None
    return inside


def _tail(path: Path) -> str:
    """The text of `path`; of a long file only whole lines at its end."""
    with path.open("rb") as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(max(0, size - FILE_BYTES_MAX))
        data = file.read()
    if size > FILE_BYTES_MAX:
        data = data.partition(b"\n")[2]
    return data.decode(errors="replace")

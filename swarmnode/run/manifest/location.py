"""Locations of a data set's or base model's files: URLs allowed in a manifest, and the HTTP URL for each.

No URL can hold a key, name a file, or carry a query. A host's address is checked when it is asked (data/web.py): this
module never resolves a name.
"""

from __future__ import annotations

import re
from typing import Any

from swarmnode.run.manifest.check import TEXT_MAX, ValueCheck

_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_PATH = rf"(?:/{_NAME})*"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_WEB = re.compile(rf"(https?)://({_LABEL}(?:\.{_LABEL})*|\[[0-9A-Fa-f:.]+\])(?::([0-9]{{1,5}}))?({_PATH})/?")
_BUCKET = re.compile(rf"(s3|gs)://([a-z0-9][a-z0-9.-]{{1,61}}[a-z0-9])({_PATH})/?")
_HUB = re.compile(rf"hf://(datasets/)?({_NAME}/{_NAME})(?:@({_NAME}))?({_PATH})/?")
_PLACES = "https://HOST/PATH, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or"
ALLOWED = f"{_PLACES} hf://datasets/USER/NAME[@REVISION][/PATH]"
MODELS_ALLOWED = f"{_PLACES} hf://USER/NAME[@REVISION][/PATH]"
_KINDS = ("datasets", "models", "spaces")  # of the hub's repositories: no user is called so


def base_url(text: str) -> str | None:
    """The http or https URL, without a final slash, of the folder with the files of `text`; None if `text` is not a
    valid location. Public buckets and the hub are asked over HTTPS without a key."""
    if len(text) > TEXT_MAX or ".." in text:
        return None
    if match := _WEB.fullmatch(text):
        scheme, host, port, path = match.groups()
        if port is not None and not 1 <= int(port) <= 65535:
            return None
        return f"{scheme}://{host}{'' if port is None else f':{int(port)}'}{path}"
    if match := _BUCKET.fullmatch(text):
        scheme, bucket, path = match.groups()
        if re.fullmatch(r"[0-9.]+", bucket):
            return None
        if scheme == "gs":
            return f"https://storage.googleapis.com/{bucket}{path}"
        # A certificate for *.s3.amazonaws.com does not cover names with dots.
        inside = "." in bucket
        return f"https://s3.amazonaws.com/{bucket}{path}" if inside else f"https://{bucket}.s3.amazonaws.com{path}"
    if match := _HUB.fullmatch(text):
        kind, name, revision, path = match.groups()
        if kind is None and name.partition("/")[0] in _KINDS:
            return None
        return f"https://huggingface.co/{kind or ''}{name}/resolve/{revision or 'main'}{path}"
    return None


def hub_model(text: str) -> tuple[str, str] | None:
    """(USER/NAME, revision, "" for the newest) of a location that is a whole repository of a model on the hub."""
    match = _HUB.fullmatch(text)
    if match is None or match[1] is not None or match[4]:
        return None
    return match[2], match[3] or ""


def is_model_location(text: str) -> bool:
    """Whether `text` is a location that a model may have: of the hub's repositories a model's, not a data set's."""
    return base_url(text) is not None and not text.startswith("hf://datasets/")


def location(*, models: bool = False) -> ValueCheck:
    """Such a URL. `models`: of the hub's repositories models, else data sets."""

    def accept(raw: Any) -> str | None:
        if type(raw) is not str or base_url(raw) is None:
            return None
        other_kind = raw.startswith("hf://") and raw.startswith("hf://datasets/") == models
        return None if other_kind else raw

    return ValueCheck(MODELS_ALLOWED if models else ALLOWED, accept)

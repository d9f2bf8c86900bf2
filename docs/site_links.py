"""A hook of mkdocs: links of pages to files outside docs/ lead to the source (pyproject.toml, [project.urls])."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
OUTSIDE = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """`markdown` with links out of docs/ made absolute."""
    here = (ROOT / "docs" / page.file.src_uri).parent

    def absolute(link: re.Match[str]) -> str:
        target = (here / link[1]).resolve()
        inside = target.is_relative_to(ROOT / "docs")
        return link[0] if inside else f"]({SOURCE}/blob/main/{target.relative_to(ROOT)}"

    return OUTSIDE.sub(absolute, markdown)

"""Code on a page is that of the file that its first line names."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"```python\n# (?P<path>\S+\.py)\n(?P<text>.*?)```", re.DOTALL)
EXCERPTS = [
    (page, match["path"], match["text"])
    for page in sorted((ROOT / "docs").rglob("*.md"))
    for match in BLOCK.finditer(page.read_text())
]


@pytest.mark.parametrize(("page", "path", "text"), EXCERPTS, ids=[path for _, path, _ in EXCERPTS])
def test_an_excerpt_is_in_its_file(page: Path, path: str, text: str) -> None:
    assert text in (ROOT / path).read_text(), f"{page.name}: {path} has other lines now"


def test_how_it_works_shows_the_simplest_forms() -> None:
    shown = {path for page, path, _ in EXCERPTS if page.name == "how-it-works.md"}
    assert shown == {str(path.relative_to(ROOT)) for path in (ROOT / "swarmnode").rglob("*_simple.py")}

"""Pages that are tables of the code say what the code says."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_generated_pages_are_current(tmp_path: pathlib.Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "docs" / "generate.py"), str(tmp_path)], check=True, timeout=120)
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert made
    stale = sorted(page for page, text in made.items() if (ROOT / "docs" / page).read_text() != text)
    assert not stale, f"docs/ is stale ({', '.join(stale)}); say: make docs"

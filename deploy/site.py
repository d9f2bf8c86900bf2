"""Build the documentation as a site in build/site: `make site`.

Links of pages to files outside docs/ are made absolute in a copy, before the site's builder sees them: it needs no hook
and may be another one.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from address import ROOT, SITE, address, with_links

BUILD = ROOT / "build"
PAGES = BUILD / "pages"


def write_pages(where: str) -> Path:
    """Copy docs/ to build/pages for the address `where`; returns the configuration beside it."""
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for page in PAGES.rglob("*.md"):
        name = f"docs/{page.relative_to(PAGES)}"
        page.write_text(with_links(page.read_text(encoding="utf-8"), name, where, inside="docs/"), encoding="utf-8")
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    settings = settings.replace("docs_dir: docs\n", "docs_dir: pages\n").replace(
        "site_dir: build/site", "site_dir: site"
    )
    made = BUILD / "mkdocs.yml"
    made.write_text(f"{settings}site_url: {where}/{SITE}\n", encoding="utf-8")
    return made


def main(builder: str) -> None:
    """Build the site with the program `builder`, strictly."""
    settings = write_pages(address())
    shutil.rmtree(BUILD / "site", ignore_errors=True)
    words = (str(Path(builder).resolve()), "build", "--strict", "-f", str(settings))
    done = subprocess.run(words, cwd=BUILD, check=False, text=True, capture_output=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    sys.stdout.write("build/site/index.html\n")


if __name__ == "__main__":
    main(sys.argv[1])

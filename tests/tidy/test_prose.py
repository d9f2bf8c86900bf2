"""Docstrings begin with their subject, and nothing cites a document outside the repository."""

import ast
import pathlib
import re

from tests.support.package_source import MODULES, ROOT, nodes

CHECKED = ("swarmnode", "swarmsim", "swarmnode_methods", "benchmarks", "tests", "docs", "proto", "deploy")

CLAUSE = re.compile(r"(Who|What|That|So|Whoever|Whatever|Those|Of|As|Where|How)\b")
OUTSIDE = re.compile(r"design section|charter|(hivemind|house|gpu)\.md|test-lab")


def test_docstrings_begin_with_their_subject() -> None:
    clauses = [
        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {text[:60]}"
        for path in MODULES
        for node in nodes(path)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (text := ast.get_docstring(node) or "")
        and CLAUSE.match(text)
    ]
    assert not clauses


def test_nothing_cites_a_document_outside_the_repository() -> None:
    citing = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for folder in CHECKED
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in {".py", ".md", ".proto", ".toml", ".yaml", ".yml", ".sh", ".c", ".html", ".js"}
        and "node_modules" not in path.parts
        and path != pathlib.Path(__file__).resolve()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if OUTSIDE.search(line)
    ]
    assert not citing


def test_lines_of_pages_fit_120_columns() -> None:
    """Tables, code and links stay whole; pages made by docs/generate.py are not checked."""
    made = {"wire.md", "metrics.md", "manifest.md"}
    long = []
    for path in [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]:
        fenced = False
        for number, line in enumerate(path.read_text().splitlines() if path.name not in made else (), 1):
            fenced ^= line.strip().startswith("```")
            if len(line) > 120 and not fenced and not line.startswith(("|", "    ", "```")):
                long.append(f"{path.relative_to(ROOT)}:{number}")
    assert not long

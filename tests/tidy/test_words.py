"""One name for one thing: class and module names, and the glossary. Docstrings begin with their subject, and nothing
cites a document outside the repository."""

import ast
import functools
import pathlib
import re
from collections import defaultdict

import pytest

from swarmnode.app.cli.main import VERBS
from tests.support.package_source import MODULES, PACKAGE, ROOT, nodes

HOUSEHOLD = {"able", "own", "second", "said", "together", "turns", "line", "door", "book", "keeper", "thanks"}


def test_no_class_name_stands_twice() -> None:
    where = defaultdict(list)
    for path in MODULES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                where[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not {name: places for name, places in where.items() if len(places) > 1}


def test_modules_are_named_by_nouns_of_the_field() -> None:
    assert not {path.stem for path in MODULES} & HOUSEHOLD


def rows() -> list[tuple[str, str]]:
    """(word, the last column) of each row of the glossary."""
    table = [line.strip("|").split("|") for line in (ROOT / "docs" / "glossary.md").read_text().splitlines()]
    return [(row[0].strip(), row[-1]) for row in table if len(row) == 3 and "`" in row[-1]]


def test_the_glossary_is_in_order_and_says_each_word_once() -> None:
    words = [word.lower() for word, _ in rows()]
    assert len(words) == len(set(words)) and len(words) >= 50


@functools.cache
def known() -> frozenset[str]:
    """Identifiers of the package, its modules by path, and the fields of a manifest."""
    from swarmnode.run.manifest.spec import BY_NAME

    found = set(BY_NAME)
    for path in MODULES:
        found.add(str(path.relative_to(ROOT)))
        if path.is_relative_to(PACKAGE):
            found.add(str(path.relative_to(PACKAGE)))
        for node in nodes(path):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
    return frozenset(found)


@pytest.mark.parametrize(("word", "column"), rows(), ids=[word for word, _ in rows()])
def test_names_of_the_glossary_exist(word: str, column: str) -> None:
    verbs = re.findall(r"verb `([\w-]+)`", column)
    assert set(verbs) <= set(VERBS)
    names = set(re.findall(r"`([^`]+)`", column)) - set(verbs)
    assert names <= known(), f"{word}: {sorted(names - known())} exist no more"


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

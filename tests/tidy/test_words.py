"""One name for one thing: class and module names, and the glossary."""

import ast
import functools
import re
from collections import defaultdict

import pytest

from swarmnode.cli.main import VERBS
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
    from swarmnode.manifest.spec import BY_NAME

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

"""One statement a line: a tuple assignment unpacks one value or exchanges values, and never saves a line."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.package_source import MODULES, ROOT

FOLDERS = ("tests", "docs", "deploy", "proto", "examples")
FILES = [*MODULES, *sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))]


def reads(value: ast.expr, target: ast.expr) -> bool:
    """Whether `value` reads what `target` names, or a part of it."""
    if isinstance(target, ast.Tuple | ast.List):
        return any(reads(value, part) for part in target.elts)
    place = ast.unparse(target)
    return any(ast.unparse(node) == place for node in ast.walk(value) if isinstance(node, ast.expr))


def needless(source: str) -> Iterator[int]:
    """Lines of `source` with `a, b = x, y` where `a = x` and then `b = y` says the same."""
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
            continue
        for targets in node.targets:
            if not isinstance(targets, ast.Tuple):
                continue
            values = node.value.elts
            if len(values) != len(targets.elts):
                continue
            if any(isinstance(part, ast.Starred) for part in (*values, *targets.elts)):
                continue
            late = ((target, value) for at, target in enumerate(targets.elts) for value in values[at + 1 :])
            if not any(reads(value, target) for target, value in late):
                yield node.lineno


@pytest.mark.parametrize("source", ["a, b = 1, 2", "self.a, b = x, y", "a, b = a + 1, 0", "(a, b), c = f(), 3"])
def test_unrelated_values_in_one_statement_are_found(source: str) -> None:
    assert list(needless(source)) == [1]


@pytest.mark.parametrize("source", ["a, b = b, a", "a, b = f()", "x[0], x[1] = x[1], x[0]", "a, *b = 1, 2", "a = 1, 2"])
def test_exchanges_and_unpacking_are_not(source: str) -> None:
    assert not list(needless(source))


def test_each_statement_has_a_line() -> None:
    found = [f"{path.relative_to(ROOT)}:{line}" for path in FILES for line in needless(path.read_text())]
    assert not found, "write one assignment a line"


def test_each_private_function_is_called() -> None:
    """A class may give a method that the one it is built on calls: where that one does not any more, it never runs."""
    sources = [path.read_text() for path in MODULES]
    words = Counter(word for source in sources for word in re.findall(r"\w+", source))
    defined = Counter(name for source in sources for name in re.findall(r"def (_[a-z]\w*[^_])\(", source))
    assert not {name for name, times in defined.items() if words[name] == times}, "nothing calls these"


def test_no_file_is_left_out() -> None:
    assert Path(__file__).resolve() in FILES

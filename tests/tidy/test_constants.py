"""Numbers on the way of a microbatch and of a round that no test names: a list that shrinks.

A number that can change without a test that notices is a guess that nobody holds. A new one is named in a test of what
it does; one that is named now leaves `unmoved_constants.txt`.
"""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.package_source import PACKAGE, ROOT, tree

LIST = Path(__file__).parent / "unmoved_constants.txt"
HOT = ("train/pipeline", "train/gossip")
WAITING_MAX = 5
"""New ones that may wait for their test, and old ones that may wait to leave the list."""


@functools.cache
def named_in_tests() -> frozenset[str]:
    return frozenset(
        word
        for path in (ROOT / "tests").rglob("*.py")
        for word in re.findall(r"\b_?[A-Z][A-Z0-9_]+\b", path.read_text())
    )


def numbers(module: ast.Module) -> Iterator[str]:
    """Names of the module's constants that are numbers, also products and the like of numbers."""
    for node in module.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        parts = list(ast.walk(node.value))
        plain = all(
            isinstance(part, ast.Constant | ast.BinOp | ast.UnaryOp | ast.operator | ast.unaryop) for part in parts
        )
        is_number = all(isinstance(part.value, int | float) for part in parts if isinstance(part, ast.Constant))
        if isinstance(target, ast.Name) and target.id.isupper() and plain and is_number:
            yield target.id


def unmoved() -> set[str]:
    paths = sorted(path for folder in HOT for path in (PACKAGE / folder).rglob("*.py"))
    return {
        f"{path.relative_to(ROOT)} {name}"
        for path in paths
        for name in numbers(tree(path))
        if name not in named_in_tests()
    }


def test_numbers_that_no_test_names_become_fewer() -> None:
    known = set(LIST.read_text().split("\n")) - {""}
    found = unmoved()
    gone = known - found
    assert len(gone) <= WAITING_MAX, (
        f"a test names them now, or they are gone; take them out of the list: {sorted(gone)}"
    )
    new = found - known
    assert len(new) <= WAITING_MAX, f"name them in a test: {sorted(new)}"


def test_numbers_are_found() -> None:
    module = ast.parse("A = 3\nB: float = -2.0 * 1e3\nC = 'text'\nD = A + 1\nE = f()\nf = 1\nG = 1 << 20")
    assert list(numbers(module)) == ["A", "B", "G"]

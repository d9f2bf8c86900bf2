"""The package stays within a budget of lines and files, and functions have about 50 lines."""

import ast

from tests.support.package_source import MODULES, PRODUCT, ROOT, nodes, tree

# Of `swarmnode/`, and of all packages together, without generated code; CONTRIBUTING.md says how to raise them.
LINES_MAX = 57_900
FILES_MAX = 295
ALL_LINES_MAX = 75_505
GUESSES_MAX = 295
FUNCTION_LINES_MAX = 80
# Of all Python in `tests/`.
TESTS_MAX = 40_000


def test_the_package_stays_within_its_budget() -> None:
    lines = {path: len(path.read_text().splitlines()) for path in MODULES}
    product = sum(lines[path] for path in PRODUCT)
    assert product <= LINES_MAX, "remove what the change replaces, or raise the budget and log it in CONTRIBUTING.md"
    assert len(PRODUCT) <= FILES_MAX, "put the code where its user is, or raise the budget and log it"
    guesses = sum(path.read_text().count("guess") for path in PRODUCT)
    assert guesses <= GUESSES_MAX, "measure or derive a constant, or drop what it is for"
    assert sum(lines.values()) <= ALL_LINES_MAX, "the packages together grew: remove what the change replaces"


def test_the_tests_stay_within_their_budget() -> None:
    """One table in place of like functions, one test of each law, one builder in tests/support."""
    lines = sum(len(path.read_text().splitlines()) for path in (ROOT / "tests").rglob("*.py"))
    assert lines <= TESTS_MAX, "remove what the change replaces, or raise the budget and log it in CONTRIBUTING.md"


def test_functions_fit_a_screen() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in MODULES
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno >= FUNCTION_LINES_MAX
    ]
    assert not long


def test_every_module_says_what_it_is_for() -> None:
    silent = [str(path.relative_to(ROOT)) for path in MODULES if tree(path).body and not ast.get_docstring(tree(path))]
    assert not silent

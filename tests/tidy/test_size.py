"""Modules have about 300 lines and functions about 50. Ruff bounds the complexity of functions (C901)."""

import ast

from tests.support.package_source import MODULES, ROOT, nodes, tree

MODULE_LINES_MAX = 450
FUNCTION_LINES_MAX = 80


def test_modules_are_readable_in_one_go() -> None:
    long = {str(p.relative_to(ROOT)): n for p in MODULES if (n := len(p.read_text().splitlines())) > MODULE_LINES_MAX}
    assert not long


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

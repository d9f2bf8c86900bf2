"""Functions fit a screen, and every module says what it is for. Lines, files and tests have no limit."""

import ast

from tests.support.package_source import MODULES, ROOT, nodes, tree

FUNCTION_LINES_MAX = 80


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

"""Syntax trees of the package's modules, parsed and walked once for all tests that read them."""

import ast
import functools
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "swarmnode"
BESIDE = ("swarmsim", "swarmnode_methods", "benchmarks")
PRODUCT = sorted(path for path in PACKAGE.rglob("*.py") if "wire" not in path.parts)
MODULES = sorted([*PRODUCT, *(path for folder in BESIDE for path in (ROOT / folder).rglob("*.py"))])


@functools.cache
def tree(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def nodes(path: pathlib.Path) -> tuple[ast.AST, ...]:
    """All nodes of a module, as ast.walk gives them."""
    return tuple(ast.walk(tree(path)))

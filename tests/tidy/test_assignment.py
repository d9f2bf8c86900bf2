"""Only a class itself sets its attributes: an assignment `x.y = ...` in another module hides who changes what when."""

import ast
from collections.abc import Iterator

from tests.support.package_source import MODULES, ROOT, tree

# Those of today: on objects of libraries that are set up so, on messages that came from elsewhere, and those of the
# simulator on its parts. The number may only fall.
OUTSIDE_MAX = 130


def protobuf_modules(module: ast.Module) -> set[str]:
    """Names under which `module` imports generated message modules."""
    return {
        alias.asname or alias.name
        for node in ast.walk(module)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name.endswith("_pb2")
    }


def targets(node: ast.AST) -> Iterator[ast.expr]:
    """The single targets of an assignment, with tuples taken apart."""
    if isinstance(node, ast.Assign):
        waiting = list(node.targets)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        waiting = [node.target]
    else:
        return
    while waiting:
        target = waiting.pop()
        if isinstance(target, ast.Tuple | ast.List):
            waiting += target.elts
        else:
            yield target


def own_attributes(module: ast.Module) -> set[str]:
    """Attributes of the classes that this module defines."""
    found: set[str] = set()
    for each in ast.walk(module):
        if not isinstance(each, ast.ClassDef):
            continue
        for node in ast.walk(each):
            for target in targets(node):
                if isinstance(target, ast.Name):
                    found.add(target.id)
                elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                    found |= {target.attr} if target.value.id == "self" else set()
            if isinstance(node, ast.FunctionDef):
                found.add(node.name)
    return found


def messages(function: ast.AST, modules: set[str]) -> set[str]:
    """Names in `function` that hold protobuf messages: parameters by annotation, and what is built there."""

    def is_message(node: ast.expr | None) -> bool:
        return any(isinstance(one, ast.Name) and one.id in modules for one in ast.walk(node)) if node else False

    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.arg) and is_message(node.annotation):
            found.add(node.arg)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and is_message(node.value.func):
            found |= {target.id for target in targets(node) if isinstance(target, ast.Name)}
    return found


def foreign(module: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, target) of each assignment to an attribute of an object whose class another module defines."""
    own, modules = own_attributes(module), protobuf_modules(module)
    here = messages(module, modules)
    for node in ast.walk(module):
        for target in targets(node):
            if not isinstance(target, ast.Attribute):
                continue
            root: ast.expr = target.value
            while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
                root = root.func if isinstance(root, ast.Call) else root.value
            name = root.id if isinstance(root, ast.Name) else ""
            itself = isinstance(target.value, ast.Name) and name in ("self", "cls")
            if not itself and target.attr not in own and name not in here:
                yield target.lineno, ast.unparse(target)


def test_only_a_class_sets_its_attributes() -> None:
    outside = [f"{path.relative_to(ROOT)}:{line}: {target}" for path in MODULES for line, target in foreign(tree(path))]
    assert len(outside) <= OUTSIDE_MAX, "give the class a method or a constructor argument instead:\n" + "\n".join(
        outside
    )


def test_the_search_finds_what_it_is_for() -> None:
    text = """
from swarmnode.wire import call_pb2 as wire
class Mine:
    count: int
def work(other, mine, header: wire.Request):
    other.callback, mine.count, header.run_id = 1, 2, ""
    reply = wire.Reply()
    reply.status = 1
    other.part.speed += 1
"""
    assert sorted(target for _, target in foreign(ast.parse(text))) == ["other.callback", "other.part.speed"]

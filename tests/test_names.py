"""Names: one for one thing, and the plain word; and files short enough to be read at once."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(path for package in ("clusterattn", "clusterattn_papers") for path in (ROOT / package).rglob("*.py"))
TREES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}

# words that once stood for a thing with a plainer name
CUTE = {"hall", "room", "roll", "serve", "lottery", "strata", "some", "said", "hand", "told", "how"}
ROLLED = "roll"  # torch.roll is torch's word
LONGEST = 450  # lines of a file
LONGEST_BODY = 60  # lines of a function, from behind its docstring; a kernel is one piece whatever its length


def test_no_file_is_too_long() -> None:
    lines = {path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert {path: count for path, count in lines.items() if count > LONGEST} == {}


def bodies(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Functions of Python, with the lines of what they do."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not any("jit" in ast.unparse(each) for each in node.decorator_list):
            first = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0]
            yield node.name, (node.end_lineno or 0) - first.lineno + 1


def test_no_function_is_too_long() -> None:
    found = {f"{path} {name}": lines for path, tree in TREES.items() for name, lines in bodies(tree)}
    assert {name for name, lines in found.items() if lines > LONGEST_BODY} == set()


def test_no_two_classes_share_a_name() -> None:
    places = defaultdict(list)
    for path, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_function_shadows_its_module() -> None:
    """``from .swap import swap`` in a package: its module could no longer be reached by its name."""
    shadowed = [
        f"{path}: {node.module}"
        for path, tree in TREES.items()
        if path.endswith("/__init__.py")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level == 1
        for each in node.names
        if (each.asname or each.name) == node.module
    ]
    assert shadowed == []


def test_what_a_method_can_do_is_not_asked_by_its_name() -> None:
    """But declared on its class: whoever adds a method need not look for its name elsewhere."""
    asked = [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for path, tree in TREES.items()
        if path.startswith(("clusterattn/nn/", "clusterattn/measure/", "clusterattn/_"))
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        and re.search(r"(method|recipe)\.name\b", ast.unparse(node.left))
        and not any(isinstance(each, ast.Name) for each in node.comparators)  # a list of what to show is no question
    ]
    assert asked == []


def identifiers(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and node.attr != ROLLED:
            found.add(node.attr)
    return found


def test_identifiers_are_plain_words() -> None:
    cute = {
        (path, name)
        for path, tree in TREES.items()
        for name in identifiers(tree)
        if CUTE & set(name.lower().split("_"))
    }
    assert sorted(cute) == []

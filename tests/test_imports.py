"""The import graph, drawn from the source: imports go down the layers, and packages make no circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("clusterattn", "clusterattn_papers")

# From the ground up. A module may import from its own layer and from those below; modules that no line names are
# below everything ("_errors", "_files", ...) and import nothing but each other.
LAYERS = (
    (
        "clusterattn._errors",
        "clusterattn._files",
        "clusterattn._extras",
        "clusterattn._version",
        "clusterattn._moved",
        "clusterattn._progress",
    ),
    ("clusterattn._rows", "clusterattn._types"),
    ("clusterattn.ops",),
    ("clusterattn.methods",),
    ("clusterattn._documents",),
    (
        "clusterattn._attention",
        "clusterattn._checks",
        "clusterattn._replay",
        "clusterattn._options",
        "clusterattn._varlen",
        "clusterattn._warm_up",
        "clusterattn._plan",
        "clusterattn._report",
        "clusterattn._layer_call",
    ),
    ("clusterattn.parallel",),
    ("clusterattn.nn",),
    ("clusterattn.hf", "clusterattn.hosts"),
    ("clusterattn.measure",),
    ("clusterattn.tuning",),
    ("clusterattn",),  # the public names
    ("clusterattn.cli",),
    ("clusterattn.__main__",),
    ("clusterattn_papers.models", "clusterattn_papers.clustering"),
    ("clusterattn_papers.tasks",),
    ("clusterattn_papers.train",),
    ("clusterattn_papers.reproduce",),
    ("clusterattn_papers",),
)


def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imported(name: str, path: Path) -> Iterator[tuple[str, int]]:
    """Our modules that a module imports, at its head or in a function; not what is for type checkers alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from ((each.name, node.lineno) for each in node.names if each.name.split(".")[0] in PACKAGES)
        elif isinstance(node, ast.ImportFrom):
            up = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*up, *([node.module] if node.module else [])])
            if base.split(".")[0] in PACKAGES:
                for each in node.names:  # a module of the package, or a name inside it
                    inner = f"{base}.{each.name}"
                    yield (inner if inner in MODULES else base), node.lineno


def layer(name: str) -> tuple[int, str]:
    """Its number, and the line of LAYERS that names it: the longest that fits."""
    fits = [
        (len(each), number, each)
        for number, line in enumerate(LAYERS)
        for each in line
        if name == each or name.startswith(each + ".")
    ]
    assert fits, name
    _, number, each = max(fits)
    return number, each


ARROWS = sorted({(name, target, line) for name, path in MODULES.items() for target, line in imported(name, path)})


def test_the_layers_name_every_module() -> None:
    top = {name for name in MODULES if name.count(".") == 1 and name.startswith("clusterattn.")}
    unnamed = [name for name in sorted(top) if layer(name)[1] == "clusterattn"]
    assert unnamed == [], "say in LAYERS where it belongs"


def test_no_arrow_goes_up() -> None:
    up = [f"{name}:{line} imports {target}" for name, target, line in ARROWS if layer(target)[0] > layer(name)[0]]
    assert up == []


def test_the_library_does_not_import_the_papers() -> None:
    assert [arrow for arrow in ARROWS if arrow[0].split(".")[0] == "clusterattn" and "papers" in arrow[1]] == []


def test_packages_make_no_circle() -> None:
    """Between the folders of LAYERS: what can be reached from a package never reaches back."""
    edges: dict[str, set[str]] = {}
    for name, target, _ in ARROWS:
        one, other = layer(name)[1], layer(target)[1]
        if one != other:
            edges.setdefault(one, set()).add(other)

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        left = [start]
        while left:
            for each in edges.get(left.pop(), set()) - seen:
                seen.add(each)
                left.append(each)
        return seen

    circles = {
        frozenset({each, *(o for o in reached(each) if each in reached(o))}) for each in edges if each in reached(each)
    }
    assert not circles


@pytest.mark.parametrize("name", ["clusterattn.ops", "clusterattn._attention", "clusterattn_papers.train.loop"])
def test_the_graph_was_drawn(name: str) -> None:
    """A test that sees no arrows would pass whatever the code did."""
    assert any(arrow[0] == name for arrow in ARROWS)

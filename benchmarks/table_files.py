"""The file tree of docs/contributing.md: one line for each file, in the words of its own docstring."""

from __future__ import annotations

import ast
from pathlib import Path

from table_words import ROOT

FOLDERS = ("clusterattn", "clusterattn_papers", "benchmarks", "tests")
OTHERS = {  # files that have no docstring
    "clusterattn/data/SOURCE.md": "Where the samples come from, and their licence.",
    "clusterattn/data/minilm_alice.safetensors": "The short sample.",
    "clusterattn/data/tabpfn_mnist.safetensors": "The long one.",
    "clusterattn/data/crossings.json": "Where Refined overtakes exact attention, by device.",
    "clusterattn/measure/report.html.jinja": "The page of `compare`.",
    "clusterattn/measure/comparison.html.jinja": "One sample in it.",
    "clusterattn/measure/approximate.html.jinja": "The page of `approximate`.",
    "clusterattn/measure/style.html.jinja": "What both look like.",
    "clusterattn_papers/reproduce/results.html.jinja": "The page of `report`.",
}


def first_line(path: Path) -> str:
    """What a module says of itself first."""
    said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if not said:
        raise ValueError(f"wanted a docstring that says what the file is for, got none in {path}")
    line, _, more = said.partition("\n")
    return line.replace("``", "`") + (" …" if more and not more.startswith("\n") else "")


def files_tree() -> str:
    """Folders in the order of FOLDERS, two spaces for each level; files before the folders beside them."""
    lines: list[tuple[str, str]] = []
    for folder in FOLDERS:
        known = [path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts]
        known += [Path(path) for path in OTHERS if Path(path).parts[0] == folder]
        seen: set[Path] = set()
        for path in sorted(known, key=lambda path: [(part != path.name, part) for part in path.parts]):
            for parent in reversed(path.parents[:-1]):
                if parent not in seen:
                    seen.add(parent)
                    lines.append(("  " * (len(parent.parts) - 1) + parent.name + "/", ""))
            words = OTHERS.get(path.as_posix()) or first_line(ROOT / path)
            lines.append(("  " * (len(path.parts) - 1) + path.name, words))
    width = max(len(name) for name, words in lines if words) + 2
    return "```text\n" + "".join(f"{name:<{width}}{words}".rstrip() + "\n" for name, words in lines) + "```\n"

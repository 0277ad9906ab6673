"""The README keeps its word: its code runs, its files and commands exist, its tables say what the rows say."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import clusterattn as ca

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def test_every_snippet_runs_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    torch.manual_seed(0)
    known = dict(ca.METHODS)
    names: dict[str, Any] = {"__name__": "readme"}
    try:
        for number, code in enumerate(blocks("python"), start=1):
            exec(compile(code, f"README.md, python block {number}", "exec", dont_inherit=True), names)
        assert isinstance(ca.METHODS["strided"](), ca.Method)
    finally:  # the walk-through registers a method
        ca.METHODS.clear()
        ca.METHODS.update(known)
    assert 0 < names["share"] < 1
    assert names["lse"].shape == (2, 8, 1024)
    assert names["prefill"].causality == "value"


# ---- files ---------------------------------------------------------------------------------------


def tree() -> set[str]:
    """The paths of the file tree: two spaces of indentation for each folder."""
    (drawn,) = blocks("text")
    found, folders = set(), []
    for line in filter(str.strip, drawn.splitlines()):
        depth, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        assert len(line.split()) > 1 or name.endswith("/"), f"no word about {name}"
        path = "/".join([*folders[:depth], name.rstrip("/")])
        if name.endswith("/"):
            folders = [*folders[:depth], name.rstrip("/")]
        found.add(path)
    return found


def test_every_file_of_the_tree_exists() -> None:
    assert [path for path in sorted(tree()) if not (ROOT / path).exists()] == []


def test_every_python_file_is_in_the_tree() -> None:
    for folder in ("clusterattn", "clusterattn_papers", "benchmarks", "tests"):
        here = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.py")}
        assert sorted(here - tree()) == []


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_picture_is_small() -> None:
    assert (ROOT / "docs" / "img" / "pareto.png").stat().st_size < 150_000


# ---- commands ------------------------------------------------------------------------------------


def commands() -> list[list[str]]:
    lines = "".join(blocks("sh")).splitlines()
    return [line.partition("#")[0].split() for line in lines if line.startswith("clusterattn ")]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_and_their_options_exist(words: list[str]) -> None:
    pytest.importorskip("typer")
    from typer.main import get_command
    from typer.testing import CliRunner

    from clusterattn import cli

    _, command, *rest = words
    shown = CliRunner().invoke(cli.build(), [command, "--help"])
    assert shown.exit_code == 0, shown.output
    parameters = get_command(cli.build()).commands[command].params  # type: ignore[attr-defined]
    known = {name for each in parameters for name in (*each.opts, *each.secondary_opts)}
    assert {word for word in rest if word.startswith("--")} <= known


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        asked = re.findall(r"(?:^|`)make ([a-z]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert set(asked) <= targets, page.name


# ---- tables --------------------------------------------------------------------------------------


def test_the_table_of_methods_is_true() -> None:
    """Every class, its defaults, its kind of causality, cross-attention and state."""
    lines = re.findall(r"^\| `(\w+)\((.*?)\)` \|(.*)\|$", README, re.MULTILINE)
    told = {name: (defaults, [cell.strip() for cell in rest.split("|")]) for name, defaults, rest in lines}
    assert set(told) == {each.__name__ for each in ca.METHODS.values()}
    for kind in ca.METHODS.values():
        method, (defaults, cells) = kind(), told[kind.__name__]
        for name, value in re.findall(r'(\w+)=("\w+"|\w+)', defaults):
            assert getattr(method, name) == ast.literal_eval(value), f"{kind.__name__}({name}={value})"
        _, _, causal, cross, _, state = cells
        both = hasattr(method, "centroids_from")
        assert causal == ("strict or value" if both else method.causality), kind.__name__
        assert cross == ("no" if method.self_only else "yes"), kind.__name__
        assert (state != "–") == method.stateful, kind.__name__


def tables() -> ModuleType:
    where = importlib.util.spec_from_file_location("readme_tables", ROOT / "benchmarks" / "readme_tables.py")
    assert where is not None
    assert where.loader is not None
    module = importlib.util.module_from_spec(where)
    where.loader.exec_module(module)
    return module


@pytest.mark.skipif(not (ROOT / "results").is_dir(), reason="no results/ here: they stay out of the sdist")
def test_tables_say_what_the_rows_say() -> None:
    script = tables()
    for page in script.pages():
        text = page.read_text(encoding="utf-8")
        assert script.filled(text) == text, f"{page.name}: run python benchmarks/readme_tables.py"


def test_tables_of_nothing_are_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tables()
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    for write in script.TABLES.values():
        assert write() == script.NOT_YET
